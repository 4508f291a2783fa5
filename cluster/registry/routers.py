"""What the registry keeps for routers: each one's newest report, and the units that they serve.

Pure: it reads only a clock. A report is an opaque serialised message about queues and arrivals. A
broken or silent call does not mean that its router has gone: it may be cut off from here and still
serve its clients.

A router has one call at a time, but a broken call may end here long after the next has begun. So
calls are numbered as they begin, and an older call is ignored once a newer one has reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.clock import NowS
from baton.errors import InvalidRequestError

SILENT_AFTER_S = 5.0
"""After this silence a router's report is left out."""
FORGOTTEN_AFTER_S = 300.0
"""After this silence the router is forgotten."""


@dataclass(frozen=True)
class RouterEntry:
    router_id: str
    call: int
    report: bytes
    heard_at: float
    is_lost: bool = False
    """Whether its call has broken."""
    has_left: bool = False
    """Whether it has shut down. Remembered, so that a late report of an older call is ignored."""


class RouterReports:
    """Own the routers' reports."""

    def __init__(self, clock: NowS) -> None:
        self._clock = clock
        self._entries: dict[str, RouterEntry] = {}
        self._num_calls = 0

    def opened(self) -> int:
        """Number a call that begins."""
        self._num_calls += 1
        return self._num_calls

    def report(self, router_id: str, report: bytes, call: int) -> None:
        """Keep a router's newest report."""
        entry = self._entries.get(router_id)
        if entry is None or entry.call <= call:
            self._entries[router_id] = RouterEntry(router_id, call, report, self._clock())

    def lost(self, router_id: str, call: int) -> None:
        """The router's call ended; the router may still serve."""
        entry = self._entries.get(router_id)
        if entry is not None and entry.call == call:
            self._entries[router_id] = replace(entry, is_lost=True)

    def left(self, router_id: str, call: int) -> None:
        """The router has shut down."""
        entry = self._entries.get(router_id)
        if entry is None or entry.call <= call:
            gone = RouterEntry(router_id, call, b"", self._clock(), has_left=True)
            self._entries[router_id] = gone

    def reports(self) -> tuple[bytes, ...]:
        """Reports of the routers that are not silent, ordered by router id."""
        return tuple(entry.report for entry in self._known() if self._is_reporting(entry))

    def silent_s(self) -> dict[str, float]:
        """The other routers, which may still serve, and since how many seconds each is silent."""
        now = self._clock()
        return {
            entry.router_id: now - entry.heard_at
            for entry in self._known()
            if not self._is_reporting(entry)
        }

    def _is_reporting(self, entry: RouterEntry) -> bool:
        is_fresh = entry.heard_at > self._clock() - SILENT_AFTER_S
        return is_fresh and not entry.is_lost

    def _known(self) -> list[RouterEntry]:
        """The routers that are not forgotten, ordered by router id."""
        since = self._clock() - FORGOTTEN_AFTER_S
        self._entries = {k: entry for k, entry in self._entries.items() if entry.heard_at > since}
        there = (entry for entry in self._entries.values() if not entry.has_left)
        return sorted(there, key=lambda entry: entry.router_id)


# --- units --------------------------------------------------------------------------------------

MAX_UNITS = 2
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Unit:
    """One complete version of a model."""

    code: str = ""
    control_address: str = ""
    """host:port; empty: of the registry that was asked."""
    share: float = 1.0
    """Its share of the requests, 0 to 1."""


_LONE = Unit()


class UnitList:
    """Own the list of units, the oldest first."""

    def __init__(self, own: Unit = _LONE, given: Sequence[Unit] = ()) -> None:
        """`own`: the unit that this registry is part of. It is the only one until `set`."""
        self._own = (own,)
        self.given = tuple(given)
        """The list as it was set; empty: it never was."""

    @property
    def all(self) -> tuple[Unit, ...]:
        return self.given or self._own

    def set(self, units: Sequence[Unit]) -> None:
        """Replace the list. Raises InvalidRequestError."""
        _check(units)
        self.given = tuple(units)


def _check(units: Sequence[Unit]) -> None:
    if not 1 <= len(units) <= MAX_UNITS:
        raise InvalidRequestError(
            f"units: 1 to {MAX_UNITS} are expected, not {len(units)}", field="units"
        )
    for index, unit in enumerate(units):
        if unit.code in [other.code for other in units[:index]]:
            raise InvalidRequestError(
                f"units: two have the code {unit.code!r}", field=f"units[{index}].code"
            )
        if not 0 <= unit.share <= 1:  # nor is NaN
            raise InvalidRequestError(
                f"units: a share is from 0 to 1, not {unit.share}", field=f"units[{index}].share"
            )
    total = math.fsum(unit.share for unit in units)
    if abs(total - 1) > _ROUNDING:
        raise InvalidRequestError(f"units: the shares sum to {total}, not 1", field="units")
