"""A keeper over a real registry; what it would have Ray do is written down instead."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest

from baton.config.workers import RegistryConfig, SupervisorConfig
from baton.v1 import common_pb2, control_pb2
from cluster.errors import PodLostError
from cluster.registry.control_service import Changes
from cluster.registry.registry import Pool, Progress, Registration, Registry, Stream
from cluster.supervisor.bundles import Spot
from cluster.supervisor.rank_ends import RankEnd
from cluster.supervisor.replica import Replica, ReplicaName, Replicas
from cluster.supervisor.slot_supervisor import LOOK_S, Ground, Keeper
from cluster.worker.config import WorkerConfig
from kv_transfer.process import ProcessIdentity
from tests.cluster.pool_settings import settings_of

PROCESS = ProcessIdentity("boot", 1, pid=1, start_time_ticks=1)
ADOPTED = Replica(ReplicaName("decode", 1, generation=1), {}, (PROCESS,), serves=True)


class WrittenDown:
    """Replicas that nobody runs; `proves`: whether their end can be proved."""

    def __init__(self, proves: bool = True, has_room: bool = True) -> None:
        self.asked: list[ReplicaName] = []
        self.started: list[ReplicaName] = []
        self.destroyed: list[ReplicaName] = []
        self.has_room = has_room
        self._proves = proves

    def place(self, name: ReplicaName, config: object) -> Spot | None:
        self.asked.append(name)
        return Spot("node", "pod") if self.has_room else None

    def start(self, name: ReplicaName, config: object) -> Replica:
        self.started.append(name)
        return Replica(name, {}, (self.process_of(name),))

    def process_of(self, name: ReplicaName) -> ProcessIdentity:
        return dataclasses.replace(PROCESS, pid=2 + self.started.index(name))

    def destroy(self, replica: Replica) -> bool:
        self.destroyed.append(replica.name)
        return self._proves


class LogFile:
    """All that a keeper itself asks of a worker's config."""

    def log_file(self, rank: int) -> str:
        return f"rank{rank}.log"


@contextmanager
def ground_over(replicas: WrittenDown, **settings: float) -> Iterator[Ground]:
    registry = Registry(RegistryConfig(), time.monotonic)
    registry.pools.add(settings_of(supervisor=SupervisorConfig(**settings)), 1)
    registry.pools.open_place("decode", "decode-1")

    async def look() -> None:
        while True:
            registry.refresh()
            await asyncio.sleep(0.05)

    looking = asyncio.create_task(look())
    try:
        with ThreadPoolExecutor(1) as executor:
            yield Ground(
                registry,
                Changes(),
                cast(Replicas, replicas),
                executor,
                lambda name: cast(WorkerConfig, LogFile()),
            )
    finally:
        looking.cancel()


def registration(incarnation: int, process: ProcessIdentity) -> Registration:
    rank = common_pb2.RankAddress(process=process.to_proto())
    ref = common_pb2.WorkerRef(worker_id="decode-1", incarnation=incarnation, ranks=[rank])
    info = control_pb2.WorkerInfo(ref=ref).SerializeToString()
    return Registration("decode-1", incarnation, "decode", info)


def serve(registry: Registry, incarnation: int, process: ProcessIdentity) -> Stream:
    """Register and be live."""
    stream = registry.register(registration(incarnation, process))
    assert stream is not None
    registry.heartbeat(stream, Progress(True, 0.0, 0.01), b"", draining=False)
    return stream


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  what is written down has no event
            await asyncio.sleep(0.01)


def pool_of(ground: Ground) -> Pool:
    (pool,) = ground.registry.snapshot().pools
    return pool


def last_error(ground: Ground) -> str:
    return pool_of(ground).last_error


async def test_a_place_without_a_pod_is_pending_and_filled_as_soon_as_there_is_one() -> None:
    replicas = WrittenDown(has_room=False)
    with ground_over(replicas) as ground:
        keeper = Keeper("decode", 1, ground, None)
        running = asyncio.create_task(keeper.run())
        await until(lambda: len(replicas.asked) >= 3)
        assert pool_of(ground).pending_replicas == 1
        assert (last_error(ground), pool_of(ground).num_failed_starts) == ("", 0)
        replicas.has_room, came_at = True, time.monotonic()
        await until(lambda: replicas.started)
        assert time.monotonic() - came_at < 10 * LOOK_S
        assert set(replicas.asked) == set(replicas.started)  # one place, asked for all the time
        assert pool_of(ground).pending_replicas == 0
        keeper.end_now()
        await asyncio.wait_for(running, 10)


