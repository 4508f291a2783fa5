"""Following the registry: what is said of it when it does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.v1 import control_pb2
from router.fleet.registry import FleetWatch
from tests.router.deployment import QUICK, Context, Registry


class MoodyRegistry(Registry):
    """Refuses to tell of the fleet while it is told to."""

    refuses = True
    num_refused = 0

    async def WatchFleet(  # noqa: N802
        self, request: control_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchFleetResponse]:
        async for response in super().WatchFleet(request, context):
            if self.refuses:
                self.num_refused += 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
            yield response


async def test_a_registry_that_does_not_answer_is_told_of_once_and_again_when_it_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.fleet.registry")
    registry = MoodyRegistry()
    await registry.start()
    num_lost = 0

    def lost() -> None:
        nonlocal num_lost
        num_lost += 1

    watch = FleetWatch(registry.address, QUICK, lambda *told: None, lost)
    running = asyncio.create_task(watch.run())
    try:
        for losses in (0, 1):
            async with asyncio.timeout(10):
                refused = registry.num_refused
                while registry.num_refused < refused + 5:  # noqa: ASYNC110  no event tells it
                    await asyncio.sleep(0.01)
                registry.refuses = False
                await watch.next_after(watch.last)
            assert num_lost == losses
            registry.refuses = True
            await registry.publish()
        said = [(record.levelname, record.message) for record in caplog.records]
        of = f"registry {registry.address}"
        refusal, back = ("WARNING", f"{of}: UNAVAILABLE: not yet"), ("INFO", f"{of}: connected")
        assert said[:4] == [refusal, back] * 2
    finally:
        running.cancel()
        await asyncio.wait({running})
        await registry.stop()
