"""The result of one check, and how all results are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

_LONGEST_FOUND = 160
"""Characters: a library's message may fill a page."""


class Outcome(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Wanted:
    """What workers need here: a missing one is a failure."""

    num_gpus: int = 0
    rdma: bool = False
    hugepages: bool = False
    ucx_library: str = "wheel"


@dataclass(frozen=True)
class Check:
    name: str
    outcome: Outcome
    found: str
    """What was found, on one line."""
    fix: str = ""
    """How to fix it, on one line; empty if nothing is wrong."""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.outcome is not Outcome.OK), self


def ok(name: str, found: str) -> Check:
    return Check(name, Outcome.OK, _line(found))


def warning(name: str, found: str, fix: str) -> Check:
    return Check(name, Outcome.WARNING, _line(found), fix)


def failure(name: str, found: str, fix: str) -> Check:
    return Check(name, Outcome.FAILURE, _line(found), fix)


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_FOUND else line[: _LONGEST_FOUND - 3] + "..."


def has_failed(checks: Sequence[Check]) -> bool:
    return any(check.outcome is Outcome.FAILURE for check in checks)


def as_table(checks: Sequence[Check]) -> str:
    """Three columns; a fix follows on its own line."""
    rows = []
    for check in checks:
        rows.append((check.name, check.outcome.value, check.found))
        if check.fix:
            rows.append(("", "fix", check.fix))
    names, outcomes = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = (f"{name:<{names}}  {outcome:<{outcomes}}  {text}" for name, outcome, text in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(checks: Sequence[Check]) -> str:
    result = {"ok": not has_failed(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(result, indent=1)
