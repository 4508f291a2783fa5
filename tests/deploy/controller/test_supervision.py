"""What a supervisor's registry is told of revisions, over real gRPC."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from baton.control_client import ControlClient
from baton.errors import UnavailableError
from cluster.config import RegistryConfig
from cluster.control_service import Changes, serve
from cluster.registry import Registry
from deploy.api.read import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import RolePlan, Rollout, WorkerPoolSpec
from deploy.controller.errors import WriteRefusedError
from deploy.controller.fleet_watch import fleet_of
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import GroupSize, sized, worker_group
from deploy.controller.objects import Key
from deploy.controller.observed import NOTHING_HEARD, Fleet, Heard
from deploy.controller.revisions import revision_of
from deploy.controller.rolling import decide
from deploy.controller.rollout import ReadyWatch
from deploy.controller.supervision import Supervision, role_plan
from deploy.controller.view import ClusterView, pool_view
from tests.cluster.test_leaving_places import serve as live
from tests.deploy.controller.test_manifests import OWNER, RELEASE

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SPEC: dict[str, Any] = {
    "model": {"name": "models/demo"},
    "engine": {"backend": "fake"},
    "pools": {"decode": {"role": "decode"}},
}


def pool_spec(replicas: int = 2, **engine: Any) -> WorkerPoolSpec:
    return WorkerPoolSpec(
        role="decode", cluster="main", pool="decode", replicas=replicas, engine=engine
    )


def group(pool: WorkerPoolSpec) -> dict[str, Any]:
    context = PodContext(OWNER, parsed(SPEC), RELEASE, "h", "r")
    made = worker_group(context, revision_of(SPEC, "decode", pool), pool)
    return sized(made, GroupSize(pool.replicas))


def parsed(spec: Mapping[str, Any]) -> ServingClusterSpec:
    metadata = {"name": "main", "namespace": "models"}
    return read_spec(
        ServingClusterSpec, {"kind": "ServingCluster", "metadata": metadata, "spec": spec}
    )


async def test_without_surge_the_worker_that_is_down_makes_room_wherever_it_is() -> None:
    old, new = (
        replace(pool_spec(maxNumSeqs=num), rollout=Rollout(max_surge=0, max_unavailable=1))
        for num in (8, 16)
    )
    first, second = group(old), group(new)
    registry, pool = Registry(RegistryConfig(), time.monotonic), first["groupName"]
    async with serve(registry, Changes(), "127.0.0.1:0") as address:
        with ControlClient(address) as client:
            assert await asyncio.to_thread(tell, client, old, first) == {}
            for index in range(2):
                registry.pools.open_place(pool, f"{pool}-{index}")
            live(registry, pool, 1)
            former = await asyncio.to_thread(client.fleet)
            await asyncio.to_thread(tell, client, new, first, second)
            told = await asyncio.to_thread(sizes, client)
            assert told[pool] == 1, "place 0, which is down"
            # A supervisor of the last release would let place 1 go.
            for place in former.pools[0].places:
                place.ClearField("standing")
            seen = view(fleet_of(former), new, (first, second))
            assert decide(seen, None, {}, None, NOW).sizes[pool] == 2


def tell(
    client: ControlClient, pool: WorkerPoolSpec | None, *groups: dict[str, Any]
) -> dict[str, str]:
    """One look at what the registry says, after a worker of the newest revision was live; what it
    refused. None: there is no pool any more."""
    fleet = fleet_of(client.fleet())
    told = Supervision(client, lambda _: None)
    seen = view(fleet, pool, groups)
    watches = {name: ReadyWatch(each.target, 1) for name, each in seen.pools.items()}
    told.tell(seen, decide(seen, None, watches, None, NOW))
    return told.refused


def view(
    fleet: Fleet, pool: WorkerPoolSpec | None, groups: tuple[dict[str, Any], ...]
) -> ClusterView:
    obj = {"metadata": {"name": "main", "namespace": "models"}, "spec": SPEC}
    by_name = {each["groupName"]: each for each in groups}
    heard = Heard(fleet, is_settled=True)
    pools = (
        {}
        if pool is None
        else {"decode": pool_view(obj, {"metadata": {}}, pool, by_name, [], heard)}
    )
    ray = {"spec": {"workerGroupSpecs": list(groups)}}
    key = Key("models", "main")
    return ClusterView(key, obj, OWNER, parsed(SPEC), pools, heard, ray)


def sizes(client: ControlClient) -> dict[str, int]:
    return {pool.name: pool.desired_replicas for pool in client.fleet().pools}


async def test_a_revision_is_added_with_its_cohorts_share_and_forgotten_when_it_is_over() -> None:
    old, new = pool_spec(maxNumSeqs=8), pool_spec(maxNumSeqs=16)
    registry = Registry(RegistryConfig(), time.monotonic)
    async with serve(registry, Changes(), "127.0.0.1:0") as address:
        await asyncio.to_thread(_added_and_forgotten, address, old, new)


def _added_and_forgotten(address: str, old: WorkerPoolSpec, new: WorkerPoolSpec) -> None:
    first, second = group(old), group(new)
    with ControlClient(address) as client:
        assert tell(client, old, first) == {}
        assert sizes(client) == {first["groupName"]: 2}
        (told,) = client.fleet().pools
        assert (told.cohort, told.cohort_weight) == (revision_of(SPEC, "decode", old).cohort, 100)
        client.set_replicas(first["groupName"], 0)  # as at the end of a rollout
        assert tell(client, new, sized(first, GroupSize(0)), second) == {}
        assert sizes(client) == {second["groupName"]: 2}
        assert tell(client, new, sized(first, GroupSize(0)), second) == {}
        assert sizes(client) == {second["groupName"]: 2}, "not added again as its group goes"
        assert tell(client, None) == {}
        assert sizes(client) == {second["groupName"]: 0}, "nobody speaks for it any more"
        assert tell(client, None) == {}
        assert sizes(client) == {}


async def test_shares_are_told_before_pools_so_that_no_cohort_is_ever_weighed_wrongly() -> None:
    registry, looks = Registry(RegistryConfig(), time.monotonic), []

    class Watched(Changes):
        def announce(self) -> None:
            looks.append((registry.pools.cohort_weights(), len(registry.pools.desired_replicas())))
            super().announce()

    pool = pool_spec()
    async with serve(registry, Watched(), "127.0.0.1:0") as address:
        with ControlClient(address) as client:
            assert await asyncio.to_thread(tell, client, pool, group(pool)) == {}
    weighed = {revision_of(SPEC, "decode", pool).cohort: 100}
    assert looks[:2] == [(weighed, 0), (weighed, 1)]


class Unweighed(ControlClient):
    """Shares come to nobody's ears."""

    def set_cohort_weights(self, weights: Mapping[str, int]) -> None:
        raise UnavailableError("no answer")


