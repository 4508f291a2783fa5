"""A cluster that does not serve, or not wholly: each cause has a reason of its own, for alerts, and
the message says what pods wait for."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any, Literal

import pytest

from baton.config.planner import PlannerConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.fleet import WorkerState
from deploy.api.serving_cluster import Advanced, RouterIngress, RouterSpec, RouterTls
from deploy.api.status import State
from deploy.controller.manifests.common import COMPONENT_LABEL, POOL_LABEL
from deploy.controller.observed.fleet import NOTHING_HEARD, FleetPool, Heard, Slot
from deploy.controller.observed.pod import Pod
from deploy.controller.observed.view import ClusterView, UnitView
from deploy.controller.rollout.rollout import Record, Step, UnitPlan
from deploy.controller.status.cluster_status import (
    Refusals,
    availability,
    cluster_status,
    cluster_verdicts,
)
from deploy.controller.status.conditions import Verdict
from deploy.controller.status.pool_status import pool_status, pool_verdicts
from deploy.controller.status.waiting import Silence, pool_waits, router_waits, silence
from tests.deploy.controller.things import REFUSED, UNSCHEDULABLE
from tests.deploy.controller.views import view_without_workers

NO_GPU = "Unschedulable: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
LOST = "its time to end is over, and nobody has ended it: is its node lost?"
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
OVER_QUOTA = "FailedCreate: pods is forbidden: exceeded quota: gpus"


def pod(component: str, **status: Any) -> Pod:
    """A worker is of the decode pool."""
    labels = {COMPONENT_LABEL: component}
    if component == "worker":
        labels[POOL_LABEL] = "decode"
    return Pod.of({"metadata": {"name": f"a-{component}", "labels": labels}, "status": status}, NOW)


def test_a_pod_that_nobody_ends_is_reported_of_and_one_that_ends_is_not() -> None:
    metadata = {"name": "a", "labels": {POOL_LABEL: "decode"}}
    metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # when its grace ends
    for minutes, waits in ((-20, ""), (0, ""), (2, f"pod a: {LOST}")):
        going = Pod.of({"metadata": metadata}, NOW + datetime.timedelta(minutes=minutes))
        view = seen({"decode"}, 1, going)
        assert pool_waits(view, view.pools["decode"]) == waits


def seen(
    live: set[str], replicas: int = 1, *pods: Pod, ray: Any = None, **changes: Any
) -> ClusterView:
    """`live`: the pools of which all workers are."""
    view = view_without_workers(replicas, "manual")
    pools = {}
    for name, pool in view.pools.items():
        slots = [Slot(f"{name}-{n}", "", WorkerState.LIVE) for n in range(replicas)]
        fleet = FleetPool(replicas, slots if name in live else ())
        own = [each for each in pods if each.pool == name]
        pools[name] = dataclasses.replace(pool, fleet=fleet, pods=own)
    others = [each for each in pods if not each.pool]
    units = [UnitView(UnitPlan("2x4bz", {}, Record()), ray, NOTHING_HEARD, {})]
    return dataclasses.replace(view, pools=pools, units=units, poolless_pods=others, **changes)


def available(view: ClusterView, num_routers_ready: int = 2, routers: Any = None) -> Verdict:
    return availability(view, num_routers_ready, router_waits(view, routers))


def said(verdict: Verdict) -> tuple[bool, str, str]:
    return verdict.is_true, verdict.reason, verdict.message


@pytest.mark.parametrize(
    ("head", "ray", "why"),
    [
        ([], None, "; Ray's head has no pod"),
        ([], REFUSED, f"; {OVER_QUOTA}"),
        ([pod("head", **UNSCHEDULABLE)], None, f"; pod a-head: {NO_GPU}"),
        ([pod("head")], None, ""),
    ],
)
def test_a_silent_supervisor_is_reported_with_what_its_pod_waits_for(
    head: list[Pod], ray: Any, why: str
) -> None:
    view = seen(set(), 1, *head, heard=Heard(is_certain=True), ray=ray)
    message = f"Ray's head does not answer{why}"
    silent = Silence("SupervisorSilent", message)
    assert said(availability(view, 2, silent=silent)) == (False, "SupervisorSilent", message)
    verdicts = verdicts_of(answered(view))
    assert said(verdicts["Available"]) == (False, "SupervisorSilent", message)
    assert verdicts["Progressing"].message.startswith(message)


MADE = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("reason", "made", "now", "expected"),
    [
        ("", None, MADE, "Starting"),
        ("UnitMaking", MADE, "2026-01-01T00:09:59Z", "Starting"),
        ("Starting", MADE, "2026-01-01T00:09:59Z", "Starting"),
        ("Starting", MADE, "2026-01-01T00:10:00Z", "SupervisorSilent"),
        ("Changing", MADE, "2026-01-01T00:01:00Z", "SupervisorSilent"),
        ("AsWanted", MADE, "2026-01-01T00:01:00Z", "SupervisorSilent"),
        ("SupervisorSilent", MADE, "2026-01-01T00:01:00Z", "SupervisorSilent"),
    ],
)
def test_a_head_starts_until_it_has_once_answered_or_for_ten_minutes(
    reason: str, made: str | None, now: str, expected: str
) -> None:
    ray = {"metadata": {"creationTimestamp": made}, "spec": {}} if made else None
    view = seen(set(), 1, pod("head", **UNSCHEDULABLE), heard=Heard(is_certain=True), ray=ray)
    if reason:
        condition = {"type": "Progressing", "status": "True", "reason": reason}
        view = dataclasses.replace(view, obj=view.obj | {"status": {"conditions": [condition]}})
    found = silence(view, now)
    assert found.reason == expected
    words = "is starting" if expected == "Starting" else "does not answer"
    assert found.message == f"Ray's head {words}; pod a-head: {NO_GPU}"


def answered(view: ClusterView) -> ClusterView:
    """Its head has spoken before."""
    condition = {"type": "Progressing", "status": "False", "reason": "AsWanted"}
    return dataclasses.replace(view, obj=view.obj | {"status": {"conditions": [condition]}})


def with_local_prefill(view: ClusterView, local_prefill: Literal["auto", "never"]) -> ClusterView:
    advanced = Advanced(router=changed(RouterConfig(), placement={"local_prefill": local_prefill}))
    return dataclasses.replace(view, spec=dataclasses.replace(view.spec, advanced=advanced))


def silent(*ready: str, local_prefill: Literal["auto", "never"] = "auto") -> ClusterView:
    """Nobody reports workers; each pool of `ready` has a pod that says it takes requests."""
    view = seen(set(), 1, pod("head"), heard=Heard(is_certain=True))
    conditions = {"conditions": [{"type": "Ready", "status": "True"}]}
    pools = {
        name: dataclasses.replace(
            pool, fleet=None, pods=[pod("worker", **conditions)] if name in ready else ()
        )
        for name, pool in view.pools.items()
    }
    return with_local_prefill(dataclasses.replace(view, pools=pools), local_prefill)


def test_while_a_supervisor_is_silent_what_serves_is_available() -> None:
    """As while a head moves to another node: routers and workers go on without it."""
    view = answered(silent("prefill", "decode"))
    verdicts = verdicts_of(view)
    assert said(verdicts["Available"]) == (True, "Serving", "requests are served")
    message = "Ray's head does not answer"
    assert said(verdicts["Progressing"]) == (True, "SupervisorSilent", message)
    found, progressing, degraded = pool_verdicts(view.pools["decode"], "")
    assert said(found) == (True, "Live", "1 of 1 workers are ready, as their pods say")
    assert (progressing.reason, degraded.is_true) == ("SupervisorSilent", False)
    status = pool_status(view.pools["decode"], PlannerConfig(), "2026-01-01T00:00:00Z")
    assert status["readyReplicas"] == 1
    assert cluster_status(view, [])["pools"] == {"prefill": "1/1", "decode": "1/1"}


@pytest.mark.parametrize("state", [State.DRAINING, State.ENDING, State.MAKING])
def test_what_a_unit_waits_for_explains_more_than_a_silent_supervisor(state: State) -> None:
    view = dataclasses.replace(silent(), step=Step(state, "two pods are left"))
    progressing = verdicts_of(view)["Progressing"]
    assert said(progressing) == (True, f"Unit{state.value}", "two pods are left")


@pytest.mark.parametrize(
    ("view", "num_routers_ready", "is_available"),
    [
        (silent("prefill", "decode"), 0, False),
        (silent("prefill"), 2, False),
        (silent("decode"), 2, True),
        (silent("decode", local_prefill="never"), 2, False),
    ],
)
def test_while_a_supervisor_is_silent_what_is_missing_is_missing(
    view: ClusterView, num_routers_ready: int, is_available: bool
) -> None:
    verdict = available(view, num_routers_ready)
    reason = "Serving" if is_available else "SupervisorSilent"
    assert (verdict.is_true, verdict.reason) == (is_available, reason)


@pytest.mark.parametrize(
    ("pods", "deployment", "why"),
    [
        ([], None, ""),
        ([], REFUSED, f"; {OVER_QUOTA}"),
        ([pod("router", **UNSCHEDULABLE)], {}, f"; pod a-router: {NO_GPU}"),
    ],
)
def test_routers_that_are_not_ready_are_reported_with_what_they_wait_for(
    pods: list[Pod], deployment: Any, why: str
) -> None:
    view = seen({"prefill", "decode"}, 1, *pods)
    message = f"no router is ready{why}"
    assert said(available(view, 0, deployment)) == (False, "NoRouterReady", message)


def test_workers_that_are_not_live_are_reported_with_what_they_wait_for() -> None:
    view = seen({"prefill"}, 1, pod("worker", **UNSCHEDULABLE))
    message = f"no worker that decodes is live; decode (pod a-worker: {NO_GPU})"
    assert said(available(view)) == (False, "NoDecodeWorker", message)


def test_without_a_prefill_worker_a_cluster_serves_unless_decode_workers_may_not_prefill() -> None:
    view = seen({"decode"})
    assert available(view).is_true
    verdict = available(with_local_prefill(view, "never"))
    assert said(verdict) == (False, "NoPrefillWorker", "no worker that prefills is live")


def test_a_pool_says_what_its_pods_wait_for_until_all_are_live() -> None:
    view = seen({"prefill"}, 1, pod("worker", **UNSCHEDULABLE))
    pool = view.pools["decode"]
    verdicts = pool_verdicts(pool, "", pool_waits(view, pool))
    message = f"0 of 1 workers live; pod a-worker: {NO_GPU}"
    assert said(verdicts[0]) == (False, "TooFewLive", message)
    assert said(verdicts[1]) == (True, "Starting", message)
    live = seen({"prefill", "decode"}, 1, pod("worker", **UNSCHEDULABLE)).pools["decode"]
    for verdict in pool_verdicts(live, "", "a surplus pod")[:2]:
        assert verdict.message == "1 of 1 workers live"


def test_a_pool_whose_pods_could_not_be_made_says_why() -> None:
    view = seen({"prefill"}, ray=REFUSED)
    assert pool_waits(view, view.pools["decode"]) == OVER_QUOTA
    made = seen({"prefill"}, 1, pod("worker"), ray=REFUSED)
    assert pool_waits(made, made.pools["decode"]) == "", "it is another pool's that could not be"


# --- Progressing and Degraded ---------------------------------------------------------------------

NONE = Refusals()
NO_MODEL = {"decode": "no model"}


def verdicts_of(view: ClusterView, refusals: Refusals = NONE) -> dict[str, Verdict]:
    ready = {"status": {"readyReplicas": 2}}
    found = cluster_verdicts(view, ready, refusals, MADE)
    return {each.type: each for each in found}


def test_a_cluster_says_what_the_pods_wait_for_that_are_still_to_come() -> None:
    view = seen({"prefill"}, 1, pod("worker", **UNSCHEDULABLE))
    progressing = verdicts_of(view)["Progressing"]
    assert said(progressing) == (True, "Changing", f"decode 0/1 (pod a-worker: {NO_GPU})")


@pytest.mark.parametrize(
    ("refusals", "reason", "message"),
    [
        (NONE, "Sound", "nothing has failed"),
        (Refusals(["no right"], NO_MODEL, ["routes are not served"]), "Refused",
         "no right; Ray's head: decode: no model; routes are not served"),
        (Refusals([], {"": "no room"} | NO_MODEL), "SupervisorRefused",
         "Ray's head: no room; Ray's head: decode: no model"),
        (Refusals([], {}, ["routes are not served"]), "NotServed", "routes are not served"),
    ],
)  # fmt: skip
def test_a_fault_has_the_reason_of_what_is_worst_and_says_all_of_it(
    refusals: Refusals, reason: str, message: str
) -> None:
    view = seen({"prefill", "decode"})
    degraded = verdicts_of(view, refusals)["Degraded"]
    assert said(degraded) == (reason != "Sound", reason, message)


NO_CONFIG = "cannot fetch the model: org/name: no such model on the hub"


def failing(message: str) -> Pod:
    """A worker whose init container ends."""
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": f"asks\n{message}\n"}}
    return pod("worker", initContainerStatuses=[{"name": "fetch-model", "state": ended}])


def test_a_model_that_is_not_there_is_reported_by_the_field_that_names_it() -> None:
    view = seen(set(), 1, failing(NO_CONFIG))
    message = f"spec.model.name: {NO_CONFIG}"
    assert said(verdicts_of(view)["Degraded"]) == (True, "ModelUnavailable", message)
    of_pool = pool_verdicts(view.pools["decode"], "")[-1]
    message = f"spec.model of ServingCluster main: {NO_CONFIG}"
    assert said(of_pool) == (True, "ModelUnavailable", message)


def test_an_image_that_cannot_be_pulled_is_no_fault_of_the_model() -> None:
    waits = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    worker = pod("worker", initContainerStatuses=[{"name": "fetch-model", "state": waits}])
    assert not verdicts_of(seen(set(), 1, worker))["Degraded"].is_true


def test_what_a_worker_says_of_its_start_names_settings_as_people_write_them() -> None:
    view = seen({"prefill"})
    fleet = FleetPool(1, (), last_error="a/model: no room for KV: lower engine.max_num_seqs")
    decode = dataclasses.replace(view.pools["decode"], fleet=fleet)
    view = dataclasses.replace(view, pools={**view.pools, "decode": decode})
    message = "a/model: no room for KV: lower spec.engine.maxNumSeqs"
    assert said(pool_verdicts(decode, "")[-1]) == (True, "StartFailed", message)
    message = f"decode: spec.model.name: {message}"
    assert said(verdicts_of(view)["Degraded"]) == (True, "StartFailed", message)


@pytest.mark.parametrize(
    ("asked", "kept", "problem"),
    [
        (65, 3, "above maxReplicas 8: the size stays 3; scale to 8 at most, or raise maxReplicas"),
        (0, 3, "below minReplicas 0: the size stays 3; scale to 0 at least, or lower minReplicas"),
    ],
)
def test_a_size_that_its_bounds_leave_out_is_reported_of_its_pool_and_the_cluster(
    asked: int, kept: int, problem: str
) -> None:
    view = seen({"prefill", "decode"}, kept)
    decode = view.pools["decode"]
    asked_for = dataclasses.replace(decode, obj={"metadata": {}, "spec": {"replicas": asked}})
    view = dataclasses.replace(view, pools={**view.pools, "decode": asked_for})
    where = "of spec.pools.decode in ServingCluster main"
    message = f"spec.replicas is {asked}, {problem} {where}"
    assert said(verdicts_of(view)["Degraded"]) == (True, "InvalidSpec", f"decode: {message}")
    *others, degraded = pool_verdicts(asked_for, "")
    assert said(degraded) == (True, "InvalidSpec", message)
    assert [verdict.reason for verdict in others] == ["Live", "AsWanted"]


# --- endpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("router", "external"),
    [
        (RouterSpec(), None),
        (RouterSpec(hostname="llm.example.com"), "llm.example.com"),
        (RouterSpec(hostname="llm.example.com", tls=RouterTls(secret_name="edge")),
         "grpcs://llm.example.com"),
        (RouterSpec(hostname="llm.example.com", ingress=RouterIngress(tls_secret_name="edge")),
         "grpcs://llm.example.com"),
    ],
)  # fmt: skip
def test_the_way_in_from_outside_is_among_the_endpoints(
    router: RouterSpec, external: str | None
) -> None:
    view = seen({"decode"})
    view = dataclasses.replace(view, spec=dataclasses.replace(view.spec, router=router))
    assert cluster_status(view, [])["endpoints"]["external"] == external
