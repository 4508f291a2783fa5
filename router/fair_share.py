"""Whose turn it is: tenants share the fleet's work in equal parts.

Start-time fair queueing: every tenant has a clock that advances by the work it asks for,
and by what it turns out to get beyond that. A request is stamped with its tenant's clock, or with
the clock of what is being served if that is ahead: an idle tenant saves up nothing, and one that
asks for a lot waits behind its own requests only.
"""

from __future__ import annotations

SWEEP_ABOVE = 1024  # clocks that are kept before those that fell behind are looked for


class FairShare:
    """Own the tenants' clocks, in units of work."""

    def __init__(self) -> None:
        self._served = 0.0  # the stamp of the latest request that was served
        self._next: dict[str, float] = {}  # tenant -> stamp of its next request
        self._sweep_at = SWEEP_ABOVE

    def stamp(self, tenant: str) -> float:
        """The place in line of the tenant's next request, lowest first."""
        return max(self._served, self._next.get(tenant, 0.0))

    def charge(self, tenant: str, work: float) -> None:
        """The tenant has asked for `work`, or has got this much beyond what it asked for."""
        self._next[tenant] = self.stamp(tenant) + work
        if len(self._next) > self._sweep_at:
            self._sweep()

    def refund(self, tenant: str, work: float) -> None:
        """A request that was charged will never be served."""
        at = self._next.get(tenant)
        if at is not None:
            self._next[tenant] = max(at - work, self._served)

    def served(self, stamp: float) -> None:
        """A request with this stamp has left the line."""
        self._served = max(self._served, stamp)

    def idle(self) -> None:
        """Nobody waits: all start alike, behind requests that come back to try again."""
        self._served = max(self._next.values(), default=self._served)
        self._next.clear()

    def _sweep(self) -> None:
        """Drop clocks that fell behind: they say nothing."""
        self._next = {tenant: at for tenant, at in self._next.items() if at > self._served}
        self._sweep_at = max(SWEEP_ABOVE, 2 * len(self._next))

    def __len__(self) -> int:
        return len(self._next)
