"""Status conditions, and those of an object that could not be looked at as a whole. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.status import MESSAGE
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.manifests.common import Object
from deploy.controller.manifests.resources import RAY_CLUSTERS

AVAILABLE, PROGRESSING, DEGRADED = "Available", "Progressing", "Degraded"


@dataclass(frozen=True)
class Verdict:
    """What one condition is to say."""

    type: str
    is_true: bool
    reason: str
    """A name in CamelCase, for programs."""
    message: str
    """A sentence for people."""


def conditions(verdicts: Sequence[Verdict], seen: Seen, now: str) -> list[Object]:
    """Write verdicts as `.status.conditions`. Those of `seen` that no verdict is about stay as they
    are. A transition's time changes with the status only. `now`: RFC 3339."""
    before = {each["type"]: each for each in seen.get("status", {}).get("conditions", ())}
    generation = seen["metadata"].get("generation", 0)
    found = []
    for verdict in verdicts:
        status, old = str(verdict.is_true), before.get(verdict.type)
        is_same = old is not None and old["status"] == status
        found.append(
            {
                "type": verdict.type,
                "status": status,
                "reason": verdict.reason,
                "message": shortened(verdict.message),
                "lastTransitionTime": old["lastTransitionTime"] if old and is_same else now,
                "observedGeneration": generation,
            }
        )
    judged = {verdict.type for verdict in verdicts}
    return found + [dict(each) for kind, each in before.items() if kind not in judged]


def timestamp(moment: datetime.datetime) -> str:
    """Write a moment as Kubernetes does, in whole seconds."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shortened(text: str) -> str:
    """Cut a text to what a status takes: an API server's refusal may quote all that it refuses."""
    return text if len(text) <= MESSAGE else f"{text[: MESSAGE - 3]}..."


_LONGEST_QUOTE = 300


def invalid_spec(obj: Seen, problem: str) -> list[Verdict]:
    """Say that nothing is touched: what runs goes on, and is as available as it was."""
    found = [
        Verdict(DEGRADED, True, "InvalidSpec", problem),
        Verdict(PROGRESSING, False, "InvalidSpec", "waits for a spec that can be read"),
    ]
    known = {each["type"] for each in obj.get("status", {}).get("conditions", ())}
    if AVAILABLE not in known:
        found.append(Verdict(AVAILABLE, False, "InvalidSpec", "nothing has been made of it yet"))
    return found


def kuberay_missing() -> list[Verdict]:
    """Say that nobody would make pods, nor keep those that there were."""
    reason = "KubeRayMissing"
    problem = f"{RAY_CLUSTERS} ({RAY_CLUSTERS.version}) are not served: install KubeRay's operator"
    return [
        Verdict(AVAILABLE, False, reason, "there are no pods without KubeRay"),
        Verdict(PROGRESSING, False, reason, "waits for KubeRay"),
        Verdict(DEGRADED, True, reason, problem),
    ]


def ray_ends() -> list[Verdict]:
    """Say what a deleted cluster waits for whose pools are gone."""
    message = "waits for KubeRay to let the RayCluster go"
    return [Verdict(PROGRESSING, True, "Deleting", message)]


def refused(error: Exception) -> list[Verdict]:
    """Say what the API server refused before anything could be done."""
    return [Verdict(DEGRADED, True, "Refused", str(error))]


def internal_error(error: Exception) -> list[Verdict]:
    """Say that the operator itself failed."""
    said = f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST_QUOTE]
    message = f"the operator failed, and tries again; its log says where: {said}"
    return [Verdict(DEGRADED, True, "InternalError", message)]
