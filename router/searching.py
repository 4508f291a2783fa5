"""The line before the decode workers are asked for a request that another router began.

A search asks every one of them, for a request that has no place in the queue yet and may not run
anywhere. So there are so many at once only, tenants take turns, and the line is bounded. A request
that is found needs no place in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.config.router import RouterConfig
from baton.errors import OverloadedError
from router.fair_share import FairShare

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
