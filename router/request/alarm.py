"""A request's one timer: its deadline, the pause before its next attempt, and how long an attempt
waits for the next sign of life, and from whom.

A worker that the registry calls SUSPECT (stuck or silent) is given less time: a stream that still
flows stays, one that is silent as well moves on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from baton.clock import Clock, Timer
from baton.fleet import WorkerState
from router.fleet.fleet import WorkerEntry

OnSilence = Callable[[WorkerEntry, str], None]
"""Called with the worker of which nothing came, and what was awaited; of several, with the one
whose limit ended first."""


class Alarm:
    """Own the timer. It is moved when it fires: progress is far more frequent than silence."""

    def __init__(
        self,
        deadline_s: float,
        suspect_silence_s: float,
        clock: Clock,
        on_deadline: Callable[[], None],
    ) -> None:
        """`on_deadline`, like what the other calls are given, is called once."""
        self._deadline_s, self._suspect_silence_s = deadline_s, suspect_silence_s
        self._clock, self._on_deadline = clock, on_deadline
        self._timer: Timer | None = None
        self._timer_at_s = math.inf
        self._workers: Sequence[WorkerEntry]
        self._limit_s: Callable[[WorkerEntry], float]
        self._on_silence: OnSilence
        self._on_pause_over: Callable[[], None]
        self.rest()

    def set_timer(self, at_s: float, on_timer: Callable[[], None]) -> None:
        """Set the pause's timer, in place of the one before."""
        self._pause_until_s, self._on_pause_over = at_s, on_timer
        self.review()

    def expect(
        self,
        what: str,
        limit_s: Callable[[WorkerEntry], float],
        workers: Sequence[WorkerEntry],
        on_silence: OnSilence,
    ) -> None:
        """Restart the wait, for any of `workers`. A limit that may grow is computed again when it
        is over."""
        self._workers, self._what = workers, what
        self._since_s, self._limit_s = self._clock.now_s(), limit_s
        self._on_silence = on_silence
        self.review()

    def progress(self, now_s: float) -> None:
        """Note that what was awaited came. It is awaited again."""
        self._since_s = now_s

    def rest(self) -> None:
        """Await nothing but the deadline."""
        self._workers = ()
        self._what, self._since_s, self._pause_until_s = "", 0.0, math.inf
        self._limit_s = lambda _: math.inf
        self._on_silence = lambda *_: None
        self._on_pause_over = lambda: None

    def review(self) -> None:
        """Look for a nearer limit: another was set, or a worker's state changed."""
        at_s = min((self._deadline_s, self._pause_until_s, *map(self._silent_at_s, self._workers)))
        if at_s < self._timer_at_s:
            self._set(at_s)

    def end(self) -> None:
        self.rest()
        self._deadline_s, self._on_deadline = math.inf, lambda: None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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
            self._on_deadline()
        elif self._pause_until_s <= now:
            self._pause_until_s = math.inf
            self._on_pause_over()
        elif self._workers:
            worker = min(self._workers, key=self._silent_at_s)
            if self._silent_at_s(worker) <= now:
                self._workers = ()
                self._on_silence(worker, self._what)
        self.review()
