"""Which places leave when a pool gets smaller: first those whose worker does not serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from baton.config.workers import RegistryConfig, SupervisorConfig
from baton.control_client import ControlClient
from baton.v1 import common_pb2, control_pb2
from cluster.registry.fleet_wire import fleet_message
from cluster.registry.registry import Progress, Registration, Registry, Stream
from cluster.supervisor.replica import Replica, ReplicaName
from cluster.supervisor.supervisor import Supervision
from kv_transfer.process import ProcessIdentity
from tests.cluster.pool_settings import settings_of
from tests.cluster.test_supervision import Keeps, cluster_of, supervision_over, until

POOL = "all"


def process_of(index: int) -> ProcessIdentity:
    return ProcessIdentity("boot", 1, pid=1 + index, start_time_ticks=1)


def register(registry: Registry, pool: str, index: int) -> Stream:
    """A worker that has yet to be live."""
    worker_id = f"{pool}-{index}"
    rank = common_pb2.RankAddress(process=process_of(index).to_proto())
    ref = common_pb2.WorkerRef(worker_id=worker_id, incarnation=1, ranks=[rank])
    info = control_pb2.WorkerInfo(ref=ref, pool=pool).SerializeToString()
    stream = registry.register(Registration(worker_id, 1, pool, info))
    assert stream is not None
    return stream


def serve(registry: Registry, pool: str, index: int) -> None:
    """A live worker."""
    stream = register(registry, pool, index)
    registry.heartbeat(stream, Progress(False, 0.0, 0.01), b"", draining=False)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_nearest_to_serving_stays_longest_then_the_lowest() -> None:
    clock = Clock()
    registry = Registry(RegistryConfig(), clock)
    registry.pools.add(settings_of(), 7)
    for index in range(7):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=index == 4)
    registry.pools.set_pending("decode-0")
    serve(registry, "decode", 5)
    while clock.now <= RegistryConfig().silent_after_s:  # somebody looks all the time
        clock.now += registry.look_s
        registry.refresh()
    for index in (3, 6):
        serve(registry, "decode", index)
    register(registry, "decode", 2)
    staying = [place.index for place in registry.staying("decode")]
    assert staying == [3, 6, 4, 5, 1, 2, 0]  # live; served, silent; starting; pending
    registry.pools.set_leaving("decode-6")
    (told,) = fleet_message(registry.snapshot()).pools
    standings = {
        place.worker_id: place.standing for place in told.places if place.HasField("standing")
    }
    assert [f"decode-{index}" for index in (3, 4, 5, 1, 2, 0)] == sorted(
        standings, key=standings.__getitem__
    )


def test_a_place_is_no_nearer_to_serving_for_an_adopted_worker_that_is_over() -> None:
    registry = Registry(RegistryConfig(forget_after_s=0), Clock())
    book = registry.pools
    book.add(settings_of(), 3)
    book.open_slot("decode", "decode-0")
    for index in (1, 2):
        book.open_slot("decode", f"decode-{index}", is_adopted=True)
        serve(registry, "decode", index)
        registry.gone(f"decode-{index}", 1)
        book.set_pod(f"decode-{index}", None)  # nothing is left there
    registry.refresh()  # and the registry has forgotten it
    book.set_pending("decode-1")
    assert [place.index for place in registry.staying("decode")] == [0, 2, 1]


def test_an_adopted_worker_is_waited_for_until_it_has_told_how_it_stands_or_is_over() -> None:
    registry = Registry(RegistryConfig(), Clock())
    registry.pools.add(settings_of(), 3)
    for index, is_adopted in enumerate((True, True, False)):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=is_adopted)
    registry.pools.set_pod("decode-0", "pod")
    assert registry.awaits_adopted("decode")
    stream = register(registry, "decode", 1)
    assert registry.awaits_adopted("decode")
    registry.heartbeat(stream, Progress(False, 0.0, 0.01), b"", draining=False)
    assert not registry.awaits_adopted("decode")


def indices(supervision: Supervision) -> list[int]:
    return sorted(index for _, index in supervision._keepers)


async def test_a_pool_that_gets_smaller_keeps_the_worker_that_serves(tmp_path: Path) -> None:
    keeps, told = Keeps(), asyncio.get_running_loop().create_future()
    supervision = supervision_over(keeps, cluster_of(replicas=2), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    with ControlClient(await told) as control:
        await until(lambda: len(keeps.configs) == 2)
        serve(supervision._registry, POOL, 1)
        await asyncio.to_thread(control.set_replicas, POOL, 1)
        await until(lambda: indices(supervision) == [1])
        await asyncio.to_thread(control.set_replicas, POOL, 3)
        await until(lambda: len(keeps.configs) == 4)
        assert indices(supervision) == [0, 1, 2]
        assert sorted(config.worker_id for config in keeps.configs[2:]) == ["all-0", "all-2"]
    supervision.stop()
    await asyncio.wait_for(running, 10)


class Finds(Keeps):
    """What a former supervisor left in the pool's first places: those that serve, and others."""

    def __init__(self, *serves: bool) -> None:
        super().__init__()
        self._serves = serves

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        return [
            Replica(ReplicaName(POOL, i, 1), {}, (process_of(i),), serves)
            for i, serves in enumerate(self._serves)
        ]


@contextlib.asynccontextmanager
async def started_again(
    found: Finds, run_dir: Path, replicas: int, fence_after_s: float = 10.0
) -> AsyncIterator[Supervision]:
    """A supervisor that has opened a place for each that it found."""
    limits = SupervisorConfig(fence_after_s=fence_after_s)
    cluster = dataclasses.replace(cluster_of(replicas), supervisor=limits)
    supervision = supervision_over(found, cluster, run_dir)
    running = asyncio.create_task(supervision.run(lambda address: None))
    await asyncio.wait_for(supervision.slots_known(), 10)
    try:
        yield supervision
    finally:
        supervision.stop()
        await asyncio.wait_for(running, 10)


def leaving(supervision: Supervision) -> list[str]:
    places = supervision._registry.pools.slots_of(POOL)
    return [place.worker_id for place in places if place.is_leaving]


async def test_a_supervisor_that_starts_again_keeps_the_worker_that_served(tmp_path: Path) -> None:
    async with started_again(Finds(False, True), tmp_path, replicas=1) as supervision:
        serve(supervision._registry, POOL, 1)
        await until(lambda: indices(supervision) == [1])


async def test_who_leaves_is_chosen_once_all_that_a_former_supervisor_left_have_registered(
    tmp_path: Path,
) -> None:
    async with started_again(Finds(True, True, True), tmp_path, replicas=2) as supervision:
        registry = supervision._registry
        for index in (1, 2):
            serve(registry, POOL, index)
        stream = register(registry, POOL, 0)
        registry.heartbeat(stream, Progress(False, 0.0, 0.01), b"", draining=True)
        await until(lambda: leaving(supervision))
        assert leaving(supervision) == ["all-0"]  # as the former one had told it to


async def test_an_adopted_worker_that_never_registers_is_the_one_that_leaves(
    tmp_path: Path,
) -> None:
    finds = Finds(True, True, True)
    async with started_again(finds, tmp_path, replicas=2, fence_after_s=1.0) as supervision:
        for index in (0, 2):
            serve(supervision._registry, POOL, index)
        await until(lambda: indices(supervision) == [0, 2])
