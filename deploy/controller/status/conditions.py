"""Status conditions: a transition's time changes with the status, not with every look."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.status import MESSAGE
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.manifests.common import Object

AVAILABLE, PROGRESSING, DEGRADED = "Available", "Progressing", "Degraded"


@dataclass(frozen=True)
class Verdict:
    """What is to be told in one condition."""

    type: str
    is_true: bool
    reason: str
    """One CamelCase word, for programs."""
    message: str
    """For people."""


def conditions(verdicts: Sequence[Verdict], seen: Seen, now: str) -> list[Object]:
    """As `.status.conditions`; `seen`: the object with those it has, of which those that nobody
    judges now stay as they were; `now`: RFC 3339."""
    before = {each["type"]: each for each in seen.get("status", {}).get("conditions", ())}
    generation = seen["metadata"].get("generation", 0)
    told = []
    for verdict in verdicts:
        status, old = str(verdict.is_true), before.get(verdict.type)
        is_same = old is not None and old["status"] == status
        told.append(
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
    return told + [dict(each) for kind, each in before.items() if kind not in judged]


def timestamp(moment: datetime.datetime) -> str:
    """As Kubernetes writes one; whole seconds."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shortened(text: str) -> str:
    """As much as a status takes: an API server's refusal may quote all that it refuses."""
    return text if len(text) <= MESSAGE else f"{text[: MESSAGE - 3]}..."
