"""Which places leave when a pool gets smaller: first those whose worker does not serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from baton.control_client import ControlClient
from baton.v1 import common_pb2, control_pb2
from cluster.config import RegistryConfig
from cluster.fleet_wire import fleet_message
from cluster.registry import Progress, Registration, Registry, Stream
from cluster.replica import Replica, ReplicaName
from cluster.supervisor import Supervision
from tests.cluster.pool_settings import settings_of
from tests.cluster.test_supervision import Keeps, cluster_of, supervision_over, until

POOL = "all"


def register(registry: Registry, pool: str, index: int) -> Stream:
    """A worker that has yet to be live."""
    worker_id = f"{pool}-{index}"
    ref = common_pb2.WorkerRef(worker_id=worker_id, incarnation=1)
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
        registry.pools.open_place("decode", f"decode-{index}", is_adopted=index == 4)
    registry.pools.waits("decode-0")
    serve(registry, "decode", 5)
    while clock.now <= RegistryConfig().silent_after_s:  # somebody looks all the time
        clock.now += registry.look_s
        registry.refresh()
    for index in (3, 6):
        serve(registry, "decode", index)
    register(registry, "decode", 2)
    staying = [place.index for place in registry.staying("decode")]
    assert staying == [3, 6, 4, 5, 1, 2, 0]  # live; served, silent; starting; pending
    registry.pools.leaves("decode-6")
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
    book.open_place("decode", "decode-0")
    for index in (1, 2):
        book.open_place("decode", f"decode-{index}", is_adopted=True)
        serve(registry, "decode", index)
        registry.gone(f"decode-{index}", 1)
        book.placed(f"decode-{index}", None)  # nothing is left there
    registry.refresh()  # and the registry has forgotten it
    book.waits("decode-1")
    assert [place.index for place in registry.staying("decode")] == [0, 2, 1]


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
    """What a former supervisor left: one that starts, and a higher one that serves."""

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        return [Replica(ReplicaName(POOL, i, 1), {}, (), serves=i == 1) for i in (0, 1)]


async def test_a_supervisor_that_starts_again_keeps_the_worker_that_served(tmp_path: Path) -> None:
    told = asyncio.get_running_loop().create_future()
    supervision = supervision_over(Finds(), cluster_of(replicas=1), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    await told
    await until(lambda: indices(supervision) == [1])
    supervision.stop()
    await asyncio.wait_for(running, 10)
