"""Events that a person reads in `kubectl describe` and `kubectl get events`.

They are core/v1 Events with counts and first and last times, not events.k8s.io/v1 with a series:
both are one object at the server, but kubectl before 1.23 shows neither age nor count of the
latter (kubernetes/kubectl#1095), and every release shows the former.

What happens again (same object, type, reason and message) raises the count of its Event. Each
object has an allowance of writes for each reason: a failure in a loop neither floods the API server
nor crowds out the object's other events. What was not written still counts, and shows in the next
write.

To record takes no time and never fails: a thread writes. What cannot be written is logged and
dropped.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from deploy.controller.kit.errors import KubeError, NotFoundError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Resource

log = logging.getLogger(__name__)

EVENTS = Resource("", "v1", "events")

_MOST_WAITING = 1000
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

    def __str__(self) -> str:
        return f"{self.about['kind']} {self.about['name']}: {self.reason}: {self.message}"


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


class EventSeries:
    """Own the series under way and the allowances; both forget what was used longest ago."""

    def __init__(self) -> None:
        self._series: OrderedDict[tuple[str, ...], Series] = OrderedDict()
        self._allowances: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        """Writes that an object's reason has left, and when they were counted."""

    def note(self, occurrence: Occurrence) -> Series | None:
        """Count it; the series to write now, None where nothing is to be written."""
        uid = occurrence.about["uid"]
        key = (uid, occurrence.type.value, occurrence.reason, occurrence.message)
        series = self._series.pop(key, None)
        if series is None:
            name = f"{occurrence.about['name'][:_LONGEST_NAME]}.{secrets.token_hex(8)}"
            series = Series(name, occurrence, occurrence)
        else:
            series.count += 1
            series.last = occurrence
        _put(self._series, key, series)
        return series if self._may_write((uid, occurrence.reason), occurrence.at_s) else None

    def _may_write(self, key: tuple[str, str], now: float) -> bool:
        left, counted_at = self._allowances.pop(key, (_BURST, now))
        left = min(_BURST, left + (now - counted_at) / _REFILL_S)
        may_write = left >= 1
        _put(self._allowances, key, (left - may_write, now))
        return may_write


def _put(newest: OrderedDict[Any, Any], key: object, value: object) -> None:
    newest[key] = value
    if len(newest) > _MOST_SERIES:
        newest.popitem(last=False)


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


class EventRecorder:
    """Own the events of one component (`kubectl describe` shows its name) and their writer."""

    def __init__(self, kube: Kube, component: str) -> None:
        self._kube = kube
        self._component = component
        self._series = EventSeries()
        self._waiting: deque[Occurrence] = deque()
        self._changed = threading.Condition()
        self._num_dropped = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what waits, as far as time allows. Returns whether all was written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def record(self, about: Object, type_: EventType, reason: str, message: str) -> None:
        """`about`: an object of the API; `reason`: a name in CamelCase, for programs; `message`:
        a sentence for people."""
        reference = {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            **{name: about["metadata"].get(name, "") for name in ("namespace", "name", "uid")},
        }
        now = datetime.now(UTC)
        occurrence = Occurrence(reference, type_, reason, message, now, time.monotonic())
        with self._changed:
            if self._is_closed or len(self._waiting) >= _MOST_WAITING:
                self._num_dropped += 1
                return
            self._waiting.append(occurrence)
            self._changed.notify()

    def _run(self) -> None:
        while (occurrence := self._take()) is not None:
            try:
                series = self._series.note(occurrence)
                if series is not None:
                    self._write(series)
            except KubeError as error:
                log.warning("event not written: %s: %s", occurrence, error)
            except Exception:
                log.exception("event not written: %s", occurrence)

    def _take(self) -> Occurrence | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._num_dropped:
                log.warning("%d events dropped: too many at once", self._num_dropped)
                self._num_dropped = 0
            return self._waiting.popleft() if self._waiting else None

    def _write(self, series: Series) -> None:
        if series.is_written:
            try:
                key = Key(series.namespace, series.name)
                self._kube.merge_patch(EVENTS, key, series.growth())
                return
            except NotFoundError:  # the server forgets events after an hour
                pass
        series.is_written = True  # or may be: where the answer is lost, the next write finds out
        self._kube.create(EVENTS, series.event(self._component))
