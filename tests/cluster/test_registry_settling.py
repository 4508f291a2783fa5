"""A registry that has just started knows for how long workers may have yet to register with it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.config.workers import RegistryConfig
from cluster.registry.fleet_wire import fleet_message
from cluster.registry.pool_changes import PoolChanges
from cluster.registry.registry import Progress, Registry
from cluster.supervisor.replica import Replica
from tests.cluster.pool_settings import settings_of
from tests.cluster.test_leaving_places import POOL, Finds, register, serve
from tests.cluster.test_registry import FakeClock
from tests.cluster.test_supervision import cluster_of, supervision_over, until

ANOTHER = "{model: models/demo, pools: {all-2: {role: mixed}}}"
SILENT_S = RegistryConfig().silent_after_s


def make(keeps_pools: bool = True) -> tuple[Registry, FakeClock]:
    clock = FakeClock()
    return Registry(RegistryConfig(), clock, keeps_pools), clock


def settles(registry: Registry) -> bool:
    return fleet_message(registry.snapshot()).settles


def test_a_registry_settles_for_as_long_as_a_worker_may_be_silent_and_be_well() -> None:
    registry, clock = make(keeps_pools=False)
    serve(registry, "decode", 0)
    clock.pass_s(registry, SILENT_S - 0.1)
    assert settles(registry)
    clock.pass_s(registry, 0.1)
    assert not settles(registry)


def test_one_that_keeps_pools_settles_until_it_is_told_of_them_and_their_places_are_open() -> None:
    registry, clock = make()
    clock.pass_s(registry, 10 * SILENT_S)
    assert settles(registry)
    registry.pools.add(settings_of(), 2)
    assert settles(registry)
    registry.pools.open_slot("decode", "decode-0")
    assert not settles(registry)


def test_a_pool_that_is_to_have_no_worker_is_waited_for_no_longer_than_others() -> None:
    registry, clock = make()
    registry.pools.add(settings_of(), 0)
    clock.pass_s(registry, SILENT_S)
    assert not settles(registry)


@pytest.mark.parametrize("ends_well", [True, False])
def test_it_settles_while_a_worker_is_of_a_pool_that_it_has_yet_to_be_told_of(
    ends_well: bool,
) -> None:
    registry, clock = make()
    registry.pools.add(settings_of("prefill"), 0)
    clock.pass_s(registry, SILENT_S)
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
    clock.pass_s(registry, 2 * SILENT_S)
    stream = register(registry, "decode", 0)
    registry.pools.set_pod("decode-1", None)  # taken for hung: nothing is left there
    assert settles(registry)
    registry.heartbeat(stream, Progress(False, 0.0, 0.01), b"", draining=False)
    assert not settles(registry)


def test_an_adopted_worker_that_is_forgotten_is_not_waited_for_again() -> None:
    registry, clock = make()
    registry.pools.add(settings_of(), 1)
    registry.pools.open_slot("decode", "decode-0", is_adopted=True)
    serve(registry, "decode", 0)
    clock.pass_s(registry, RegistryConfig().gone_after_s + RegistryConfig().forget_after_s + 1)
    assert not registry.snapshot().workers
    assert not registry.awaits_adopted("decode")
    assert not settles(registry)


async def test_a_pool_that_is_wanted_again_is_known_to_have_nothing_yet_to_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it settles, what has waited in vain for long is waited for anew."""
    cluster = dataclasses.replace(cluster_of(0), registry=RegistryConfig(silent_after_s=0.4))
    supervision = supervision_over(Finds(), cluster, tmp_path)
    registry = supervision._registry
    running = asyncio.create_task(supervision.run(lambda address: None))
    await asyncio.wait_for(supervision.slots_known(), 10)
    await until(lambda: registry.now_s() > 0.4)
    registry.pools.set_replicas(POOL, 1)
    assert not settles(registry)
    changes, told = PoolChanges(registry, supervision), []
    registry.pools.set_replicas(POOL, 0)
    monkeypatch.setattr(supervision, "save", lambda: told.append(settles(registry)))
    await changes.add("all-2", ANOTHER, 1)
    assert told == [False], "nothing was left of a new one either"
    supervision.stop()
    await asyncio.wait_for(running, 10)


class FindsSlowly(Finds):
    def __init__(self, *serves: bool) -> None:
        super().__init__(*serves)
        self.may_find = threading.Event()

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        assert self.may_find.wait(10)
        return super().find(tp_sizes)


async def test_a_restarted_supervisor_s_registry_settles_until_all_that_it_finds_has_registered(
    tmp_path: Path,
) -> None:
    found = FindsSlowly(True, True)
    cluster = dataclasses.replace(cluster_of(2), registry=RegistryConfig(silent_after_s=0.4))
    supervision = supervision_over(found, cluster, tmp_path)
    registry = supervision._registry
    running = asyncio.create_task(supervision.run(lambda address: None))
    await until(lambda: registry.now_s() > 0.4)
    assert settles(registry)
    found.may_find.set()
    await asyncio.wait_for(supervision.slots_known(), 10)
    serve(registry, POOL, 0)
    assert settles(registry)
    serve(registry, POOL, 1)
    assert not settles(registry)
    supervision.stop()
    await asyncio.wait_for(running, 10)
