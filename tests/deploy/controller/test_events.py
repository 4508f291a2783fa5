"""What people read of a cluster: each change once, and nothing of what stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.controller.kit.events import EventType
from deploy.controller.status.events import Look, exposure, happenings
from tests.deploy.controller.views import view_of

NORMAL, WARNING = EventType.NORMAL, EventType.WARNING
POOL: dict[str, Any] = {"metadata": {"name": "main-decode"}}
DRAIN = {"worker": "decode-1", "pod": "pod-b", "numRunning": 3, "since": "2026-01-01T10:00:00Z"}
OVERDUE = DRAIN | {"heldBy": "3 requests still run"}

Event = tuple[EventType, str, str]


def changes(before: Look, after: Look) -> list[Event]:
    return [(each.type, each.reason, each.message) for each in happenings(before, after)]


def with_condition(kind: str, is_true: bool, reason: str) -> Look:
    message = "so it is"
    condition = {"type": kind, "status": str(is_true), "reason": reason, "message": message}
    return Look.of({"conditions": [condition]})


@pytest.mark.parametrize(
    ("kind", "states", "expected"),
    [
        ("Available", [(False, "NoDecodeWorker")], []),  # it has never been
        ("Available", [(True, "Serving")], [(NORMAL, "Available")]),
        ("Available", [(True, "Serving"), (False, "NoDecodeWorker")],
         [(NORMAL, "Available"), (WARNING, "Unavailable")]),
        ("Degraded", [(False, "Sound")], []),
        ("Degraded", [(True, "KubeRayMissing"), (True, "KubeRayMissing")],
         [(WARNING, "KubeRayMissing")]),
        ("Progressing", [(False, "KubeRayMissing")], []),
        ("Degraded", [(True, "InvalidSpec"), (False, "Sound")],
         [(WARNING, "InvalidSpec"), (NORMAL, "Recovered")]),
        ("Degraded", [(True, "InvalidSpec"), (True, "Refused")],
         [(WARNING, "InvalidSpec"), (WARNING, "Refused")]),
        ("Progressing", [(True, "Starting"), (False, "AsWanted")], [(NORMAL, "Starting")]),
        ("Progressing", [(False, "AsWanted"), (True, "SupervisorSilent")],
         [(WARNING, "SupervisorSilent")]),
        ("Progressing", [(True, "UnitDraining"), (True, "Starting"), (False, "AsWanted")],
         [(NORMAL, "UnitDraining"), (NORMAL, "Starting")]),
    ],
)  # fmt: skip
def test_a_condition_is_news_when_it_changes(
    kind: str, states: list[tuple[bool, str]], expected: list[tuple[EventType, str]]
) -> None:
    look, found = Look(), []
    for is_true, reason in states:
        before, look = look, with_condition(kind, is_true, reason)
        found += changes(before, look)
    assert found == [(type_, reason, "so it is") for type_, reason in expected]


def test_a_pools_size_is_reported() -> None:
    assert changes(Look(size=1), Look(size=3)) == [(NORMAL, "ScaledOut", "from 1 to 3 replicas")]
    assert changes(Look(size=3), Look(size=2)) == [(NORMAL, "ScaledIn", "from 3 to 2 replicas")]
    assert changes(Look(), Look(size=3)) == [], "a first look is no news"


def test_a_drain_is_reported_when_it_begins_when_it_is_overdue_and_when_it_is_over() -> None:
    none, drains, overdue = Look(), Look.of({"draining": [DRAIN]}), Look.of({"draining": [OVERDUE]})
    begun = "worker decode-1 in pod pod-b drains, 3 requests run"
    assert changes(none, drains) == [(NORMAL, "Draining", begun)]
    assert changes(drains, Look.of({"draining": [DRAIN | {"numRunning": 1}]})) == []
    late = "worker decode-1 in pod pod-b does not finish its drain: 3 requests still run"
    assert changes(drains, overdue) == [(WARNING, "DrainOverdue", late)]
    assert changes(overdue, overdue) == []
    assert changes(overdue, none) == [(NORMAL, "Drained", "worker decode-1 has drained")]


def test_a_head_that_several_workers_depend_on_is_reported_once() -> None:
    exposed = Look(exposure=exposure(view_of()))
    assert [each[:2] for each in changes(Look(), exposed)] == [(WARNING, "HeadUnprotected")]
    assert changes(exposed, exposed) == changes(exposed, Look()) == []
    redis = {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}
    assert exposure(view_of(ray=redis)) == ""
