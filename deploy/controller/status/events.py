"""What people read in `kubectl describe` of a ServingCluster or WorkerPool: how one status differs
from the one before. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deploy.controller.kit.events import EventType
from deploy.controller.kit.objects import Object
from deploy.controller.observed.view import ClusterView
from deploy.controller.status.conditions import AVAILABLE, DEGRADED, PROGRESSING
from deploy.controller.status.waiting import SILENT

_ROUTINE = ("AsWanted", "Changing", "Deleting", "Draining", "InvalidSpec", "KubeRayMissing")
"""Reasons of Progressing that come and go, or that other events say better."""

Record = Callable[[Object, EventType, str, str], None]
"""About what, its type, its reason in CamelCase, a sentence for people."""


@dataclass(frozen=True)
class Happening:
    type: EventType
    reason: str
    message: str


def _normal(reason: str, message: str) -> Happening:
    return Happening(EventType.NORMAL, reason, message)


def _warning(reason: str, message: str) -> Happening:
    return Happening(EventType.WARNING, reason, message)


@dataclass(frozen=True)
class Look:
    """What events are made from: one object, as one look found it."""

    conditions: Mapping[str, Object] = field(default_factory=dict)
    """The conditions by type."""
    drains: Mapping[str, Object] = field(default_factory=dict)
    """A pool's `status.draining`, by worker."""
    size: int | None = None
    """A pool's; None: it was not looked at before."""
    exposure: str = ""
    """See `exposure`."""

    @classmethod
    def of(cls, status: Object) -> Look:
        return cls(
            {each["type"]: each for each in status.get("conditions") or ()},
            {each["worker"]: each for each in status.get("draining") or ()},
        )


def exposure(view: ClusterView) -> str:
    """Say why the loss of Ray's head would end workers on other nodes; empty: it would not."""
    num_workers = sum(pool.replicas for pool in view.pools.values())
    if view.spec.ray.gcs_fault_tolerance is not None or num_workers < 2:
        return ""
    return (
        f"the loss of Ray's head would start all {num_workers} workers anew: "
        "spec.ray.gcsFaultTolerance names no Redis that keeps its state"
    )


def happenings(before: Look, after: Look) -> list[Happening]:
    """Say what has happened between two looks at one object."""
    found = [
        _condition(kind, before.conditions.get(kind), now) for kind, now in after.conditions.items()
    ]
    found += _drains(before.drains, after.drains)
    if before.size is not None and after.size is not None and after.size != before.size:
        reason = "ScaledOut" if after.size > before.size else "ScaledIn"
        found.append(_normal(reason, f"from {before.size} to {after.size} replicas"))
    if after.exposure and not before.exposure:
        found.append(_warning("HeadUnprotected", after.exposure))
    return [each for each in found if each is not None]


def _condition(kind: str, then: Object | None, now: Object) -> Happening | None:
    said = ("status", "reason", "message")
    if then is not None and all(then[name] == now[name] for name in said):
        return None
    is_true, was_true = now["status"] == "True", then is not None and then["status"] == "True"
    reason, message = now["reason"], now["message"]
    is_new = then is None or then["reason"] != reason
    if kind == AVAILABLE and is_true != was_true:
        return _normal("Available", message) if is_true else _warning("Unavailable", message)
    if kind == DEGRADED and is_true:
        return _warning(reason, message)
    if kind == DEGRADED and was_true:
        return _normal("Recovered", message)
    if kind == PROGRESSING and is_new and reason not in _ROUTINE:
        return (_normal if is_true and reason != SILENT.reason else _warning)(reason, message)
    return None


def _drains(before: Mapping[str, Object], after: Mapping[str, Object]) -> list[Happening]:
    found = []
    for worker, drain in sorted(after.items()):
        where = f" in pod {drain['pod']}" if "pod" in drain else ""
        if worker not in before:
            running = f"{drain['numRunning']} requests run"
            found.append(_normal("Draining", f"worker {worker}{where} drains, {running}"))
        if "heldBy" in drain and "heldBy" not in before.get(worker, {}):
            message = f"worker {worker}{where} does not finish its drain: {drain['heldBy']}"
            found.append(_warning("DrainOverdue", message))
    gone = sorted(before.keys() - after.keys())
    return [*found, *(_normal("Drained", f"worker {worker} has drained") for worker in gone)]
