"""How tenants share what is scarce: turns in a line, and retries.

Turns follow start-time fair queueing. Every tenant has a clock that advances by the work it asks
for, and by what it turns out to get beyond that. A request is stamped with its tenant's clock, or
with the clock of what is being served if that is ahead. So an idle tenant saves up nothing, and one
that asks for a lot waits behind its own requests only.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.clock import NowS
from baton.config.router import RetriesConfig
from baton.errors import OverloadedError
from baton.pacing import TokenBucket

SWEEP_ABOVE = 1024  # clocks that are kept before those that fell behind are looked for


class FairShare:
    """Own the tenants' clocks, in units of work."""

    def __init__(self) -> None:
        self._served = 0.0  # the stamp of the latest request that was served
        self._next: dict[str, float] = {}  # tenant -> stamp of its next request
        self._sweep_at = SWEEP_ABOVE

    def stamp(self, tenant: str) -> float:
        """Return the position of the tenant's next request, lowest first."""
        return max(self._served, self._next.get(tenant, 0.0))

    def charge(self, tenant: str, work: float) -> None:
        """The tenant has asked for `work`, or was served so much more than it asked for."""
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
        """Drop clocks that fell behind: they have no effect."""
        self._next = {tenant: at for tenant, at in self._next.items() if at > self._served}
        self._sweep_at = max(SWEEP_ABOVE, 2 * len(self._next))

    def __len__(self) -> int:
        return len(self._next)


@dataclass(eq=False)
class Turn:
    """A request in a `FairLine`; it runs once `begins` is done."""

    tenant: str
    num_bytes: int
    begins: asyncio.Future[None]


@dataclass(eq=False)
class _Tenant:
    """One tenant's requests: those that wait, oldest first, and how much is waiting or running."""

    waiting: dict[Turn, None] = field(default_factory=dict)
    running: set[Turn] = field(default_factory=set)
    num_bytes: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)


class FairLine:
    """Own whose turn it is: `at_once` requests run, tenants take turns by bytes, and a tenant's
    oldest request is first. Bounded in requests and bytes, those that run included."""

    def __init__(
        self,
        purpose: str,
        at_once: int,
        max_requests: int,
        retry_after_s: float,
        max_bytes: float = math.inf,
    ) -> None:
        """`purpose`: what requests wait for, as the refusal says it."""
        self._purpose, self._retry_after_s = purpose, retry_after_s
        self._at_once, self._max_requests, self._max_bytes = at_once, max_requests, max_bytes
        self._fair = FairShare()
        self._tenants: dict[str, _Tenant] = {}
        self._num_running = 0
        self.num_requests = self.num_bytes = 0
        """Of those that wait or run."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn that lasts as long as the context. Raises what `enter` does."""
        turn = await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(turn)

    async def enter(self, tenant: str, num_bytes: int = 1) -> Turn:
        """Wait for a turn; the caller ends it with `leave`.

        When the line is full, the newest request of the tenant that has most of it is shed: raises
        OverloadedError, at once or while it waits. A request larger than `max_bytes` is taken when
        nobody else is there.
        """
        for shed in self._to_shed(tenant, num_bytes):
            self.leave(shed)
            if not shed.begins.done():  # else its caller is leaving
                shed.begins.set_exception(self._overloaded())
        turn = Turn(tenant, num_bytes, asyncio.get_running_loop().create_future())
        entry = self._tenants.setdefault(tenant, _Tenant())
        entry.waiting[turn] = None
        entry.num_bytes += num_bytes
        self.num_requests += 1
        self.num_bytes += num_bytes
        self._start_next()
        try:
            await turn.begins
        except BaseException:
            self.leave(turn)
            raise
        return turn

    def leave(self, turn: Turn) -> None:
        """The request is over, or gives up its position. Later calls do nothing."""
        entry = self._tenants.get(turn.tenant)
        if entry is None:
            return
        if turn in entry.running:
            entry.running.remove(turn)
            self._num_running -= 1
        elif turn in entry.waiting:
            del entry.waiting[turn]
        else:
            return
        entry.num_bytes -= turn.num_bytes
        self.num_requests -= 1
        self.num_bytes -= turn.num_bytes
        if not entry.num_requests:
            del self._tenants[turn.tenant]
        self._start_next()

    def _start_next(self) -> None:
        while self._num_running < self._at_once:
            waiting = [name for name, entry in self._tenants.items() if entry.waiting]
            if not waiting:
                self._fair.idle()
                return
            tenant = min(waiting, key=self._fair.stamp)
            entry = self._tenants[tenant]
            turn = next(iter(entry.waiting))
            del entry.waiting[turn]
            entry.running.add(turn)
            self._num_running += 1
            self._fair.served(self._fair.stamp(tenant))
            self._fair.charge(tenant, turn.num_bytes)
            if not turn.begins.done():  # else its caller is leaving
                turn.begins.set_result(None)

    def _to_shed(self, tenant: str, num_bytes: int) -> list[Turn]:
        """Return the requests that must go to make room for a new one. Raises OverloadedError if it
        is the new one itself."""
        has_room = self.num_requests < self._max_requests
        if not self.num_requests or (has_room and self.num_bytes + num_bytes <= self._max_bytes):
            return []
        left = {name: (t.num_requests, t.num_bytes) for name, t in self._tenants.items()}
        newest = {name: reversed(entry.waiting) for name, entry in self._tenants.items()}
        num_left, bytes_left = self.num_requests, self.num_bytes
        own_requests, own_bytes = left.get(tenant, (0, 0))
        own = self._share(own_requests + 1, own_bytes + num_bytes)
        shed: list[Turn] = []
        while num_left and (
            num_left >= self._max_requests or bytes_left + num_bytes > self._max_bytes
        ):
            most = max(newest, key=lambda name: self._share(*left[name]), default=None)
            if most is None or self._share(*left[most]) <= own:
                raise self._overloaded()
            turn = next(newest[most], None)
            if turn is None:
                del newest[most]  # the rest of it runs
                continue
            shed.append(turn)
            num_left, bytes_left = num_left - 1, bytes_left - turn.num_bytes
            left[most] = (left[most][0] - 1, left[most][1] - turn.num_bytes)
        return shed

    def _share(self, num_requests: int, num_bytes: int) -> float:
        """Return the share of the line that these take, by whichever bound is nearer."""
        return max(num_requests / self._max_requests, num_bytes / self._max_bytes)

    def _overloaded(self) -> OverloadedError:
        size = "" if math.isinf(self._max_bytes) else f" of {self.num_bytes} bytes"
        return OverloadedError(
            f"{self.num_requests} requests{size} wait to be {self._purpose}",
            retry_after_s=self._retry_after_s,
        )


MAX_TENANTS = 4096  # the longest unused is forgotten, and with it starts from a full bucket


class RetryBudget:
    """Own the fleet's bucket and one per tenant: a retry draws on both or on neither."""

    def __init__(self, config: RetriesConfig, clock: NowS) -> None:
        self._config, self._clock = config, clock
        self._fleet = TokenBucket(config.burst, config.refill_per_s, clock())
        self._tenants: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, tenant: str) -> bool:
        """Draw a retry. False: there is none left."""
        now = self._clock()
        bucket = self._tenants.get(tenant)
        if bucket is None:
            config = self._config
            bucket = TokenBucket(config.tenant_burst, config.tenant_refill_per_s, now)
            self._tenants[tenant] = bucket
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        if self._fleet.level(now) < 1 or bucket.level(now) < 1:
            return False
        return self._fleet.take(now) and bucket.take(now)
