"""How long an attempt waits for the next sign of life, and from whom.

A worker that the registry calls SUSPECT (stuck or silent) is given less time: a stream that still
flows stays, one that is silent as well moves on.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.clock import Clock, Timer
from router.fleet.fleet import WorkerEntry, WorkerState

Limit = (
    float | Callable[[], float]
)  # seconds from the last progress, or a function that returns them


class Patience:
    """Own the limit on an attempt's silence. Calls `on_over(worker, what was awaited)` once."""

    def __init__(
        self,
        suspect_silence_s: float,
        clock: Clock,
        on_over: Callable[[WorkerEntry, str], None],
    ) -> None:
        self._suspect_silence_s, self._clock, self._on_over = suspect_silence_s, clock, on_over
        self._workers: tuple[WorkerEntry, ...] = ()
        self._what = ""
        self._since_s = self._timer_at_s = 0.0
        self._limit: Limit = 0.0
        self._timer: Timer | None = None

    def expect(self, what: str, limit: Limit, *workers: WorkerEntry) -> None:
        """Restart the wait, for any of `workers`. A limit that may grow is computed again when it
        is over. If nothing comes, the worker whose limit ended first is named."""
        self._workers, self._what = workers, what
        self._since_s, self._limit = self._clock.now_s(), limit
        self.review()

    def review(self) -> None:
        """The limit may have come nearer: another one was set, or the worker's state changed."""
        if self._workers:
            over_at_s = min(map(self._over_at_s, self._workers))
            if self._timer is None or over_at_s < self._timer_at_s:
                self._set_timer(over_at_s)

    def end(self) -> None:
        self._workers = ()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over_at_s(self, worker: WorkerEntry) -> float:
        limit = self._limit
        over_at_s = self._since_s + (limit() if callable(limit) else limit)
        if worker.state is not WorkerState.SUSPECT:
            return over_at_s
        silent_since_s = max(self._since_s, worker.state_since_s)
        return min(over_at_s, silent_since_s + self._suspect_silence_s)

    def _set_timer(self, at_s: float) -> None:
        """One timer that is moved when it fires: progress is far more frequent than silence."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._timer = self._clock.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._workers:
            return
        worker = min(self._workers, key=self._over_at_s)
        over_at_s = self._over_at_s(worker)
        if over_at_s > self._clock.now_s():
            self._set_timer(over_at_s)
        else:
            self._on_over(worker, self._what)
