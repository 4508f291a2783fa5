"""What is told of an object that could not be looked at as a whole: conditions that say why. Others
stay as they were. Pure.
"""

from __future__ import annotations

from deploy.controller.kit.objects import Object
from deploy.controller.resources import RAY_CLUSTERS
from deploy.controller.status.conditions import AVAILABLE, DEGRADED, PROGRESSING, Verdict

_LONGEST_QUOTE = 300


def invalid_spec(obj: Object, problem: str) -> list[Verdict]:
    """Nothing of it is touched: what runs goes on, and is as available as it was."""
    told = [
        Verdict(DEGRADED, True, "InvalidSpec", problem),
        Verdict(PROGRESSING, False, "InvalidSpec", "waits for a spec that can be read"),
    ]
    known = {each["type"] for each in obj.get("status", {}).get("conditions", ())}
    if AVAILABLE not in known:
        told.append(Verdict(AVAILABLE, False, "InvalidSpec", "nothing has been made of it yet"))
    return told


def kuberay_missing() -> list[Verdict]:
    """Nobody would make pods, nor keep those that there were."""
    reason = "KubeRayMissing"
    problem = f"{RAY_CLUSTERS} ({RAY_CLUSTERS.version}) are not served: install KubeRay's operator"
    return [
        Verdict(AVAILABLE, False, reason, "there are no pods without KubeRay"),
        Verdict(PROGRESSING, False, reason, "waits for KubeRay"),
        Verdict(DEGRADED, True, reason, problem),
    ]


def ray_ends() -> list[Verdict]:
    """Of one that is deleted, and whose pools are gone."""
    told = "waits for KubeRay to let the RayCluster go"
    return [Verdict(PROGRESSING, True, "Deleting", told)]


def refused(error: Exception) -> list[Verdict]:
    """By the API server, before anything could be done."""
    return [Verdict(DEGRADED, True, "Refused", str(error))]


def internal_error(error: Exception) -> list[Verdict]:
    """A fault of the operator's own."""
    said = f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST_QUOTE]
    told = f"the operator failed, and tries again; its log says where: {said}"
    return [Verdict(DEGRADED, True, "InternalError", told)]
