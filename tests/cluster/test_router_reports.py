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
from baton.v1 import control_pb2, control_pb2_grpc
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from cluster.registry.routers import FORGOTTEN_AFTER_S, SILENT_AFTER_S, RouterReports
from router.reporting import Reporting

Watch = control_pb2.WatchFleetResponse


def silent_in(book: RouterReports) -> list[tuple[str, float]]:
    return [(router.router_id, router.silent_s) for router in book.silent()]


def reports_of(book: RouterReports) -> list[bytes]:
    return list(book.reports())


def test_a_router_that_falls_silent_or_leaves_is_left_out() -> None:
    now = 0.0
    book = RouterReports(lambda: now)
    book.report("a", b"1", 0)
    book.report("b", b"2", 0)
    book.left("b", book.opened())
    assert reports_of(book) == [b"1"]
    now = SILENT_AFTER_S - 0.1
    book.report("c", b"3", 0)
    assert reports_of(book) == [b"1", b"3"]
    now = SILENT_AFTER_S
    assert reports_of(book) == [b"3"]


def test_a_router_that_does_not_speak_is_told_of_for_some_minutes_for_it_may_serve() -> None:
    now = 0.0
    book = RouterReports(lambda: now)
    call = book.opened()
    for name in "abc":
        book.report(name, b"", call)
    book.lost("b", call)
    book.left("c", call)
    assert (len(reports_of(book)), silent_in(book)) == (1, [("b", 0.0)])
    now = SILENT_AFTER_S
    assert silent_in(book) == [("a", now), ("b", now)]
    book.report("b", b"2", book.opened())
    assert (reports_of(book), silent_in(book)) == ([b"2"], [("a", now)])
    now = FORGOTTEN_AFTER_S
    assert [name for name, _ in silent_in(book)] == ["b"]


def test_what_comes_of_a_call_counts_no_more_once_its_router_has_told_on_a_later_one() -> None:
    book = RouterReports(lambda: 0.0)
    former, newest = book.opened(), book.opened()
    book.report("a", b"1", former)
    book.report("a", b"2", newest)
    book.report("a", b"late", former)
    book.left("a", former)
    book.lost("a", former)
    assert (reports_of(book), silent_in(book)) == ([b"2"], [])
    book.lost("a", newest)
    assert (reports_of(book), silent_in(book)) == ([], [("a", 0.0)])


def test_a_router_that_left_on_its_last_call_is_not_brought_back_by_the_one_before() -> None:
    book = RouterReports(lambda: 0.0)
    former, last = book.opened(), book.opened()
    book.report("a", b"1", former)
    book.left("a", last)
    book.report("a", b"late", former)
    for call in (former, last):
        book.lost("a", call)
    assert (reports_of(book), silent_in(book)) == ([], [])
    book.report("a", b"2", book.opened())  # started again by the same name
    assert reports_of(book) == [b"2"]


@asynccontextmanager
async def registry_at() -> AsyncIterator[tuple[str, AsyncIterator[Watch]]]:
    """Its address, and what a watcher hears."""
    registry = Registry(RegistryConfig(), time.monotonic)
    async with (
        serve(registry, Changes(), "127.0.0.1:0") as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlServiceStub(channel)
        yield address, aiter(stub.WatchFleet(control_pb2.WatchFleetRequest()))


async def hears(watch: AsyncIterator[Watch], routers: list[str]) -> Watch:
    async with asyncio.timeout(10):
        async for fleet in watch:
            if [router.router_id for router in fleet.routers] == routers:
                return fleet
    raise AssertionError("the watch has ended")


async def test_what_a_router_reports_is_heard_until_it_leaves() -> None:
    told = control_pb2.ReportRouterRequest(router_id="router-1", requests_per_s=2.5, num_held=3)
    async with registry_at() as (address, watch):
        reporting = asyncio.create_task(Reporting(address, RouterConfig(), lambda: told).run())
        fleet = await hears(watch, ["router-1"])
        assert list(fleet.routers) == [told]
        reporting.cancel()
        await asyncio.wait({reporting})
        assert not (await hears(watch, [])).silent_routers


async def test_a_router_whose_call_breaks_is_told_of_as_silent() -> None:
    """A killed one, or one whose host is cut off: who only hears of the call cannot know."""
    told = control_pb2.ReportRouterRequest(router_id="router-1", requests_per_s=2.5)
    async with registry_at() as (address, watch), grpc.aio.insecure_channel(address) as channel:
        call = control_pb2_grpc.ControlServiceStub(channel).ReportRouter()
        await call.write(told)
        await hears(watch, ["router-1"])
        call.cancel()
        (silent,) = (await hears(watch, [])).silent_routers
        assert silent.router_id == "router-1"
        assert 0 <= silent.silent_s < 10


async def test_a_router_that_has_called_again_is_heard_also_when_its_former_call_ends() -> None:
    """Its connection was cut off, and the registry hears of that after the router does."""
    told = control_pb2.ReportRouterRequest(router_id="router-1", requests_per_s=2.5)
    async with registry_at() as (address, watch), grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        former = stub.ReportRouter()
        await former.write(told)
        await hears(watch, ["router-1"])
        newest = stub.ReportRouter()
        told.requests_per_s = 3.5
        await newest.write(told)
        while list((await hears(watch, ["router-1"])).routers) != [told]:
            pass
        former.cancel()
        for _ in range(2):
            assert list((await anext(watch)).routers) == [told]


async def test_a_report_without_a_name_is_refused() -> None:
    async with registry_at() as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)

        async def nameless() -> AsyncIterator[control_pb2.ReportRouterRequest]:
            yield control_pb2.ReportRouterRequest()

        with pytest.raises(grpc.aio.AioRpcError, match="router_id"):
            await stub.ReportRouter(nameless())
