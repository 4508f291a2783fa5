"""Time as Baton's timers see it: an event loop's clock, or one that a test advances."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol

NowS = Callable[[], float]
"""Reads a monotonic clock, in seconds."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds and callbacks on the owner's thread."""

    def now_s(self) -> float: ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer: ...


class LoopClock:
    """Timers of a running event loop, and monotonic time: uvloop's own has whole ms only."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Use `loop`, or the loop that runs when a timer is set."""
        self._loop = loop

    def now_s(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        loop = self._loop or asyncio.get_running_loop()
        return loop.call_later(delay_s, callback)


async def wait_for_event(clock: Clock, event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until `event` is set, at most `timeout_s` of the clock. Returns whether it is set."""
    if event.is_set():
        return True
    timed_out = asyncio.Event()
    timer = clock.call_later(timeout_s, timed_out.set)
    waits = [asyncio.create_task(each.wait()) for each in (event, timed_out)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        for wait in waits:
            wait.cancel()
    return event.is_set()


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that stands still until `advance`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._order = itertools.count()
        self._timers: list[tuple[float, int, _ManualTimer]] = []

    def now_s(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = _ManualTimer(callback)
        heapq.heappush(self._timers, (self._now_s + delay_s, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`; run every timer that falls due, in order, at its own time."""
        end_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            due_s, _, timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, due_s)
            if timer.callback is not None:
                timer.callback()
        self._now_s = max(self._now_s, end_s)  # a callback may have advanced further


class AwakeClock:
    """Counts only the seconds in which its process was awake.

    A process that judges others by their silence must know that it listened itself. A stopped or
    starved process, or a moved machine, reads late what others sent meanwhile. So each interval
    between two calls of `look` counts at most `longest_s`. A longer one still counts `longest_s`,
    so that time advances for an owner that is always late. Reading the clock changes nothing.
    """

    def __init__(self, clock: NowS, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._looked_at = clock()
        self._awake_s = 0.0

    def __call__(self) -> float:
        return self._awake_s + min(self._clock() - self._looked_at, self._longest_s)

    def look(self) -> None:
        """Count the time since the last look."""
        now = self._clock()
        self._awake_s += min(now - self._looked_at, self._longest_s)
        self._looked_at = now
