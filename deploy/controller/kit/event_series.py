"""What of all that happens is worth an Event of the API. Pure.

What happens again (same object, type, reason and message) raises the count of the Event that is
there. Each object has an allowance of writes for each reason: what fails in a loop neither floods
the API server nor crowds out what else happens to the object. What was not written still counts,
and shows in the next write.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

_MOST_SERIES = 4096
_LONGEST_MESSAGE = 1024
_LONGEST_NAME = 230
"""Of the 253 characters that a name may have, with room for what makes it unique."""
_BURST = 10
_REFILL_S = 60.0
"""One write more, per object and reason."""


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class Occurrence:
    """Something that happened to an object; `about` is the object's reference."""

    about: Mapping[str, str]
    type: EventType
    reason: str
    message: str
    at: datetime
    """For people."""
    at_s: float
    """By a clock that never goes back."""


@dataclass
class Series:
    """One Event of the API, as it should be."""

    name: str
    first: Occurrence
    last: Occurrence
    count: int = 1
    is_written: bool = False

    def event(self, component: str) -> dict[str, Any]:
        """A core/v1 Event."""
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "involvedObject": dict(self.first.about),
            "type": self.first.type.value,
            "reason": self.first.reason,
            "message": self.first.message[:_LONGEST_MESSAGE],
            "source": {"component": component},
            "reportingComponent": component,
            "firstTimestamp": _stamp(self.first.at),
            **self.growth(),
        }

    def growth(self) -> dict[str, Any]:
        """What one more occurrence changes."""
        return {"count": self.count, "lastTimestamp": _stamp(self.last.at)}

    @property
    def namespace(self) -> str:
        """A cluster-scoped object's events are in `default`."""
        return self.first.about.get("namespace") or "default"


class EventBook:
    """Own the series under way and the allowances; both forget what was used longest ago."""

    def __init__(self) -> None:
        self._series: OrderedDict[tuple[str, ...], Series] = OrderedDict()
        self._allowances: OrderedDict[tuple[str, str], _Allowance] = OrderedDict()

    def note(self, occurrence: Occurrence) -> Series | None:
        """Count it; the series to write now, None where nothing is to be written."""
        uid = occurrence.about["uid"]
        key = (uid, occurrence.type.value, occurrence.reason, occurrence.message)
        series = self._series.get(key)
        if series is None:
            name = f"{occurrence.about['name'][:_LONGEST_NAME]}.{secrets.token_hex(8)}"
            series = self._series[key] = Series(name, occurrence, occurrence)
        else:
            series.count += 1
            series.last = occurrence
        _used(self._series, key)
        allowance_key = (uid, occurrence.reason)
        allowance = self._allowances.setdefault(allowance_key, _Allowance(occurrence.at_s))
        _used(self._allowances, allowance_key)
        return series if allowance.take(occurrence.at_s) else None


class _Allowance:
    def __init__(self, now: float) -> None:
        self._left = float(_BURST)
        self._counted_at = now

    def take(self, now: float) -> bool:
        self._left = min(_BURST, self._left + (now - self._counted_at) / _REFILL_S)
        self._counted_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _used(book: OrderedDict[Any, Any], key: object) -> None:
    book.move_to_end(key)
    if len(book) > _MOST_SERIES:
        book.popitem(last=False)


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
