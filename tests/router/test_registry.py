"""Following the registry: what is logged when it does not answer, and how it is found again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.config.settings import changed
from baton.v1 import control_pb2
from router.fleet.registry import RegistryAccess, keep_reporting, watch_fleet
from tests.identities import ROUTER
from tests.router.deployment import QUICK, Context, Registry
from tests.router.proxy import Proxy


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


class MoodyRegistry(Registry):
    """Refuses to report the fleet while `refuses` is set."""

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


async def test_a_registry_that_does_not_answer_is_logged_once_and_again_when_it_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.fleet.registry")
    registry = MoodyRegistry()
    await registry.start()
    num_lost = 0

    def lost() -> None:
        nonlocal num_lost
        num_lost += 1

    watch = watch_fleet(RegistryAccess(registry.address, QUICK, ROUTER), lambda *report: None, lost)
    async with running(watch.run()):
        for losses in (0, 1):
            async with asyncio.timeout(10):
                refused = registry.num_refused
                while registry.num_refused < refused + 5:  # noqa: ASYNC110  it has no event
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
    await registry.stop()


CONFIG = changed(QUICK, links={"keepalive_s": 0.2, "registry_silence_s": 0.3})


@asynccontextmanager
async def registry_behind_proxy() -> AsyncIterator[tuple[Registry, Proxy]]:
    registry = Registry()
    await registry.start()
    proxy = await Proxy.to(registry.address)
    try:
        yield registry, proxy
    finally:
        await proxy.close()
        await registry.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  a report has no event
            await asyncio.sleep(0.01)


async def test_a_router_follows_the_fleet_again_over_a_new_connection() -> None:
    def lost() -> None:
        was_lost.set()

    was_lost = asyncio.Event()
    async with registry_behind_proxy() as (_, proxy):
        watch = watch_fleet(
            RegistryAccess(proxy.address, CONFIG, ROUTER), lambda *report: None, lost
        )
        async with running(watch.run()), asyncio.timeout(10):
            await watch.next_after(None)
            proxy.strand()
            await was_lost.wait()
            await watch.next_after(watch.last)


async def test_a_router_s_figures_reach_the_registry_again_over_a_new_connection() -> None:
    num_told = 0

    def report() -> control_pb2.ReportRouterRequest:
        nonlocal num_told
        num_told += 1
        return control_pb2.ReportRouterRequest(router_id=str(num_told))

    async with registry_behind_proxy() as (registry, proxy):
        reporting = keep_reporting(RegistryAccess(proxy.address, CONFIG, ROUTER), report)
        async with running(reporting):
            await until(lambda: bool(registry.last_report.router_id))
            reported = registry.last_report.router_id
            proxy.strand()
            await until(lambda: registry.last_report.router_id != reported)
