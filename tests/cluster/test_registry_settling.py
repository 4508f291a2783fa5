"""A registry that has just started knows for how long workers may have yet to register with it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from baton.config.workers import RegistryConfig
from cluster.registry.fleet_wire import fleet_message
from cluster.registry.pool_changes import PoolChanges
from cluster.registry.registry import Registry
from kv_transfer.clock import ManualClock
from tests.cluster.memory_replicas import (
    POOL,
    MemoryReplicas,
    cluster_of,
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
    return fleet_message(registry.snapshot()).settles


def test_a_registry_settles_for_as_long_as_a_worker_may_be_silent_and_be_well() -> None:
    registry, clock = make(keeps_pools=False)
    serve(registry, "decode", 0)
    pass_s(clock, registry, SILENT_S - 0.1)
    assert settles(registry)
    pass_s(clock, registry, 0.1)
    assert not settles(registry)


def test_one_that_keeps_pools_settles_until_it_is_told_of_them_and_their_places_are_open() -> None:
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
def test_it_settles_while_a_worker_is_of_a_pool_that_it_has_yet_to_be_told_of(
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


def test_it_settles_until_every_adopted_worker_has_told_how_it_stands_or_is_over() -> None:
    registry, clock = make()
    registry.pools.add(settings_of(), 2)
    for index in (0, 1):
        registry.pools.open_slot("decode", f"decode-{index}", is_adopted=True)
    pass_s(clock, registry, 2 * SILENT_S)
    stream = register(registry, "decode", 0)
    registry.pools.set_pod("decode-1", None)  # taken for hung: nothing is left there
    assert settles(registry)
    beat(registry, stream)
    assert not settles(registry)


def test_an_adopted_worker_that_is_forgotten_is_not_waited_for_again() -> None:
    registry, clock = make()
    registry.pools.add(settings_of(), 1)
    registry.pools.open_slot("decode", "decode-0", is_adopted=True)
    serve(registry, "decode", 0)
    pass_s(clock, registry, RegistryConfig().gone_after_s + RegistryConfig().forget_after_s + 1)
    assert not registry.snapshot().workers
    assert not registry.awaits_adopted("decode")
    assert not settles(registry)


async def test_a_pool_that_is_wanted_again_is_known_to_have_nothing_left_to_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the snapshot would count as incomplete again, for a pool that has nothing left."""
    cluster = dataclasses.replace(cluster_of(0), registry=RegistryConfig(silent_after_s=0.4))
    async with supervised(MemoryReplicas(), cluster, tmp_path) as (supervision, _):
        registry = supervision._registry  # the wire does not show its clock
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
        registry = supervision._registry  # the wire does not show its clock
        await until(lambda: registry.now_s() > 0.4)
        assert settles(registry)
        replicas.may_find.set()
        await asyncio.wait_for(supervision.slots_known(), 10)
        serve(registry, POOL, 0)
        assert settles(registry)
        serve(registry, POOL, 1)
        assert not settles(registry)
