"""What a ServingCluster's conditions say of pools without a worker."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from deploy.api.status import RolloutStatus, ServingClusterStatus, State
from deploy.controller.manifests.resources import SERVING_CLUSTERS
from deploy.controller.observed.fleet import NOTHING_HEARD, Heard
from deploy.controller.rollout.rollout import Step
from deploy.controller.status.cluster_status import Refusals, availability, cluster_status
from deploy.controller.status.conditions import DEGRADED, Verdict, conditions
from deploy.controller.status.statuses import Statuses
from tests.deploy.controller.scripted_api import kube_of, scripted
from tests.deploy.controller.views import PLAN, view_without_workers


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
    available = availability(view_without_workers(replicas, mode), num_routers_ready=2)
    assert (available.type, available.is_true, available.reason) == ("Available", status, reason)


@pytest.mark.parametrize(("mode", "kept"), [("planner", "model"), ("manual", None)])
def test_what_clients_call_a_model_is_kept_once_it_was_available(
    mode: str, kept: str | None
) -> None:
    view = view_without_workers(0, mode)
    status = cluster_status(view, [availability(view, num_routers_ready=2)])
    assert status.get("model") == kept


def test_a_pool_that_is_no_more_is_reported_no_more() -> None:
    """A status is merged: what is left out of it stays."""
    view = view_without_workers(1, "manual")
    view.obj["status"] = {"pools": {"decode": "1/1", "old": "2/2"}}
    said = cluster_status(view, [])["pools"]
    assert said == {"prefill": "0/1", "decode": "0/1", "old": None}


def test_a_change_of_a_status_is_one_event_and_none_before_the_supervisor_was_asked() -> None:
    view = view_without_workers(1, "manual")
    metadata = {"name": "main", "namespace": "here"}
    obj = {"metadata": metadata, "spec": {"pools": {"decode": {"role": "decode"}}}}
    pools = {
        name: dataclasses.replace(pool, obj={"metadata": metadata | {"name": name}}, fleet=None)
        for name, pool in view.pools.items()
    }
    events: list[str] = []
    with scripted(lambda exchange: exchange.answer({})) as api:
        statuses = Statuses(
            kube_of(api),
            lambda about, type_, reason, message: events.append(reason),
            lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        )
        for heard in (NOTHING_HEARD, Heard(is_certain=True)):
            seen = dataclasses.replace(view, obj=obj, pools=pools, heard=heard)
            assert statuses.write_pools(seen, {}, {}) == []
            statuses.write_cluster(seen, None, Refusals())
            assert len(api.requests) == (3 if heard.is_certain else 0)
        news = list(events)
        statuses.write_cluster(seen, None, Refusals())
        assert events == news == ["Starting"] * 3 + ["HeadUnprotected"]
        bad = [Verdict(DEGRADED, True, "InvalidSpec", "no such field")]
        for _ in range(2):
            statuses.write(view.key, SERVING_CLUSTERS, obj, bad)
        statuses.forget(view.key)
        again = obj | {"status": {"conditions": conditions(bad, obj, "2026-01-01T00:00:00Z")}}
        statuses.write(view.key, SERVING_CLUSTERS, again, bad)
        assert events == [*news, "InvalidSpec"], "what was before a first look is no news"


@pytest.mark.parametrize("state", list(State))
def test_a_status_says_which_unit_there_is_and_how_far_the_next_one_is(state: State) -> None:
    view = dataclasses.replace(
        view_without_workers(1, "manual"), step=Step(state, "so it is", (PLAN,))
    )
    status = cluster_status(view, [])
    assert status["unit"] == "2x4bz"
    of_two = {"units": None, "shares": None}
    assert status["rollout"] == {"state": state.value, "reason": "so it is", **of_two}
    said = ServingClusterStatus(unit="2x4bz", rollout=RolloutStatus(state, "so it is"))
    assert said.rollout is not None
    none = dataclasses.replace(view, step=Step(State.ENDING, "2 pods are left"))
    assert cluster_status(none, [])["unit"] is None
