"""What routers tell of their queues and arrivals: the newest of each that still speaks.

Pure: it reads a clock and nothing else. `report` is opaque here: a serialised message.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.awake_clock import Clock

SILENT_AFTER_S = 5.0
"""A router that has told nothing for this long is left out."""


@dataclass(frozen=True)
class RouterEntry:
    router_id: str
    report: bytes
    heard_at: float


class RouterBook:
    """Own the routers' reports."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, RouterEntry] = {}

    def report(self, router_id: str, report: bytes) -> None:
        self._entries[router_id] = RouterEntry(router_id, report, self._clock())

    def left(self, router_id: str) -> None:
        """Its call has ended."""
        self._entries.pop(router_id, None)

    def reports(self) -> tuple[bytes, ...]:
        """Of those that spoke of late, by their ids."""
        since = self._clock() - SILENT_AFTER_S
        self._entries = {
            name: entry for name, entry in self._entries.items() if entry.heard_at > since
        }
        return tuple(entry.report for _, entry in sorted(self._entries.items()))
