"""A request's one timer: its deadline, the pause before its next attempt, and how long an attempt
waits for the next sign of life, and from whom.

A worker that the registry calls SUSPECT (stuck or silent) is given less time: a stream that still
flows stays, one that is silent as well moves on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from baton.clock import Clock, Timer
from baton.fleet import WorkerState
from router.fleet.fleet import WorkerEntry


class Alarmed(Protocol):
    """Who is called. Each call is made once."""

    def on_deadline(self) -> None: ...
    def on_timer(self) -> None: ...
    def on_silence(self, worker: WorkerEntry, what: str) -> None:
        """Nothing came of what was awaited; of several workers, the one whose limit ended first."""


class Alarm:
    """Own the timer. It is moved when it fires: progress is far more frequent than silence."""

    def __init__(
        self, deadline_s: float, suspect_silence_s: float, clock: Clock, alarmed: Alarmed
    ) -> None:
        self._deadline_s, self._suspect_silence_s = deadline_s, suspect_silence_s
        self._clock, self._alarmed = clock, alarmed
        self._pause_until_s = math.inf
        self._workers: tuple[WorkerEntry, ...] = ()
        self._what = ""
        self._since_s = 0.0
        self._limit_s: Callable[[WorkerEntry], float] = lambda _: math.inf
        self._timer: Timer | None = None
        self._timer_at_s = math.inf

    def set_timer(self, at_s: float) -> None:
        self._pause_until_s = at_s
        self.review()

    def expect(
        self, what: str, limit_s: Callable[[WorkerEntry], float], *workers: WorkerEntry
    ) -> None:
        """Restart the wait, for any of `workers`. A limit that may grow is computed again when it
        is over."""
        self._workers, self._what = workers, what
        self._since_s, self._limit_s = self._clock.now_s(), limit_s
        self.review()

    def progress(self, now_s: float) -> None:
        """What was awaited came, and is awaited again."""
        self._since_s = now_s

    def rest(self) -> None:
        """Nothing is awaited but the deadline."""
        self._workers, self._pause_until_s = (), math.inf

    def review(self) -> None:
        """The next limit may have come nearer: another was set, or a worker's state changed."""
        at_s = min((self._deadline_s, self._pause_until_s, *map(self._silent_at_s, self._workers)))
        if at_s < self._timer_at_s:
            self._set(at_s)

    def end(self) -> None:
        self.rest()
        self._deadline_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for name in ("_alarmed", "_limit_s"):  # they have it; it may have ended before
            vars(self).pop(name, None)

    def _silent_at_s(self, worker: WorkerEntry) -> float:
        at_s = self._since_s + self._limit_s(worker)
        if worker.state is not WorkerState.SUSPECT:
            return at_s
        silent_since_s = max(self._since_s, worker.state_since_s)
        return min(at_s, silent_since_s + self._suspect_silence_s)

    def _set(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._timer = self._clock.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at_s = None, math.inf
        now = self._clock.now_s()
        if self._deadline_s <= now:
            self._deadline_s = math.inf
            self._alarmed.on_deadline()
        elif self._pause_until_s <= now:
            self._pause_until_s = math.inf
            self._alarmed.on_timer()
        elif self._workers:
            worker = min(self._workers, key=self._silent_at_s)
            if self._silent_at_s(worker) <= now:
                self._workers = ()
                self._alarmed.on_silence(worker, self._what)
        if self._deadline_s < math.inf or self._pause_until_s < math.inf or self._workers:
            self.review()
