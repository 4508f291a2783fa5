"""Pure: what a pod's status says of how its containers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.k8s.kubelet.container import Ended, now_text


@dataclass(frozen=True)
class ContainerState:
    """One container, at a moment."""

    name: str
    image: str
    running_since: str | None = None
    ended: Ended | None = None
    """How its last run ended; None: it has not ended yet."""
    is_started: bool = False
    is_ready: bool = False
    num_restarts: int = 0
    waits_for: str | None = None
    """Kubernetes' name for it; None where it does not wait."""
    message: str = ""
    is_over: bool = False
    """It is not started again."""

    def status(self) -> dict[str, Any]:
        state: dict[str, Any]
        last: dict[str, Any] = {}
        if self.running_since is not None:
            state = {"running": {"startedAt": self.running_since}}
        elif self.ended is not None and self.waits_for is None:
            state = _terminated(self.ended)
        else:
            state = {"waiting": {"reason": self.waits_for or "ContainerCreating"}}
            if self.message:
                state["waiting"]["message"] = self.message
        if self.ended is not None and "terminated" not in state:
            last = _terminated(self.ended)
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "state": state,
            "lastState": last,
            "ready": self.is_ready,
            "started": self.is_started,
            "restartCount": self.num_restarts,
        }


@dataclass(frozen=True)
class PodState:
    """One pod, at a moment."""

    address: str
    host_address: str
    started_at: str
    inits: Sequence[ContainerState]
    containers: Sequence[ContainerState]
    is_going: bool

    @property
    def is_initialized(self) -> bool:
        return all(each.is_over and _has_succeeded(each) for each in self.inits)

    @property
    def has_begun(self) -> bool:
        """Every container has run, or runs."""
        return self.is_initialized and all(
            each.running_since is not None or each.ended is not None for each in self.containers
        )

    @property
    def phase(self) -> str:
        if any(each.is_over and not _has_succeeded(each) for each in self.inits):
            return "Failed"
        if not self.has_begun:
            return "Pending"
        if not all(each.is_over for each in self.containers):
            return "Running"
        return "Succeeded" if all(map(_has_succeeded, self.containers)) else "Failed"

    @property
    def is_over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_ready(self) -> bool:
        """A pod that is being deleted is not, however it feels."""
        return (
            self.phase == "Running"
            and not self.is_going
            and all(each.is_ready for each in self.containers)
        )

    def status(self, former: Mapping[str, Any]) -> dict[str, Any]:
        """`former`: what the pod's status said before, for since when a condition holds."""
        conditions = {
            "PodScheduled": True,
            "Initialized": self.is_initialized,
            "ContainersReady": self.is_ready,
            "Ready": self.is_ready,
        }
        return {
            "phase": self.phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": self.host_address,
            "startTime": self.started_at,
            "conditions": [condition(kind, holds, former) for kind, holds in conditions.items()],
            "initContainerStatuses": [each.status() for each in self.inits],
            "containerStatuses": [each.status() for each in self.containers],
        }


def condition(
    kind: str, holds: bool, former: Mapping[str, Any], reason: str = "", message: str = ""
) -> dict[str, Any]:
    said = "True" if holds else "False"
    for each in former.get("conditions") or ():
        if each["type"] == kind and each["status"] == said:
            since = each["lastTransitionTime"]
            break
    else:
        since = now_text()
    why = {name: text for name, text in (("reason", reason), ("message", message)) if text}
    return {"type": kind, "status": said, "lastTransitionTime": since, **why}


def _terminated(ended: Ended) -> dict[str, Any]:
    return {
        "terminated": {
            "exitCode": ended.status,
            "reason": "Completed" if ended.status == 0 else "Error",
            "startedAt": ended.started_at,
            "finishedAt": ended.ended_at,
        }
    }


def _has_succeeded(container: ContainerState) -> bool:
    return container.ended is not None and container.ended.status == 0
