"""Reports a router's figures to the registry once a second, for planning. Continues after the
registry was gone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence

import grpc.aio

from baton.config.router import RouterConfig
from baton.v1 import control_pb2, control_pb2_grpc
from router.backoff import Backoff
from router.figures import Waiting
from router.fleet import Fleet
from router.ticket import Ticket
from router.worker_link import channel_options

EVERY_S = 1.0
_LEAVE_WITHIN_S = 1.0


class Reporting:
    """Own the call on which this router reports its figures."""

    def __init__(
        self,
        address: str,
        config: RouterConfig,
        report: Callable[[], control_pb2.ReportRouterRequest],
    ) -> None:
        self._address, self._config, self._report = address, config, report

    async def run(self) -> None:
        """Report until cancelled. FleetWatch logs a registry that is lost."""
        config = self._config
        backoff = Backoff(config.reconnect_min_s, config.reconnect_max_s, random.Random())
        options = channel_options(config)
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            try:
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await stub.ReportRouter(self._reports(backoff))
                    await asyncio.sleep(backoff.next_s())
            finally:
                # A call that only breaks would have it counted as cut off, for minutes.
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.ReportRouter(self._farewell(), timeout=_LEAVE_WITHIN_S)

    async def _reports(self, backoff: Backoff) -> AsyncIterator[control_pb2.ReportRouterRequest]:
        while True:
            yield self._report()
            await asyncio.sleep(EVERY_S)
            backoff.reset()

    async def _farewell(self) -> AsyncIterator[control_pb2.ReportRouterRequest]:
        last = self._report()
        last.leaves = True
        yield last


def waiting_requests(
    tickets: Sequence[Ticket], fleet: Fleet, config: RouterConfig, now_s: float
) -> list[Waiting]:
    """Who waits, and for what: without room at a decode worker a prefill would be in vain."""
    arrays = fleet.arrays
    decodes = arrays.usable & arrays.can_decode
    prefills = arrays.usable & arrays.can_prefill
    has_roles = decodes.any() and (config.local_prefill != "never" or prefills.any())
    open_ = decodes & (arrays.running < arrays.max_running)
    room = float(arrays.free_tokens[open_].max(initial=0.0))
    return [
        Waiting(
            num_uncached_tokens=ticket.uncached_tokens,
            wait_s=max(0.0, now_s - ticket.since_s),
            for_decode=room < ticket.num_tokens,
            is_held=not has_roles,
        )
        for ticket in tickets
        if ticket.placed is not None and not ticket.placed.done()
    ]