async def test_a_place_that_waits_for_a_pod_and_is_let_go_is_asked_for_no_more() -> None:
    replicas = WrittenDown(has_room=False)
    with ground_over(replicas) as ground:
        keeper = Keeper("decode", 1, ground, None)
        running = asyncio.create_task(keeper.run())
        await until(lambda: pool_of(ground).pending_replicas)
        keeper.let_go()
        await asyncio.wait_for(running, 10)
        assert replicas.destroyed == [replicas.asked[0]]
        assert pool_of(ground).pending_replicas == 0


def pods_told(ground: Ground) -> list[str | None]:
    return [place.pod_name for place in pool_of(ground).places]


async def test_a_place_tells_its_pod_before_its_worker_registers_and_none_once_that_is_over() -> (
    None
):
    replicas, found = WrittenDown(), dataclasses.replace(ADOPTED, pod_name="former pod")
    with ground_over(replicas) as ground:
        ground.registry.pools.open_place("decode", "decode-1", "former pod", is_adopted=True)
        keeper = Keeper("decode", 1, ground, found)
        running = asyncio.create_task(keeper.run())
        await asyncio.wait({running}, timeout=0.1)
        (place,) = pool_of(ground).places
        assert (place.pod_name, place.is_adopted) == ("former pod", True)
        replicas.has_room = False
        keeper.ended(RankEnd(ADOPTED.name, 0, "killed"))
        await until(lambda: pool_of(ground).pending_replicas)
        (place,) = pool_of(ground).places
        assert (place.pod_name, place.is_adopted) == (None, False)
        replicas.has_room = True
        await until(lambda: pods_told(ground) == ["pod"])
        assert ground.registry.snapshot().workers == ()
        keeper.end_now()
        await asyncio.wait_for(running, 10)
        assert pods_told(ground) == [None]


class SlowEnds(WrittenDown):
    """An end takes until `go_on`, and the first one fails even then."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def destroy(self, replica: Replica) -> bool:
        super().destroy(replica)
        assert self.go_on.wait(10)
        if len(self.destroyed) == 1:
            raise OSError("its machine does not answer")
        return True


async def test_an_adopted_worker_that_failed_is_awaited_no_more_before_its_end_is_proved() -> None:
    replicas = SlowEnds()
    with ground_over(replicas) as ground:
        registry = ground.registry
        registry.pools.open_place("decode", "decode-1", "former pod", is_adopted=True)
        keeper = Keeper("decode", 1, ground, ADOPTED)
        running = asyncio.create_task(keeper.run())
        await asyncio.wait({running}, timeout=0.1)
        assert registry.awaits_adopted("decode")
        version = registry.refresh()
        keeper.ended(RankEnd(ADOPTED.name, 0, "killed"))
        await until(lambda: replicas.destroyed)
        assert not registry.awaits_adopted("decode")
        assert registry.refresh() > version
        assert pods_told(ground) == ["former pod"]  # something may be left there
        replicas.go_on.set()
        with pytest.raises(OSError, match="does not answer"):
            await asyncio.wait_for(running, 10)
        assert not registry.awaits_adopted("decode")
        keeper.end_now()
        await asyncio.wait_for(keeper.run(), 10)


class LostPods(WrittenDown):
    """The first pod goes as soon as it has come."""

    def start(self, name: ReplicaName, config: object) -> Replica:
        if len(set(self.asked)) == 1:
            raise PodLostError("its pod went away")
        return super().start(name, config)


async def test_a_pod_that_goes_before_anything_runs_there_is_no_failed_start() -> None:
    replicas = LostPods()
    with ground_over(replicas) as ground:
        keeper = Keeper("decode", 1, ground, None)
        running = asyncio.create_task(keeper.run())
        await until(lambda: replicas.started)
        assert (last_error(ground), pool_of(ground).num_failed_starts) == ("", 0)
        assert len(set(replicas.asked)) == 2
        keeper.end_now()
        await asyncio.wait_for(running, 10)


async def test_a_drain_goes_on_when_the_supervisor_is_back_before_its_worker_registers() -> None:
    replicas = WrittenDown()
    with ground_over(replicas) as ground:
        registry = ground.registry
        keeper = Keeper("decode", 1, ground, ADOPTED)
        running = asyncio.create_task(keeper.run())
        keeper.let_go()
        await asyncio.wait({running}, timeout=0.1)
        assert replicas.destroyed == []  # it drains: only the registry has not heard of it yet

        stream = serve(registry, 7, PROCESS)
        await until(lambda: registry.drain_asked(stream))
        assert replicas.destroyed == []

        keeper.ended(RankEnd(ADOPTED.name, 0, None))
        await asyncio.wait_for(running, 10)
        assert replicas.destroyed == [ADOPTED.name]


@pytest.mark.parametrize(("serves", "ends"), [(True, 1), (False, 0)])
async def test_a_replica_found_serving_that_does_not_register_again_is_soon_taken_for_hung(
    serves: bool, ends: int
) -> None:
    """One that was still loading has the whole start's time."""
    replicas, found = WrittenDown(), dataclasses.replace(ADOPTED, serves=serves)
    with ground_over(replicas, fence_after_s=0.01) as ground:
        keeper = Keeper("decode", 1, ground, found)
        running = asyncio.create_task(keeper.run())
        if ends:
            await until(lambda: replicas.destroyed)
        await asyncio.wait({running}, timeout=2.5 * LOOK_S)
        assert len(replicas.destroyed) == ends
        assert last_error(ground).startswith("decode-1: did not register") == serves
        keeper.end_now()
        await asyncio.wait_for(running, 10)