async def test_no_worker_leaves_before_its_share_of_requests_has() -> None:
    registry = Registry(RegistryConfig(), time.monotonic)
    async with serve(registry, Changes(), "127.0.0.1:0") as address:
        await asyncio.to_thread(_left_after_its_share, address)


def _left_after_its_share(address: str) -> None:
    first = group(pool_spec())
    with ControlClient(address) as client, Unweighed(address) as unweighed:
        assert tell(client, pool_spec(), first) == {}
        client.set_cohort_weights({"other": 100})
        for pool, size in (pool_spec(1), 2), (pool_spec(3), 3), (None, 3):
            groups = () if pool is None else (first,)
            assert tell(unweighed, pool, *groups) == {"": "no answer"}
            assert sizes(client) == {first["groupName"]: size}
        assert tell(client, pool_spec(1), first) == {}
        assert sizes(client) == {first["groupName"]: 1}


async def test_who_leads_no_more_tells_nothing() -> None:
    """A call's worth later: whoever leads now has told another size."""
    pool, is_leading = pool_spec(), [True, False]
    registry = Registry(RegistryConfig(), time.monotonic)

    def check(doing: str) -> None:
        if not is_leading.pop(0):
            raise WriteRefusedError(doing)

    async with serve(registry, Changes(), "127.0.0.1:0") as address:
        with ControlClient(address) as client:
            seen = view(fleet_of(await asyncio.to_thread(client.fleet)), pool, (group(pool),))
            told = Supervision(client, check)
            with pytest.raises(WriteRefusedError):
                await asyncio.to_thread(told.tell, seen, decide(seen, None, {}, None, NOW))
            assert await asyncio.to_thread(sizes, client) == {}
    assert registry.pools.cohort_weights() == {revision_of(SPEC, "decode", pool).cohort: 100}


async def test_what_is_refused_is_told_of_its_pool() -> None:
    pool = pool_spec()
    broken = group(pool)
    broken["template"]["metadata"]["annotations"]["baton.dev/cluster-yaml"] = "pools: {}"
    registry = Registry(RegistryConfig(), time.monotonic)
    async with serve(registry, Changes(), "127.0.0.1:0") as address:
        with ControlClient(address) as client:
            refused = await asyncio.to_thread(tell, client, pool, broken)
    assert set(refused) == {"decode"}
    assert "pools" in refused["decode"]


def test_a_role_plan_is_divided_by_size_and_whole_where_one_revision_is() -> None:
    spec = WorkerPoolSpec(
        role="mixed", cluster="main", pool="decode", replicas=4, role_plan=RolePlan(1, 3)
    )
    obj = {"metadata": {}, "spec": SPEC}
    pool = pool_view(obj, obj, spec, {}, [], NOTHING_HEARD)
    assert [role_plan(pool, size) for size in (4, 2, 1, 0)] == [(1, 3), (0, 1), (0, 0), (0, 0)]
