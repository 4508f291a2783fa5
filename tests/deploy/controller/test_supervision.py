"""What a supervisor's registry is said of a unit's pools, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.config.workers import RegistryConfig
from baton.control.client import ControlClient
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from deploy.api.worker_pool import RolePlan, WorkerPoolSpec
from deploy.controller.kit.errors import WriteRefusedError
from deploy.controller.manifests.ray_cluster import worker_group
from deploy.controller.observed.fleet import Fleet, Heard, fleet_of
from deploy.controller.observed.view import PoolView, UnitView
from deploy.controller.reconcile.supervision import supervise
from deploy.controller.rollout.rollout import Record, UnitPlan
from tests.deploy.controller.clusters import context_of, spec_of
from tests.identities import OPERATOR

SPEC = spec_of(
    advanced={"engine": {"backend": "fake"}},
    pools={"decode": {"role": "decode"}, "mixed": {"role": "mixed"}},
)
GOING = {"metadata": {"deletionTimestamp": "2026-01-01T10:00:00Z"}}


def pool_spec(name: str = "decode", replicas: int = 2, **changes: Any) -> WorkerPoolSpec:
    role = SPEC.pools[name].role
    return WorkerPoolSpec(role=role, cluster="main", pool=name, replicas=replicas, **changes)


def look(client: ControlClient, *pools: WorkerPoolSpec, **seen: Any) -> dict[str, str]:
    """One look at what the registry says; what it refused."""
    return supervise(client, view(fleet_of(client.fleet()), *pools, **seen), (), lambda _: None)


def view(
    fleet: Fleet,
    *pools: WorkerPoolSpec,
    going: bool = False,
    makes_way: bool = False,
    group: dict[str, Any] | None = None,
) -> UnitView:
    heard, obj = Heard(fleet), GOING if going else {"metadata": {}}
    views = {
        pool.pool: PoolView(
            obj,
            pool,
            [],
            fleet.pools.get(pool.pool),
            group or worker_group(context_of(SPEC), pool),
            heard,
            0 if makes_way else None,
            makes_way,
        )
        for pool in pools
    }
    return UnitView(UnitPlan("2x4bz", {}, Record()), None, heard, views)


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    """Of a registry."""
    registry = Registry(RegistryConfig(), time.monotonic)
    async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as address:
        with ControlClient(address) as client:
            yield client


def sizes(client: ControlClient) -> dict[str, int]:
    return {pool.name: pool.desired_replicas for pool in client.fleet().pools}


async def test_a_pool_is_added_sized_and_forgotten_when_it_is_over(client: ControlClient) -> None:
    mixed = pool_spec("mixed", 3, role_plan=RolePlan(1, 2))

    def looks() -> None:
        assert look(client, pool_spec(), mixed) == {}
        assert sizes(client) == {"decode": 2, "mixed": 3}
        assert look(client, pool_spec(replicas=4), mixed) == {}
        assert sizes(client) == {"decode": 4, "mixed": 3}
        plans = {pool.name: pool.role_plan for pool in client.fleet().pools}
        assert (plans["mixed"].prefill, plans["mixed"].decode) == (1, 2)
        assert look(client, pool_spec(replicas=4), going=True) == {}  # nobody speaks for `mixed`
        assert sizes(client) == {"decode": 0, "mixed": 0}
        assert look(client, pool_spec(replicas=4), going=True) == {}
        assert sizes(client) == {}
        assert look(client, pool_spec(replicas=4), going=True) == {}
        assert sizes(client) == {}, "not added again as its group goes"

    await asyncio.to_thread(looks)


async def test_a_unit_that_makes_way_has_no_worker_and_has_its_size_again_when_it_stays(
    client: ControlClient,
) -> None:
    for makes_way, size in ((False, 2), (True, 0), (True, 0), (False, 2)):
        said = await asyncio.to_thread(look, client, pool_spec(), makes_way=makes_way)
        assert said == {}
        assert await asyncio.to_thread(sizes, client) == {"decode": size}


async def test_who_leads_no_more_reports_nothing(client: ControlClient) -> None:
    """A call's worth later: whoever leads now has said another size."""
    is_leading = [True, False]

    def check(doing: str) -> None:
        if not is_leading.pop(0):
            raise WriteRefusedError(doing)

    fleet = fleet_of(await asyncio.to_thread(client.fleet))
    seen = view(fleet, pool_spec(), pool_spec("mixed"))
    with pytest.raises(WriteRefusedError):
        await asyncio.to_thread(supervise, client, seen, (), check)
    assert await asyncio.to_thread(sizes, client) == {"decode": 2}


async def test_what_is_refused_is_reported_of_its_pool(client: ControlClient) -> None:
    broken = worker_group(context_of(SPEC), pool_spec())
    broken["template"]["metadata"]["annotations"]["baton.dev/cluster-yaml"] = "pools: {}"
    refused = await asyncio.to_thread(look, client, pool_spec(), group=broken)
    assert set(refused) == {"decode"}
    assert "pools" in refused["decode"]
