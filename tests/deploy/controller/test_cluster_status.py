"""What a ServingCluster's conditions say of pools without a worker."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pytest

from deploy.api.model_source import ModelSource
from deploy.api.naming import API_VERSION
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import PoolTemplate, Scaling, WorkerPoolSpec
from deploy.controller.cluster_status import Refusals, availability, cluster_status
from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.manifests.common import Owner
from deploy.controller.objects import Key
from deploy.controller.observed import NOTHING_HEARD, Fleet, FleetPool, Heard
from deploy.controller.revisions import Revision
from deploy.controller.rolling import PoolRolling, Rolling
from deploy.controller.rolling_status import progress_status
from deploy.controller.rollout import ReadyWatch
from deploy.controller.statuses import Statuses
from deploy.controller.view import ClusterView, PoolView, RevisionView
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted


def at(replicas: int, mode: str) -> ClusterView:
    """A cluster whose pools are to have so many workers, and have none."""
    pools = {
        name: PoolView(
            {"metadata": {}},
            WorkerPoolSpec(
                role=name, cluster="main", pool=name, replicas=replicas, scaling=Scaling(mode=mode)
            ),
            [],
            FleetPool(replicas, ()),
        )
        for name in ("prefill", "decode")
    }
    spec = ServingClusterSpec(
        model=ModelSource(name="a/model"),
        pools={name: PoolTemplate(role=name) for name in pools},
    )
    fleet = Fleet({name: pool.fleet for name, pool in pools.items() if pool.fleet})
    obj = {"apiVersion": API_VERSION, "kind": "ServingCluster", "metadata": {}}
    heard = Heard(fleet, is_settled=True, is_certain=True)
    return ClusterView(Key("here", "main"), obj, Owner("main", "here", "uid"), spec, pools, heard)


@pytest.mark.parametrize(
    ("replicas", "mode", "status", "reason"),
    [
        (0, "planner", True, "Stopped"),
        (0, "manual", False, "ScaledToZero"),
        (1, "planner", False, "NoDecodeWorker"),
    ],
)
def test_pools_that_the_planner_stopped_are_available_for_the_next_request_starts_them(
    replicas: int, mode: str, status: bool, reason: str
) -> None:
    available = availability(at(replicas, mode), num_routers_ready=2)
    assert (available.type, available.is_true, available.reason) == ("Available", status, reason)


@pytest.mark.parametrize(("mode", "kept"), [("planner", "model"), ("manual", None)])
def test_what_clients_call_a_model_is_kept_once_it_was_available(
    mode: str, kept: str | None
) -> None:
    view = at(0, mode)
    view.obj["spec"] = {"model": {"name": "a/model"}, "pools": {}}
    status = cluster_status(view, Progress("c"), [availability(view, num_routers_ready=2)])
    assert status["model"] == "model"
    assert status.get("servedModelName") == kept


def test_a_pool_that_is_no_more_is_told_no_more() -> None:
    """A status is merged: what is left out of it stays."""
    view = at(1, "manual")
    view.obj["spec"] = {"model": {"name": "a/model"}, "pools": {}}
    view.obj["status"] = {"pools": {"decode": "1/1", "old": "2/2"}}
    told = cluster_status(view, Progress("c"), [])["pools"]
    assert told == {"prefill": "0/1", "decode": "0/1", "old": None}


def test_who_has_just_begun_to_listen_leaves_what_was_told_of_a_cluster() -> None:
    view = at(1, "manual")
    metadata = {"name": "main", "namespace": "here"}
    obj = {"metadata": metadata, "spec": {"pools": {"decode": {"role": "decode"}}}}
    pools = {
        name: dataclasses.replace(
            pool,
            obj={"metadata": {"name": name, "namespace": "here"}},
            fleet=None,
            revisions={"r": RevisionView(Revision("r", name, "c"))},
            target="r",
        )
        for name, pool in view.pools.items()
    }
    watches = {name: PoolRolling({}, frozenset(), ReadyWatch("r")) for name in pools}
    rolling = Rolling(watches, Progress("c"))
    with scripted(lambda exchange: exchange.answer({})) as api:
        statuses = Statuses(kube_of(api))
        for heard in (NOTHING_HEARD, Heard(is_certain=True)):
            seen = dataclasses.replace(view, obj=obj, pools=pools, heard=heard)
            assert statuses.tell_pools(seen, rolling, {}, {}, "2026-01-01T00:00:00Z") == []
            statuses.tell_cluster(seen, rolling, None, Refusals(), "2026-01-01T00:00:00Z")
            assert len(api.requests) == (3 if heard.is_certain else 0)


def test_a_change_of_cohorts_is_kept_before_it_is_done_and_only_where_it_goes_on() -> None:
    view = at(1, "manual")
    metadata = {"name": "main", "namespace": "here"}
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    began = Progress("old", "new", Phase.GROWING)
    share = dataclasses.replace(began, phase=Phase.WATCHING, weight=10, since=now)
    obj = {"metadata": metadata, "status": {"cohort": progress_status(began)}}
    view = dataclasses.replace(view, obj=obj, heard=Heard(is_settled=True))
    bodies = []

    def taken(exchange: Exchange) -> None:
        bodies.append(json.loads(exchange.body))
        exchange.answer({})

    with scripted(taken) as api:
        statuses = Statuses(kube_of(api))
        statuses.keep(view, began)
        statuses.keep(dataclasses.replace(view, heard=Heard()), share)
        assert not api.requests
        statuses.keep(view, share)
        (request,) = api.requests
    assert "/servingclusters/main/status?" in request
    assert bodies == [{"status": {"cohort": progress_status(share)}}]
