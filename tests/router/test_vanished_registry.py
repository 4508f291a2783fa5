"""The registry's host vanishes without a word: what was connected to it has to notice by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.v1 import control_pb2
from router.fleet.registry import FleetWatch, keep_reporting
from tests.router.deployment import QUICK, Registry
from tests.router.proxy import Proxy

CONFIG = replace(QUICK, keepalive_s=0.2, registry_silence_s=0.3)


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


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  a report has no event
            await asyncio.sleep(0.01)


async def test_a_router_hears_of_the_fleet_again_over_a_new_connection() -> None:
    def lost() -> None:
        was_lost.set()

    was_lost = asyncio.Event()
    async with registry_behind_proxy() as (_, proxy):
        watch = FleetWatch(proxy.address, CONFIG, lambda *told: None, lost)
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
        reporting = keep_reporting(proxy.address, CONFIG, report)
        async with running(reporting):
            await until(lambda: bool(registry.last_report.router_id))
            heard = registry.last_report.router_id
            proxy.strand()
            await until(lambda: registry.last_report.router_id != heard)
