"""What people read of a cluster: each change once, and nothing of what stays as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from baton.clock import ManualClock
from cluster.planner.planner import PoolPlan
from cluster.pools.role_plan import RolePlan as PlannedRoles
from deploy.api.worker_pool import RolePlan, Scaling
from deploy.controller.kit.events import EventType
from deploy.controller.kit.objects import Object
from deploy.controller.observed import FleetPool, Heard, Place, PlaceState, Pod
from deploy.controller.status.cluster_events import ClusterEvents
from deploy.controller.view import ClusterView, PoolView
from tests.deploy.controller.clusters import pod, view_of

NORMAL, WARNING = EventType.NORMAL, EventType.WARNING


class Looks:
    """What the operator sees of a cluster's decode pool, and what it records."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._told: list[tuple[EventType, str, str]] = []
        self._events = ClusterEvents(self._record, "baton-controller", self.clock.now_s)
        self.replicas = 1
        self.writer: str | None = None
        self.written_at = 1
        self.pods: Sequence[Pod] = ()
        self.places: Sequence[Place] | None = ()
        self.plan: PoolPlan | None = None
        self.is_settled = True
        self.conditions: list[dict[str, Any]] = []
        self.role_plan: RolePlan | None = None
        self.ray: dict[str, Any] = {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}

    def _record(self, about: Object, type_: EventType, reason: str, message: str) -> None:
        self._told.append((type_, reason, message))

    def told(self) -> list[tuple[EventType, str, str]]:
        """By one more look."""
        self._told.clear()
        view = self._view()
        self._events.look_at(view.obj)
        plans: Mapping[str, PoolPlan] = {} if self.plan is None else {"decode": self.plan}
        self._events.look(view, plans)
        return list(self._told)

    def forget(self) -> None:
        self._events.forget(self._view().key)

    def _view(self) -> ClusterView:
        usual = view_of(self.pods, ray=self.ray)
        fields = [] if self.writer is None else [
            {"manager": "old", "time": "0", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
            {"manager": self.writer, "time": str(self.written_at),
             "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        ]  # fmt: skip
        metadata = {"name": "main-decode", "uid": "u", "managedFields": fields}
        spec = dataclasses.replace(
            usual.pools["decode"].spec, replicas=self.replicas, scaling=Scaling(mode="planner"),
            role="mixed", role_plan=self.role_plan,
        )  # fmt: skip
        fleet = None if self.places is None else FleetPool(self.replicas, self.places)
        pools = {"decode": PoolView({"metadata": metadata}, spec, self.pods, fleet)}
        metadata = {"namespace": usual.key.namespace, "name": usual.key.name}
        obj = {"metadata": metadata, "status": {"conditions": self.conditions}}
        heard = Heard(is_settled=self.is_settled)
        return dataclasses.replace(usual, obj=obj, pools=pools, heard=heard)


@pytest.fixture
def looks() -> Looks:
    """After a first look, which is never news."""
    looks = Looks()
    assert looks.told() == []
    return looks


def condition(kind: str, is_true: bool, reason: str, message: str = "so it is") -> dict[str, Any]:
    return {"type": kind, "status": str(is_true), "reason": reason, "message": message}


def draining(num_running: int = 3) -> Place:
    return Place("decode-1", "pod-b", PlaceState.DRAINING, num_running)


def test_a_head_that_several_workers_hang_on_is_told_of_once(looks: Looks) -> None:
    looks.ray, looks.replicas = {}, 2
    exposed = (WARNING, "HeadUnprotected")
    assert [(type_, reason) for type_, reason, _ in looks.told()] == [
        (NORMAL, "ScaledOut"),
        exposed,
    ]
    assert looks.told() == []
    looks.replicas = 1
    looks.told()
    looks.replicas = 2
    assert exposed in [(type_, reason) for type_, reason, _ in looks.told()]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_head_of_a_cluster_that_an_operator_has_seen_before_is_no_news(is_new: bool) -> None:
    looks = Looks()
    looks.ray, looks.replicas = {}, 2
    looks.conditions = [] if is_new else [condition("Available", False, "Missing")]
    assert [reason for _, reason, _ in looks.told()] == ["HeadUnprotected"] * is_new


def test_what_stays_as_it_is_is_no_news(looks: Looks) -> None:
    looks.pods, looks.places = [pod("a")], [draining()]
    looks.conditions = [condition("Degraded", True, "StartFailed")]
    assert looks.told()
    assert looks.told() == []


@pytest.mark.parametrize(
    ("kind", "states", "told"),
    [
        ("Available", [(False, "NoDecodeWorker")], []),  # it has never been
        ("Available", [(True, "Serving")], [(NORMAL, "Available")]),
        ("Available", [(True, "Serving"), (False, "NoDecodeWorker")],
         [(NORMAL, "Available"), (WARNING, "Unavailable")]),
        ("Degraded", [(False, "Sound")], []),
        ("Degraded", [(True, "KubeRayMissing")], [(WARNING, "KubeRayMissing")]),
        ("Progressing", [(False, "KubeRayMissing")], []),
        ("Degraded", [(True, "InvalidSpec"), (False, "Sound")],
         [(WARNING, "InvalidSpec"), (NORMAL, "Recovered")]),
        ("Degraded", [(True, "InvalidSpec"), (True, "Refused")],
         [(WARNING, "InvalidSpec"), (WARNING, "Refused")]),
        ("Progressing", [(True, "Starting"), (False, "AsWanted")], [(NORMAL, "Starting")]),
        ("Progressing", [(True, "SupervisorSilent"), (False, "AsWanted")],
         [(WARNING, "SupervisorSilent")]),
        ("Progressing", [(False, "AsWanted"), (True, "SupervisorSilent")],
         [(WARNING, "SupervisorSilent")]),
        ("Progressing", [(True, "UnitDraining"), (True, "Starting"), (False, "AsWanted")],
         [(NORMAL, "UnitDraining"), (NORMAL, "Starting")]),
        ("Progressing", [(True, "UnitDraining"), (True, "UnitMaking")],
         [(NORMAL, "UnitDraining"), (NORMAL, "UnitMaking")]),
    ],
)  # fmt: skip
def test_a_condition_is_news_when_it_changes(
    looks: Looks,
    kind: str,
    states: list[tuple[bool, str]],
    told: list[tuple[EventType, str]],
) -> None:
    heard = []
    for is_true, reason in states:
        looks.conditions = [condition(kind, is_true, reason)]
        heard += looks.told()
    assert heard == [(type_, reason, "so it is") for type_, reason in told]


@pytest.mark.parametrize(
    ("writer", "by"),
    [
        ("kubectl", ", by kubectl"),
        ("kube-controller-manager", ", by a HorizontalPodAutoscaler"),
        ("baton-controller", ", by the planner"),
        (None, ""),
    ],
)
def test_a_pools_size_is_told_from_and_to_and_by_whom(
    looks: Looks, writer: str | None, by: str
) -> None:
    looks.replicas, looks.writer = 3, writer
    assert looks.told() == [(NORMAL, "ScaledOut", f"from 1 to 3 replicas{by}")]
    looks.replicas, looks.written_at = 2, 2
    assert looks.told() == [(NORMAL, "ScaledIn", f"from 3 to 2 replicas{by}")]


def test_who_wrote_a_size_before_is_not_taken_for_who_changed_it(looks: Looks) -> None:
    looks.writer = "baton-controller"
    looks.told()
    looks.writer = None  # a look at what the cache holds
    looks.told()
    looks.replicas, looks.writer = 3, "baton-controller"
    assert looks.told() == [(NORMAL, "ScaledOut", "from 1 to 3 replicas")]


def test_the_planners_decision_is_told_once_with_its_reason(looks: Looks) -> None:
    looks.plan = PoolPlan(3, None, "the queue waits 4 s")
    wanted = (NORMAL, "Planned", "from 1 to 3 replicas: the queue waits 4 s")
    assert looks.told() == [wanted]
    assert looks.told() == [], "what it wrote is not heard of yet"
    looks.replicas = 3
    assert [reason for _, reason, _ in looks.told()] == ["ScaledOut"]


def test_a_role_switch_that_the_planner_decides_is_told(looks: Looks) -> None:
    looks.role_plan, looks.replicas = RolePlan(prefill=3, decode=1), 4
    looks.told()
    looks.plan = PoolPlan(4, PlannedRoles(1, 3), "prompts are short")
    message = "1 act as prefill alone, 3 as decode alone: prompts are short"
    assert looks.told() == [(NORMAL, "Planned", message)]


def test_a_drain_is_told_when_it_begins_and_when_it_is_over(looks: Looks) -> None:
    looks.places = [draining()]
    begun = "worker decode-1 in pod pod-b drains, 3 requests run"
    assert looks.told() == [(NORMAL, "Draining", begun)]
    looks.places = [draining(1)]
    assert looks.told() == []
    looks.places = []
    assert looks.told() == [(NORMAL, "Drained", "worker decode-1 has drained")]


@pytest.mark.parametrize(
    ("num_running", "held_by"),
    [
        (2, "2 requests still run"),
        (0, "nothing runs on it any more, but its processes do not end"),
    ],
)
def test_a_drain_that_does_not_end_says_once_what_holds_it(
    looks: Looks, num_running: int, held_by: str
) -> None:
    looks.places = [draining(num_running)]  # drainTimeout: 1m30s
    looks.told()
    looks.clock.advance(119.0)
    assert looks.told() == []
    looks.clock.advance(2.0)
    message = f"worker decode-1 in pod pod-b does not finish its drain: {held_by}"
    assert looks.told() == [(WARNING, "DrainOverdue", message)]
    looks.clock.advance(400.0)
    assert looks.told() == []


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_supervisor_that_is_silent_or_knows_nothing_yet_ends_no_drain(
    looks: Looks, is_silent: bool
) -> None:
    looks.places = [draining()]
    looks.told()
    looks.places, looks.is_settled = (None if is_silent else []), False
    assert looks.told() == []
    looks.places, looks.is_settled = [draining()], True
    assert looks.told() == []


def test_a_pod_that_is_gone_is_told(looks: Looks) -> None:
    looks.pods = [pod("a"), pod("b")]
    assert looks.told() == []
    looks.pods = [pod("a")]
    assert looks.told() == [(NORMAL, "PodRemoved", "pod b is gone")]


def test_a_cluster_that_is_forgotten_is_looked_at_anew(looks: Looks) -> None:
    looks.forget()
    looks.replicas = 3
    assert looks.told() == []