async def test_a_replica_that_the_registry_gives_up_for_gone_has_failed_and_that_is_told() -> None:
    replicas = WrittenDown()
    with ground_over(replicas) as ground:
        registry = ground.registry
        keeper = Keeper("decode", 1, ground, ADOPTED)
        running = asyncio.create_task(keeper.run())
        assert registry.register(registration(7, PROCESS)) is not None
        registry.gone("decode-1", 7)
        await until(lambda: replicas.destroyed)
        await until(lambda: last_error(ground))
        assert "decode-1: not heard of for so long" in last_error(ground)
        keeper.end_now()
        await asyncio.wait_for(running, 10)


async def test_a_replica_whose_end_cannot_be_proved_is_told_and_its_place_filled_again() -> None:
    replicas = WrittenDown(proves=False)
    with ground_over(replicas) as ground:
        keeper = Keeper("decode", 1, ground, ADOPTED)
        running = asyncio.create_task(keeper.run())
        keeper.ended(RankEnd(ADOPTED.name, 0, "boom"))
        await until(lambda: replicas.started)
        told = "decode-1.g1: not every process is known to be over (log: rank0.log)"
        assert last_error(ground) == f"decode-1: rank 0: boom; {told}"
        keeper.end_now()  # nobody wants it, but what it holds is still held
        await asyncio.wait_for(running, 10)
        assert "not every process is known to be over" in last_error(ground)


async def test_a_successor_whose_clock_was_set_back_is_known_by_its_processes() -> None:
    replicas = WrittenDown()
    with ground_over(replicas, start_timeout_s=2.5 * LOOK_S) as ground:
        keeper = Keeper("decode", 1, ground, ADOPTED)
        running = asyncio.create_task(keeper.run())
        serve(ground.registry, 1000, PROCESS)
        keeper.ended(RankEnd(ADOPTED.name, 0, "killed"))
        await until(lambda: replicas.started)
        (successor,) = replicas.started
        serve(ground.registry, 10, replicas.process_of(successor))  # an hour smaller: taken in
        await asyncio.wait({running}, timeout=5 * LOOK_S)
        assert replicas.destroyed == [ADOPTED.name]
        assert last_error(ground) == ""
        keeper.end_now()
        await asyncio.wait_for(running, 10)


async def test_what_is_left_of_a_former_replica_does_not_stand_for_the_one_that_follows() -> None:
    replicas = WrittenDown(proves=False)
    with ground_over(replicas, start_timeout_s=2.5 * LOOK_S) as ground:
        keeper = Keeper("decode", 1, ground, ADOPTED)
        running = asyncio.create_task(keeper.run())
        keeper.ended(RankEnd(ADOPTED.name, 0, "boom"))
        await until(lambda: replicas.started)
        serve(ground.registry, 1000, PROCESS)  # it is heard of again, the one that follows is not
        await until(lambda: "did not register" in last_error(ground))
        assert replicas.destroyed == [ADOPTED.name, replicas.started[0]]
        keeper.end_now()
        await asyncio.wait_for(running, 10)


async def test_an_adopted_replica_that_never_served_has_failed_to_start() -> None:
    replicas, found = WrittenDown(), dataclasses.replace(ADOPTED, serves=False)
    with ground_over(replicas) as ground:
        keeper = Keeper("decode", 1, ground, found)
        running = asyncio.create_task(keeper.run())
        keeper.ended(RankEnd(ADOPTED.name, 0, "no such model"))
        await until(lambda: last_error(ground))
        assert ground.registry.snapshot().pools[0].num_failed_starts == 1
        keeper.end_now()
        await asyncio.wait_for(running, 10)


async def test_an_adopted_replica_that_still_loads_is_let_go_at_once() -> None:
    replicas, found = WrittenDown(), dataclasses.replace(ADOPTED, serves=False)
    with ground_over(replicas) as ground:
        keeper = Keeper("decode", 1, ground, found)
        running = asyncio.create_task(keeper.run())
        keeper.let_go()
        await asyncio.wait_for(running, 5)
        assert replicas.destroyed == [ADOPTED.name]
