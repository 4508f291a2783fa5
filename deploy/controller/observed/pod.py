"""A pod as the API server shows it, and what it waits for. The scheduler, the kubelet and the pods'
owners write that into statuses. Pure.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.controller.kit.objects import Object
from deploy.controller.manifests.common import COMPONENT_LABEL, POOL_LABEL, UNIT_LABEL

_ENDS_WITHIN = datetime.timedelta(seconds=60)
"""A kubelet that runs has ended a pod by then, once its grace is over."""
_LOST = "its time to end is over, and nobody has ended it: is its node lost?"
_LONGEST_QUOTE = 240
_MOST_NAMED = 3
_BEING_MADE = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True)
class Pod:
    name: str
    pool: str
    is_ready: bool
    is_going: bool
    """Whether its deletion has begun."""
    created_at: str
    waits_for: str = ""
    """Why it does not run; empty: it does, or nothing says why."""
    component: str = ""
    """What it is of the cluster: head, worker or router."""
    unit: str = ""
    """The code of its unit; a router is of none."""
    is_lost: bool = False
    """Whether it should have ended and has not: its node may be lost."""

    @classmethod
    def of(cls, obj: Object, now: datetime.datetime) -> Pod:
        metadata, conditions = obj["metadata"], obj.get("status", {}).get("conditions", ())
        is_lost, labels = _is_lost(metadata, now), metadata.get("labels", {})
        return cls(
            name=metadata["name"],
            pool=labels.get(POOL_LABEL, ""),
            is_ready=any(
                each["type"] == "Ready" and each["status"] == "True" for each in conditions
            ),
            is_going="deletionTimestamp" in metadata,
            created_at=metadata.get("creationTimestamp", ""),
            waits_for=_LOST if is_lost else waits_for(obj),
            component=labels.get(COMPONENT_LABEL, ""),
            unit=labels.get(UNIT_LABEL, ""),
            is_lost=is_lost,
        )


def _is_lost(metadata: Object, now: datetime.datetime) -> bool:
    """Tell whether a pod should have ended: the time of its deletion is when its grace ends."""
    if "deletionTimestamp" not in metadata:
        return False
    return now > datetime.datetime.fromisoformat(metadata["deletionTimestamp"]) + _ENDS_WITHIN


def waits_for(pod: Object) -> str:
    """Say why a pod does not run yet, or no more; empty: it runs, or nothing says why."""
    status = pod.get("status", {})
    if status.get("phase") == "Failed":
        return _worded(status.get("reason", "Failed"), status.get("message", ""))
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _worded(condition.get("reason", "Unschedulable"), condition.get("message", ""))
    first = [each for each in status.get("initContainerStatuses", ()) if not _is_beside(pod, each)]
    then = status.get("containerStatuses", ())
    for container in (*first, *then):
        if trouble := _trouble(container):
            return f"{container['name']}: {trouble}"
    running = [each["name"] for each in first if "running" in each.get("state", {})]
    if running:
        return f"{running[0]} runs first"
    reasons = {each.get("state", {}).get("waiting", {}).get("reason") for each in then}
    return "ContainerCreating" if reasons & _BEING_MADE else ""


def pods_refused(owner: Object | None) -> str:
    """Say why a RayCluster or a Deployment could not make a pod, such as a quota; empty: none says
    so. `owner`: None where there is none."""
    status = {} if owner is None else owner.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return _worded(condition.get("reason", "ReplicaFailure"), condition.get("message", ""))
    return ""


def together(waits: Mapping[str, str]) -> str:
    """Say what several pods, by name, wait for: what most of them do first. Empty: nothing."""
    found = []
    counted = Counter(why for why in waits.values() if why)
    for why, count in sorted(counted.items(), key=lambda each: (-each[1], each[0])):
        name = next(name for name in sorted(waits) if waits[name] == why)
        found.append(f"pod {name}: {why}" if count == 1 else f"{count} pods: {why}")
    return "; ".join(found[:_MOST_NAMED])


def _is_beside(pod: Object, status: Object) -> bool:
    """Tell whether an init container is a sidecar, which runs for as long as the pod does."""
    specs: Sequence[Object] = pod.get("spec", {}).get("initContainers", ())
    return any(
        each["name"] == status["name"] and each.get("restartPolicy") == "Always" for each in specs
    )


def _trouble(container: Object) -> str:
    """Say why a container does not run; empty: it does, or is being made."""
    state = container.get("state", {})
    ended, waiting = state.get("terminated"), state.get("waiting")
    if ended is not None:
        return _ended(ended) if ended.get("exitCode") else ""
    if waiting is None or waiting.get("reason") in _BEING_MADE:
        return ""
    before = container.get("lastState", {}).get("terminated")
    if before is not None:  # how it ended says more than when it is tried again
        return _worded(waiting.get("reason", "waiting"), _ended(before))
    return _worded(waiting.get("reason", "waiting"), waiting.get("message", ""))


def _ended(terminated: Object) -> str:
    """Say how a container ended. The last line is what a program says of its end."""
    lines = terminated.get("message", "").strip().splitlines()
    how = f"{terminated.get('reason', 'ended')}, exit code {terminated.get('exitCode')}"
    return _worded(how, lines[-1] if lines else "")


def _worded(reason: str, message: str) -> str:
    lines = message.strip().splitlines()
    return f"{reason}: {lines[0][:_LONGEST_QUOTE]}" if lines else reason
