"""Causes that figures show: of traffic that `python -m bench.diagnose` made, and changed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.report.diagnosis import ACTIONS, diagnose

LINES = Path(__file__).with_name("diagnosed.jsonl").read_text().splitlines()
RECORDED = {line["traffic"]: line for line in map(json.loads, LINES)}
SHORT, LONG, BURSTS, SYSTEM, MIXED = RECORDED
HITS = {"prefilled_prompt_tokens": [1e6], "cached_prompt_tokens": [9e5]}
ALIKE = {"request_prompt_tokens": [0, 0, 0, 0, 0, 900, 0, 0, 0, 0, 0, 9e5]}
TABLE: list[tuple[str, dict[str, Any], str]] = [
    (SHORT, {}, "decode full"),
    (LONG, {}, "long prompts, no shared prefix"),
    (BURSTS, {}, "bursts"),
    (SYSTEM, {}, ""),
    (MIXED, {}, "long before short"),
    (MIXED, {"after": ALIKE}, "prefill behind"),
    (SHORT, {"after": {"kv/decode": [25]}}, "KV full"),
    (SHORT, {"itl_s": 0.001}, "decode batches"),
    (SYSTEM, {"itl_s": 0.001}, "slow steps"),
    (SYSTEM, {"itl_s": 0.001, "after": {"placements/local": [500]}}, "prefill beside decode"),
    (SYSTEM, {"itl_s": 0.001, "after": {"handoff_seconds": [*[0] * 16, 900]}}, "slow handoffs"),
    (LONG, {"before": HITS}, "lost prefix"),
    (SHORT, {"after": {"pace/decode/decode-1": [0.005]}}, "slow worker"),
    (LONG, {"after": {"pace/prefill/prefill-1": [1e-4]}}, "slow worker"),
]


def changed(totals: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    return totals | {k: [a + b for a, b in zip(totals.get(k, [0] * 99), by[k])] for k in by}


@pytest.mark.parametrize(("traffic", "change", "causes"), TABLE)
def test_the_likeliest_cause_comes_first(traffic: str, change: dict[str, Any], causes: str) -> None:
    earlier = change.get("before", {})
    before, after = (changed(RECORDED[traffic][when], earlier) for when in ("before", "after"))
    after = changed(after, change.get("after", {}))
    _, _, findings = diagnose(before, after, 0.5, change.get("itl_s", 0.1))
    found = [each for each, *_ in findings] or [""]
    assert found[: 1 + causes.count(",")] == causes.split(", ")
    assert not any("{" in says + action for _, says, action in findings)


def test_a_pool_is_scaled_to_what_waits_beside_what_runs() -> None:
    """48 clients over 16 streams; the one prefill worker of the mixed load is asked for two."""
    for traffic, action in ((SHORT, "scale decode 3"), (MIXED, "scale prefill 2")):
        (_, _, told), *_ = diagnose(
            RECORDED[traffic]["before"], RECORDED[traffic]["after"], 0.5, 0.1
        )[2]
        assert action in told


def test_every_cause_is_shown() -> None:
    assert {cause for *_, causes in TABLE for cause in causes.split(", ")} - {""} == set(ACTIONS)


def test_a_router_that_has_seen_nothing_has_nothing_wrong() -> None:
    assert diagnose({}, {}, 0.5, 0.1)[2] == []
