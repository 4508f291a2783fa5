"""What routers tell of their queues and arrivals: the newest of each that still speaks.

Pure: it reads a clock and nothing else. `report` is opaque here: a serialised message. That a call
breaks, or says nothing more, does not say that its router has gone: cut off from here it may serve
its clients as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.awake_clock import Clock

SILENT_AFTER_S = 5.0
"""The figures of a router that has told nothing for this long are left out."""
FORGOTTEN_AFTER_S = 300.0
"""And so is the router itself: it has gone without a word."""


@dataclass(frozen=True)
class RouterEntry:
    router_id: str
    report: bytes
    heard_at: float
    is_lost: bool = False
    """Its call has broken since."""


@dataclass(frozen=True)
class SilentRouter:
    router_id: str
    silent_s: float


class RouterBook:
    """Own the routers' reports."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, RouterEntry] = {}

    def report(self, router_id: str, report: bytes) -> None:
        self._entries[router_id] = RouterEntry(router_id, report, self._clock())

    def lost(self, router_id: str) -> None:
        """Its call has ended; whether it has gone is not known."""
        entry = self._entries.get(router_id)
        if entry is not None:
            self._entries[router_id] = replace(entry, is_lost=True)

    def left(self, router_id: str) -> None:
        """It has shut down."""
        self._entries.pop(router_id, None)

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
        return not entry.is_lost and entry.heard_at > self._clock() - SILENT_AFTER_S

    def _known(self) -> list[RouterEntry]:
        since = self._clock() - FORGOTTEN_AFTER_S
        self._entries = {
            name: entry for name, entry in self._entries.items() if entry.heard_at > since
        }
        return [entry for _, entry in sorted(self._entries.items())]
