"""Which slots leave when a pool gets smaller: first those whose worker does not serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from baton.config.workers import RegistryConfig, SupervisorConfig
from cluster.registry.fleet_wire import fleet_message
from cluster.registry.registry import Registry
from cluster.supervisor.supervisor import Supervision
from kv_transfer.clock import ManualClock
from tests.cluster.memory_replicas import (
    POOL,
    MemoryReplicas,
    cluster_of,
    controlled,
    replica_of,
    supervised,
    until,
)
from tests.cluster.pool_settings import settings_of
from tests.cluster.registered import beat, pass_s, register, serve


def test_what_is_nearest_to_serving_stays_longest_then_the_lowest() -> None:
    clock = ManualClock()
    registry = Registry(RegistryConfig(), clock.now_s)
    registry.pools.add(settings_of(), 7)
    for index in range(7):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=index == 4)
    registry.pools.set_pending("decode-0")
    serve(registry, "decode", 5)
    pass_s(clock, registry, RegistryConfig().silent_after_s + 0.1)
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
    registry = Registry(RegistryConfig(forget_after_s=0), ManualClock().now_s)
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
    registry = Registry(RegistryConfig(), ManualClock().now_s)
    registry.pools.add(settings_of(), 3)
    for index, is_adopted in enumerate((True, True, False)):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=is_adopted)
    registry.pools.set_pod("decode-0", "pod")
    assert registry.awaits_adopted("decode")
    stream = register(registry, "decode", 1)
    assert registry.awaits_adopted("decode")
    beat(registry, stream)
    assert not registry.awaits_adopted("decode")


def indices(supervision: Supervision) -> list[int]:
    return sorted(slot.index for slot in registry_of(supervision).pools.slots_of(POOL))


def registry_of(supervision: Supervision) -> Registry:
    return supervision._registry  # the wire has no call that registers a worker without a process


async def test_a_pool_that_gets_smaller_keeps_the_worker_that_serves(tmp_path: Path) -> None:
    replicas = MemoryReplicas()
    cluster = cluster_of(replicas=2)
    async with controlled(replicas, cluster, tmp_path) as (supervision, control):
        await until(lambda: len(replicas.started) == 2)
        serve(registry_of(supervision), POOL, 1)
        await asyncio.to_thread(control.set_replicas, POOL, 1)
        await until(lambda: indices(supervision) == [1])
        await asyncio.to_thread(control.set_replicas, POOL, 3)
        await until(lambda: len(replicas.started) == 4)
        assert indices(supervision) == [0, 1, 2]
        assert sorted(name.worker_id for name in replicas.started[2:]) == ["all-0", "all-2"]


@contextlib.asynccontextmanager
async def restarted(
    run_dir: Path, serves: Sequence[bool], num_replicas: int, fence_after_s: float = 10.0
) -> AsyncIterator[Supervision]:
    """A restarted supervisor that has opened a slot for each replica it found."""
    limits = SupervisorConfig(fence_after_s=fence_after_s)
    cluster = dataclasses.replace(cluster_of(num_replicas), supervisor=limits)
    found = [replica_of(POOL, index, served) for index, served in enumerate(serves)]
    async with supervised(MemoryReplicas(*found), cluster, run_dir) as (supervision, _):
        await asyncio.wait_for(supervision.slots_known(), 10)
        yield supervision


async def test_a_restarted_supervisor_keeps_the_worker_that_served(tmp_path: Path) -> None:
    async with restarted(tmp_path, [False, True], num_replicas=1) as supervision:
        serve(registry_of(supervision), POOL, 1)
        await until(lambda: indices(supervision) == [1])


async def test_the_slot_that_leaves_is_chosen_once_all_adopted_workers_have_registered(
    tmp_path: Path,
) -> None:
    async with restarted(tmp_path, [True, True, True], num_replicas=2) as supervision:
        registry = registry_of(supervision)
        for index in (1, 2):
            serve(registry, POOL, index)
        beat(registry, register(registry, POOL, 0), draining=True)

        def leaving() -> list[str]:
            return [slot.worker_id for slot in registry.pools.slots_of(POOL) if slot.is_leaving]

        await until(leaving)
        assert leaving() == ["all-0"]  # as the previous supervisor had asked it to


async def test_an_adopted_worker_that_never_registers_is_the_one_that_leaves(
    tmp_path: Path,
) -> None:
    serving = [True, True, True]
    async with restarted(tmp_path, serving, num_replicas=2, fence_after_s=1.0) as supervision:
        for index in (0, 2):
            serve(registry_of(supervision), POOL, index)
        await until(lambda: indices(supervision) == [0, 2])
