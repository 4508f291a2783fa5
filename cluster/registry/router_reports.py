"""What routers tell of their queues and arrivals: the newest of each that still speaks.

Pure: it reads a clock and nothing else. `report` is opaque here: a serialised message. That a call
breaks, or says nothing more, does not say that its router has gone: cut off from here it may serve
its clients as ever.

A router has one call at a time, and a cut one may be seen to end long after the next has begun: so
calls are numbered as they begin, and what comes of one counts no more once a later one has told.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from cluster.registry.awake_clock import Clock

SILENT_AFTER_S = 5.0
"""The figures of a router that has told nothing for this long are left out."""
FORGOTTEN_AFTER_S = 300.0
"""And so is the router itself: it has gone without a word."""


class Standing(enum.Enum):
    TELLS = "tells"
    LOST = "lost"
    """Its call has broken since."""
    LEFT = "left"
    """Kept for a while, so that nothing late of a former call brings it back."""


@dataclass(frozen=True)
class RouterEntry:
    router_id: str
    call: int
    report: bytes
    heard_at: float
    standing: Standing = Standing.TELLS


@dataclass(frozen=True)
class SilentRouter:
    router_id: str
    silent_s: float


class RouterBook:
    """Own the routers' reports."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, RouterEntry] = {}
        self._num_calls = 0

    def opened(self) -> int:
        """A call has begun; its number."""
        self._num_calls += 1
        return self._num_calls

    def report(self, router_id: str, report: bytes, call: int) -> None:
        self._book(RouterEntry(router_id, call, report, self._clock()))

    def lost(self, router_id: str, call: int) -> None:
        """Its call has ended; whether it has gone is not known."""
        entry = self._entries.get(router_id)
        if entry is not None and (entry.call, entry.standing) == (call, Standing.TELLS):
            self._book(replace(entry, standing=Standing.LOST))

    def left(self, router_id: str, call: int) -> None:
        """It has shut down."""
        self._book(RouterEntry(router_id, call, b"", self._clock(), Standing.LEFT))

    def reports(self) -> tuple[bytes, ...]:
        """Of those that spoke of late, by their ids."""
        return tuple(entry.report for entry in self._known() if self._speaks(entry))

    def silent(self) -> tuple[SilentRouter, ...]:
        """The others that may still serve."""
        now = self._clock()
        return tuple(
            SilentRouter(entry.router_id, now - entry.heard_at)
            for entry in self._known()
            if not self._speaks(entry)
        )

    def _speaks(self, entry: RouterEntry) -> bool:
        is_fresh = entry.heard_at > self._clock() - SILENT_AFTER_S
        return is_fresh and entry.standing is Standing.TELLS

    def _book(self, entry: RouterEntry) -> None:
        former = self._entries.get(entry.router_id)
        if former is None or former.call <= entry.call:
            remembered = (each for each in self._entries.values() if self._is_remembered(each))
            self._entries = {each.router_id: each for each in remembered}
            self._entries[entry.router_id] = entry

    def _known(self) -> list[RouterEntry]:
        there = [
            entry
            for entry in self._entries.values()
            if entry.standing is not Standing.LEFT and self._is_remembered(entry)
        ]
        return sorted(there, key=lambda entry: entry.router_id)

    def _is_remembered(self, entry: RouterEntry) -> bool:
        return entry.heard_at > self._clock() - FORGOTTEN_AFTER_S
