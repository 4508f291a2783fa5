"""A registry that has just started, and the slots that leave: what waits for adopted workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.config.workers import RegistryConfig, SupervisorConfig
from cluster.registry.control_service import fleet_message
from cluster.registry.pool_changes import PoolChanges
from cluster.registry.registry import Registry
from cluster.supervisor.supervisor import Supervision
from tests.cluster.memory_replicas import (
    POOL,
    MemoryReplicas,
    cluster_of,
    controlled,
    registry_of,
    replica_of,
    supervised,
    until,
)
from tests.cluster.pool_settings import settings_of
from tests.cluster.registered import beat, pass_s, register, serve

ANOTHER = "{model: models/demo, pools: {all-2: {role: mixed}}}"
SILENT_S = RegistryConfig().silent_after_s


def make(keeps_pools: bool = True) -> tuple[Registry, ManualClock]:
    clock = ManualClock()
    return Registry(RegistryConfig(), clock.now_s, keeps_pools), clock


def settles(registry: Registry) -> bool:
    return fleet_message(registry).settles


def test_a_registry_settles_for_as_long_as_a_worker_may_be_silent_and_be_well() -> None:
    registry, clock = make(keeps_pools=False)
    serve(registry, "decode", 0)
    pass_s(clock, registry, SILENT_S - 0.1)
    assert settles(registry)
    pass_s(clock, registry, 0.1)
    assert not settles(registry)


def test_a_registry_that_keeps_pools_settles_until_it_has_them_and_their_slots_are_open() -> None:
    registry, clock = make()
    pass_s(clock, registry, 10 * SILENT_S)
    assert settles(registry)
    registry.pools.add(settings_of(), 2)
    assert settles(registry)
    registry.pools.open_slot("decode", "decode-0")
    assert not settles(registry)


def test_a_pool_that_is_to_have_no_worker_is_waited_for_no_longer_than_others() -> None:
    registry, clock = make()
    registry.pools.add(settings_of(), 0)
    pass_s(clock, registry, SILENT_S)
    assert not settles(registry)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_registry_settles_while_a_worker_has_an_unknown_pool(
    ends_well: bool,
) -> None:
    registry, clock = make()
    registry.pools.add(settings_of("prefill"), 0)
    pass_s(clock, registry, SILENT_S)
    serve(registry, "decode", 0)
    assert settles(registry)
    if ends_well:
        registry.pools.add(settings_of("decode"), 1)
        registry.pools.open_slot("decode", "decode-0", is_adopted=True)
    else:
        registry.gone("decode-0", 1)
    assert not settles(registry)


def test_a_registry_settles_until_every_adopted_worker_has_sent_a_heartbeat_or_ended() -> None:
    registry, clock = make()
    registry.pools.add(settings_of(), 2)
    for index in (0, 1):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=True)
    pass_s(clock, registry, 2 * SILENT_S)
    stream = register(registry, "decode", 0)
    registry.pools.update_slot(
        "decode-1", is_adopted=False
    )  # taken for hung: nothing is left there
    assert settles(registry)
    beat(registry, stream)
    assert not settles(registry)


def test_an_adopted_worker_that_is_forgotten_is_not_waited_for_again() -> None:
    registry, clock = make()
    registry.pools.add(settings_of(), 1)
    registry.pools.open_slot("decode", "decode-0", is_adopted=True)
    serve(registry, "decode", 0)
    pass_s(clock, registry, RegistryConfig().gone_after_s + RegistryConfig().forget_after_s + 1)
    assert not registry.workers()
    assert not registry.awaits_adopted("decode")
    assert not settles(registry)


async def test_a_pool_that_is_wanted_again_is_known_to_have_nothing_left_to_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the snapshot would count as incomplete again, for a pool that has nothing left."""
    cluster = dataclasses.replace(cluster_of(0), registry=RegistryConfig(silent_after_s=0.4))
    async with supervised(MemoryReplicas(), cluster, tmp_path) as (supervision, _):
        registry = registry_of(supervision)
        await asyncio.wait_for(supervision.slots_known(), 10)
        await until(lambda: registry.now_s() > 0.4)
        registry.pools.set_replicas(POOL, 1)
        assert not settles(registry)
        changes, seen = PoolChanges(registry, supervision), []
        registry.pools.set_replicas(POOL, 0)
        monkeypatch.setattr(supervision, "save", lambda: seen.append(settles(registry)))
        await changes.add("all-2", ANOTHER, 1)
        assert seen == [False], "a new pool has nothing left either"


