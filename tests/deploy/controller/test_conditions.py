"""Conditions: what is judged anew, and what stays as it was."""

from __future__ import annotations

from typing import Any

from deploy.api.status import MESSAGE, Condition
from deploy.controller.status.conditions import (
    AVAILABLE,
    DEGRADED,
    Verdict,
    conditions,
    invalid_spec,
)

BEFORE, NOW = "2026-01-01T10:00:00Z", "2026-01-01T11:00:00Z"


def served() -> dict[str, Any]:
    """A cluster that has served, after an edit."""
    said = conditions(
        [Verdict(AVAILABLE, True, "Serving", "so it is"), Verdict(DEGRADED, False, "Sound", "")],
        {"metadata": {"generation": 1}},
        BEFORE,
    )
    return {"metadata": {"generation": 2}, "status": {"conditions": said}}


def by_type(said: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {each["type"]: each for each in said}
    assert len(found) == len(said), "each type once"
    return found


def test_what_is_not_judged_stays_as_it_was() -> None:
    seen = served()
    said = by_type(conditions(invalid_spec(seen, "spec.model: missing"), seen, NOW))
    assert said["Available"] == {
        "type": "Available",
        "status": "True",
        "reason": "Serving",
        "message": "so it is",
        "lastTransitionTime": BEFORE,
        "observedGeneration": 1,
    }
    degraded = said["Degraded"]
    assert (degraded["status"], degraded["lastTransitionTime"]) == ("True", NOW)
    assert (degraded["reason"], degraded["observedGeneration"]) == ("InvalidSpec", 2)


def test_what_never_could_be_read_is_not_available() -> None:
    new = {"metadata": {"generation": 1}}
    said = by_type(conditions(invalid_spec(new, "spec.model: missing"), new, NOW))
    assert (said["Available"]["status"], said["Available"]["reason"]) == ("False", "InvalidSpec")


def test_what_is_too_long_for_a_condition_is_reported_as_far_as_it_goes() -> None:
    """A status that its schema does not take would not be said at all. An API server's refusal may
    quote the whole of what it refuses."""
    new = {"metadata": {"generation": 1}}
    (said,) = conditions([Verdict(DEGRADED, True, "Refused", "spec: " + "x" * MESSAGE)], new, NOW)
    Condition("Degraded", "True", "Refused", said["message"], NOW)
    assert said["message"].startswith("spec: xxx")
    assert said["message"].endswith("x...")
