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

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from baton.pacing import TokenBucket
from deploy.controller.kit.errors import KubeError, NotFoundError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Object, Resource, key_of

log = logging.getLogger(__name__)

EVENTS = Resource("", "v1", "events")

_MOST_WAITING = 1000
_MOST_SERIES = 4096
_LONGEST_MESSAGE = 1024
_LONGEST_NAME = 230
"""Most of the 253 characters of a name, with room for what makes it unique."""
_BURST = 10
_REFILL_S = 60.0
"""One write more, per object and reason."""


Event = dict[str, Any]


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


class EventSeries:
    """Own the Events under way and the allowances; both forget what was used longest ago."""

    def __init__(self) -> None:
        self._events: OrderedDict[tuple[str, ...], Event] = OrderedDict()
        self._allowances: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        """Writes that an object's reason has left."""

    def note(self, event: Event, now: float) -> Event | None:
        """Count an occurrence. Returns the Event to write now, or None. `now`: seconds of any clock
        that never goes back."""
        uid, reason = event["involvedObject"]["uid"], event["reason"]
        key = (uid, event["type"], reason, event["message"])
        if (known := self._events.pop(key, None)) is not None:
            event = known | {"count": known["count"] + 1, "lastTimestamp": event["lastTimestamp"]}
        _put(self._events, key, event)
        return event if self._may_write((uid, reason), now) else None

    def _may_write(self, key: tuple[str, str], now: float) -> bool:
        allowance = self._allowances.pop(key, None) or TokenBucket(_BURST, 1 / _REFILL_S, now)
        _put(self._allowances, key, allowance)
        return allowance.take(now)


def _put(newest: OrderedDict[Any, Any], key: object, value: object) -> None:
    newest[key] = value
    if len(newest) > _MOST_SERIES:
        newest.popitem(last=False)


def event_of(
    about: Object, type_: EventType, reason: str, message: str, component: str, at: datetime
) -> Event:
    """Make the core/v1 Event of a first occurrence. That of a cluster-scoped object is in
    `default`."""
    named = {name: about["metadata"].get(name, "") for name in ("namespace", "name", "uid")}
    stamp = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{named['name'][:_LONGEST_NAME]}.{secrets.token_hex(8)}",
            "namespace": named["namespace"] or "default",
        },
        "involvedObject": {"apiVersion": about["apiVersion"], "kind": about["kind"], **named},
        "type": type_.value,
        "reason": reason,
        "message": message[:_LONGEST_MESSAGE],
        "source": {"component": component},
        "reportingComponent": component,
        "count": 1,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
    }


class EventRecorder:
    """Own the events of one component (`kubectl describe` shows its name) and their writer."""

    def __init__(self, kube: Kube, component: str) -> None:
        self._kube = kube
        self._component = component
        self._series = EventSeries()
        self._waiting = queue.Queue[Event | None](_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what waits, as far as time allows. Returns whether all was written."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def record(self, about: Object, type_: EventType, reason: str, message: str) -> None:
        """Have an Event written. `about`: an object of the API; `reason`: a name in CamelCase, for
        programs; `message`: a sentence for people."""
        event = event_of(about, type_, reason, message, self._component, datetime.now(UTC))
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            log.warning("event dropped, too many at once: %s: %s", reason, message)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            about = event["involvedObject"]
            said = f"{about['kind']} {about['name']}: {event['reason']}: {event['message']}"
            try:
                if (counted := self._series.note(event, time.monotonic())) is not None:
                    self._write(counted)
            except KubeError as error:
                log.warning("event not written: %s: %s", said, error)
            except Exception:
                log.exception("event not written: %s", said)

    def _write(self, event: Event) -> None:
        if event["count"] > 1:
            growth = {name: event[name] for name in ("count", "lastTimestamp")}
            try:
                self._kube.merge_patch(EVENTS, key_of(event), growth)
                return
            except NotFoundError:  # the server forgets events after an hour
                pass
        self._kube.create(EVENTS, event)
