"""What a ServingCluster's conditions say of pools without a worker."""

from __future__ import annotations

import dataclasses

import pytest

from deploy.api.status import RolloutStatus, ServingClusterStatus
from deploy.controller.observed import NOTHING_HEARD, Heard
from deploy.controller.rollout import State, Step
from deploy.controller.status.cluster_status import Refusals, availability, cluster_status
from deploy.controller.status.statuses import Statuses
from tests.deploy.controller.clusters import SERVING, at
from tests.deploy.controller.scripted_api import kube_of, scripted


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
    status = cluster_status(view, [availability(view, num_routers_ready=2)])
    assert status.get("model") == kept


def test_a_pool_that_is_no_more_is_told_no_more() -> None:
    """A status is merged: what is left out of it stays."""
    view = at(1, "manual")
    view.obj["status"] = {"pools": {"decode": "1/1", "old": "2/2"}}
    told = cluster_status(view, [])["pools"]
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
        )
        for name, pool in view.pools.items()
    }
    with scripted(lambda exchange: exchange.answer({})) as api:
        statuses = Statuses(kube_of(api))
        for heard in (NOTHING_HEARD, Heard(is_certain=True)):
            seen = dataclasses.replace(view, obj=obj, pools=pools, heard=heard)
            assert statuses.tell_pools(seen, {}, {}, "2026-01-01T00:00:00Z") == []
            statuses.tell_cluster(seen, None, Refusals(), "2026-01-01T00:00:00Z")
            assert len(api.requests) == (3 if heard.is_certain else 0)


@pytest.mark.parametrize("state", list(State))
def test_a_status_says_which_unit_there_is_and_how_far_the_next_one_is(state: State) -> None:
    view = dataclasses.replace(at(1, "manual"), step=Step(state, "so it is", SERVING.plans))
    status = cluster_status(view, [])
    assert status["unit"] == "2x4bz"
    assert status["rollout"] == {"state": state.value, "reason": "so it is", "units": None}
    told = ServingClusterStatus(unit="2x4bz", rollout=RolloutStatus(state.value, "so it is"))
    assert told.rollout is not None
    none = dataclasses.replace(view, step=Step(State.ENDING, "2 pods are left"))
    assert cluster_status(none, [])["unit"] is None
