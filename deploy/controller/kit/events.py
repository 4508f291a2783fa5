"""Events that a person reads in `kubectl describe` and `kubectl get events`.

They are core/v1 Events with counts and first and last times, not events.k8s.io/v1 with a series:
both are one object at the server, but kubectl before 1.23 shows neither age nor count of the
latter (kubernetes/kubectl#1095), and every release shows the former.

To record takes no time and never fails: a thread writes, and what cannot be written is dropped and
logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from datetime import UTC, datetime

from deploy.controller.kit.errors import KubeError, NotFoundError
from deploy.controller.kit.event_series import EventBook, EventType, Occurrence, Series
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Resource

log = logging.getLogger(__name__)

EVENTS = Resource("", "v1", "events")

_MOST_WAITING = 1000


class EventRecorder:
    """Own the events of one component (`kubectl describe` shows its name) and their writer."""

    def __init__(self, kube: Kube, component: str) -> None:
        self._kube = kube
        self._component = component
        self._book = EventBook()
        self._waiting: deque[Occurrence] = deque()
        self._changed = threading.Condition()
        self._num_dropped = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what waits, as far as that can be done in time. Whether it could."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def record(self, about: Object, type_: EventType, reason: str, message: str) -> None:
        """`about`: an object of the API; `reason`: one word in CamelCase, for programs; `message`:
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
                series = self._book.note(occurrence)
                if series is not None:
                    self._write(series)
            except KubeError as error:
                log.warning("event not written: %s: %s", _words(occurrence), error)
            except Exception:
                log.exception("event not written: %s", _words(occurrence))

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


def _words(occurrence: Occurrence) -> str:
    about = occurrence.about
    return f"{about['kind']} {about['name']}: {occurrence.reason}: {occurrence.message}"
