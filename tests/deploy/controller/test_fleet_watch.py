"""What the operator hears of a supervisor, and what of it cannot wait for the next look."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from baton.v1 import control_pb2
from deploy.controller.fleet_watch import FleetWatch
from deploy.controller.objects import Key
from tests.router.deployment import Context, Registry

CLUSTER = Key("here", "main")


class Supervisor(Registry):
    """Tells what a router has told it."""

    report = control_pb2.ReportRouterRequest(router_id="router-1")

    async def WatchFleet(  # noqa: N802
        self, request: control_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchFleetResponse]:
        async for response in super().WatchFleet(request, context):
            response.routers.append(self.report)
            yield response


async def test_requests_that_are_held_for_stopped_pools_are_told_at_once() -> None:
    supervisor, told = Supervisor(), threading.Event()
    watch = FleetWatch(lambda _: told.set())
    await supervisor.start()
    try:
        watch.follow(CLUSTER, supervisor.address)
        assert await asyncio.to_thread(told.wait, 10), "the supervisor speaks"
        for num_held in (1, 0):
            told.clear()
            supervisor.report = control_pb2.ReportRouterRequest(num_held=num_held)
            await supervisor.publish()
            assert await asyncio.to_thread(told.wait, 10)
            fleet = watch.fleet(CLUSTER)
            assert fleet is not None
            assert fleet.holds_requests == (num_held > 0)
    finally:
        watch.stop()
        await supervisor.stop()