async def test_a_restarted_supervisor_s_registry_settles_until_all_that_it_finds_has_registered(
    tmp_path: Path,
) -> None:
    replicas = MemoryReplicas(replica_of(POOL, 0), replica_of(POOL, 1))
    replicas.may_find.clear()
    cluster = dataclasses.replace(cluster_of(2), registry=RegistryConfig(silent_after_s=0.4))
    async with supervised(replicas, cluster, tmp_path) as (supervision, _):
        registry = registry_of(supervision)
        await until(lambda: registry.now_s() > 0.4)
        assert settles(registry)
        replicas.may_find.set()
        await asyncio.wait_for(supervision.slots_known(), 10)
        serve(registry, POOL, 0)
        assert settles(registry)
        serve(registry, POOL, 1)
        assert not settles(registry)


def test_what_is_nearest_to_serving_stays_longest_then_the_lowest() -> None:
    clock = ManualClock()
    registry = Registry(RegistryConfig(), clock.now_s)
    registry.pools.add(settings_of(), 7)
    for index in range(7):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=index == 4)
    registry.pools.update_slot("decode-0", is_pending=True)
    serve(registry, "decode", 5)
    pass_s(clock, registry, RegistryConfig().silent_after_s + 0.1)
    for index in (3, 6):
        serve(registry, "decode", index)
    register(registry, "decode", 2)
    staying = [place.index for place in registry.staying("decode")]
    assert staying == [3, 6, 4, 5, 1, 2, 0]  # live; served, silent; starting; pending
    registry.pools.update_slot("decode-6", is_leaving=True)
    (reported,) = fleet_message(registry).pools
    stay_order = {
        place.worker_id: place.standing for place in reported.places if place.HasField("standing")
    }
    assert [f"decode-{index}" for index in (3, 4, 5, 1, 2, 0)] == sorted(
        stay_order, key=stay_order.__getitem__
    )


def test_a_slot_whose_adopted_worker_has_ended_is_as_far_from_serving_as_any_other() -> None:
    registry = Registry(RegistryConfig(forget_after_s=0), ManualClock().now_s)
    pools = registry.pools
    pools.add(settings_of(), 3)
    pools.open_slot("decode", "decode-0")
    for index in (1, 2):
        pools.open_slot("decode", f"decode-{index}", is_adopted=True)
        serve(registry, "decode", index)
        registry.gone(f"decode-{index}", 1)
        pools.update_slot(f"decode-{index}", is_adopted=False)  # nothing is left there
    registry.refresh()  # and the registry has forgotten it
    pools.update_slot("decode-1", is_pending=True)
    assert [place.index for place in registry.staying("decode")] == [0, 2, 1]


def test_an_adopted_worker_is_awaited_until_its_first_heartbeat_or_its_end() -> None:
    registry = Registry(RegistryConfig(), ManualClock().now_s)
    registry.pools.add(settings_of(), 3)
    for index, is_adopted in enumerate((True, True, False)):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=is_adopted)
    registry.pools.update_slot("decode-0", is_adopted=False)
    assert registry.awaits_adopted("decode")
    stream = register(registry, "decode", 1)
    assert registry.awaits_adopted("decode")
    beat(registry, stream)
    assert not registry.awaits_adopted("decode")


def indices(supervision: Supervision) -> list[int]:
    return sorted(slot.index for slot in registry_of(supervision).pools.slots_of(POOL))


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
