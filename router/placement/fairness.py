"""How tenants share what is scarce: turns in a line, and retries."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.clock import NowS
from baton.config.router import RouterConfig
from baton.errors import OverloadedError

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


AT_ONCE = 256


class Searching:
    """Own whose turn it is to search: tenants in equal parts, each one's first come first."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._fair = FairShare()  # by searches
        self._lines: dict[str, dict[asyncio.Future[None], None]] = {}  # of tenants; none is empty
        self.num_waiting = self.num_searching = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for it; it lasts as long as the context.

        Where `max_queue` requests wait the newest of the tenant that has most of them is refused:
        raises OverloadedError, at once or while it waits.
        """
        await self._wait(tenant)
        try:
            yield
        finally:
            self._ended()

    async def _wait(self, tenant: str) -> None:
        if self.num_waiting >= self._config.max_queue:
            self._shed_for(tenant)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, {})[turn] = None
        self.num_waiting += 1
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._ended()  # it came and was left at once
            raise
        finally:
            self._leave(tenant, turn)

    def _shed_for(self, tenant: str) -> None:
        """Make room for a request of the tenant. Raises OverloadedError where it is itself what
        there is most of."""
        longest = max(self._lines, key=lambda name: len(self._lines[name]))
        if len(self._lines[longest]) <= len(self._lines.get(tenant, ())) + 1:
            raise self._overloaded()
        newest = next(reversed(self._lines[longest]))
        self._leave(longest, newest)
        if not newest.done():  # else its caller is leaving
            newest.set_exception(self._overloaded())

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant, {})
        if turn in line:
            del line[turn]
            self.num_waiting -= 1
            if not line:
                del self._lines[tenant]

    def _start_next(self) -> None:
        while self._lines and self.num_searching < AT_ONCE:
            tenant = min(self._lines, key=self._fair.stamp)
            turn = next(iter(self._lines[tenant]))
            self._leave(tenant, turn)
            if turn.done():
                continue  # its caller is leaving
            self._fair.served(self._fair.stamp(tenant))
            self._fair.charge(tenant, 1)
            self.num_searching += 1
            turn.set_result(None)
        if not self._lines:
            self._fair.idle()

    def _ended(self) -> None:
        self.num_searching -= 1
        self._start_next()

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"{self.num_waiting} requests wait to be looked for at the decode workers",
            retry_after_s=self._config.overload_retry_s,
        )


MAX_TENANTS = 4096  # the longest unused is forgotten, and with it starts from a full bucket


class TokenBucket:
    """`burst` tokens at first, refilled at `per_s` up to `burst`."""

    def __init__(self, burst: float, per_s: float, now_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._level, self._at_s = float(burst), now_s

    def level(self, now_s: float) -> float:
        self._level = min(self._burst, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self._level

    def take(self) -> None:
        self._level -= 1


class RetryBudget:
    """Own the fleet's bucket and one per tenant: a retry draws on both or on neither."""

    def __init__(self, config: RouterConfig, clock: NowS) -> None:
        self._config, self._clock = config, clock
        self._fleet = TokenBucket(config.retry_burst, config.retry_per_s, clock())
        self._tenants: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, tenant: str) -> bool:
        """True when the retry may go ahead."""
        now = self._clock()
        bucket = self._tenants.get(tenant)
        if bucket is None:
            config = self._config
            bucket = TokenBucket(config.tenant_retry_burst, config.tenant_retry_per_s, now)
            self._tenants[tenant] = bucket
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        if self._fleet.level(now) < 1 or bucket.level(now) < 1:
            return False
        self._fleet.take()
        bucket.take()
        return True
