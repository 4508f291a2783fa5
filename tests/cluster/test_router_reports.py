"""Routers tell the registry of their queues, and whoever watches the fleet hears it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from baton.config.router import RouterConfig
from baton.config.workers import RegistryConfig
from baton.control.calls import control_stub
from baton.v1 import control_pb2
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from cluster.registry.routers import FORGOTTEN_AFTER_S, SILENT_AFTER_S, RouterReports
from router.fleet.registry import RegistryAccess, keep_reporting
from tests.identities import OPERATOR, ROUTER

Watch = control_pb2.WatchFleetResponse


def silent_in(reports: RouterReports) -> list[tuple[str, float]]:
    return list(reports.silent_s().items())


def reports_of(reports: RouterReports) -> list[bytes]:
    return list(reports.reports())


def test_a_router_that_falls_silent_or_leaves_is_left_out() -> None:
    now = 0.0
    reports = RouterReports(lambda: now)
    reports.report("a", b"1", 0)
    reports.report("b", b"2", 0)
    reports.left("b", reports.opened())
    assert reports_of(reports) == [b"1"]
    now = SILENT_AFTER_S - 0.1
    reports.report("c", b"3", 0)
    assert reports_of(reports) == [b"1", b"3"]
    now = SILENT_AFTER_S
    assert reports_of(reports) == [b"3"]


def test_a_silent_router_is_listed_for_some_minutes_because_it_may_serve() -> None:
    now = 0.0
    reports = RouterReports(lambda: now)
    call = reports.opened()
    for name in "abc":
        reports.report(name, b"", call)
    reports.lost("b", call)
    reports.left("c", call)
    assert (len(reports_of(reports)), silent_in(reports)) == (1, [("b", 0.0)])
    now = SILENT_AFTER_S
    assert silent_in(reports) == [("a", now), ("b", now)]
    reports.report("b", b"2", reports.opened())
    assert (reports_of(reports), silent_in(reports)) == ([b"2"], [("a", now)])
    now = FORGOTTEN_AFTER_S
    assert [name for name, _ in silent_in(reports)] == ["b"]


def test_a_call_is_ignored_once_its_router_has_reported_on_a_later_one() -> None:
    reports = RouterReports(lambda: 0.0)
    former, newest = reports.opened(), reports.opened()
    reports.report("a", b"1", former)
    reports.report("a", b"2", newest)
    reports.report("a", b"late", former)
    reports.left("a", former)
    reports.lost("a", former)
    assert (reports_of(reports), silent_in(reports)) == ([b"2"], [])
    reports.lost("a", newest)
    assert (reports_of(reports), silent_in(reports)) == ([], [("a", 0.0)])


@asynccontextmanager
async def registry_at() -> AsyncIterator[tuple[str, AsyncIterator[Watch]]]:
    """Its address, and what a watcher hears."""
    registry = Registry(RegistryConfig(), time.monotonic)
    async with (
        serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = control_stub(channel, ROUTER)
        yield address, aiter(stub.WatchFleet(control_pb2.WatchFleetRequest()))


async def hears(watch: AsyncIterator[Watch], routers: list[str]) -> Watch:
    async with asyncio.timeout(10):
        async for fleet in watch:
            if [router.router_id for router in fleet.routers] == routers:
                return fleet
    raise AssertionError("the watch has ended")


async def test_what_a_router_reports_is_heard_until_it_leaves() -> None:
    reported = control_pb2.ReportRouterRequest(router_id="router-1", requests_per_s=2.5, num_held=3)
    async with registry_at() as (address, watch):
        reporting = asyncio.create_task(
            keep_reporting(RegistryAccess(address, RouterConfig(), ROUTER), lambda: reported)
        )
        fleet = await hears(watch, ["router-1"])
        assert list(fleet.routers) == [reported]
        reporting.cancel()
        await asyncio.wait({reporting})
        assert not (await hears(watch, [])).silent_routers


async def test_a_router_whose_call_breaks_is_listed_as_silent() -> None:
    """A killed one, or one whose host is cut off: who only hears of the call cannot know."""
    reported = control_pb2.ReportRouterRequest(router_id="router-1", requests_per_s=2.5)
    async with registry_at() as (address, watch), grpc.aio.insecure_channel(address) as channel:
        call = control_stub(channel, ROUTER).ReportRouter()
        await call.write(reported)
        await hears(watch, ["router-1"])
        call.cancel()
        (silent,) = (await hears(watch, [])).silent_routers
        assert silent.router_id == "router-1"
        assert 0 <= silent.silent_s < 10


async def test_a_router_that_has_called_again_is_heard_also_when_its_former_call_ends() -> None:
    """Its connection was cut off, and the registry hears of that after the router does."""
    reported = control_pb2.ReportRouterRequest(router_id="router-1", requests_per_s=2.5)
    async with registry_at() as (address, watch), grpc.aio.insecure_channel(address) as channel:
        stub = control_stub(channel, ROUTER)
        former = stub.ReportRouter()
        await former.write(reported)
        await hears(watch, ["router-1"])
        newest = stub.ReportRouter()
        reported.requests_per_s = 3.5
        await newest.write(reported)
        while list((await hears(watch, ["router-1"])).routers) != [reported]:
            pass
        former.cancel()
        for _ in range(2):
            assert list((await anext(watch)).routers) == [reported]


async def test_a_report_without_a_name_is_refused() -> None:
    async with registry_at() as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = control_stub(channel, ROUTER)

        async def nameless() -> AsyncIterator[control_pb2.ReportRouterRequest]:
            yield control_pb2.ReportRouterRequest()

        with pytest.raises(grpc.aio.AioRpcError, match="router_id"):
            await stub.ReportRouter(nameless())


def test_a_router_that_left_on_its_last_call_is_not_brought_back_by_the_one_before() -> None:
    reports = RouterReports(lambda: 0.0)
    former, last = reports.opened(), reports.opened()
    reports.report("a", b"1", former)
    reports.left("a", last)
    reports.report("a", b"late", former)
    for call in (former, last):
        reports.lost("a", call)
    assert (reports_of(reports), silent_in(reports)) == ([], [])
    reports.report("a", b"2", reports.opened())  # started again by the same name
    assert reports_of(reports) == [b"2"]
