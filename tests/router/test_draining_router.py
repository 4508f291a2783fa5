"""A router that shuts down in good order, as Baton's own client sees it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio
import pytest

from baton.client import AsyncClient
from baton.client.events import Event, Tokens
from baton.errors import ShuttingDownError
from baton.status import RpcFailure, from_rpc_error
from tests.router.answers import PROMPT, ask_for, error_reason, expected
from tests.router.deployment import Deployment, deployment
from tests.router.scripted_worker import MODEL


async def ask(client: AsyncClient, **options: Any) -> list[Event]:
    events = client.generate(PROMPT, model=MODEL, seed=7, max_tokens=12, timeout_s=15, **options)
    return [event async for event in events]


def assert_whole(events: list[Event]) -> None:
    ids = [one for event in events if isinstance(event, Tokens) for one in event.ids]
    assert ids == expected(PROMPT, 12)


async def before_both(d: Deployment) -> AsyncClient:
    await d.add_router()
    await d.connected(2, d.routers[1])
    return AsyncClient([server.address for server in d.servers])


async def test_a_request_that_came_while_it_drains_runs_at_the_next_router() -> None:
    async with deployment() as d, await before_both(d) as client:
        d.worker("d0").may_decode.clear()
        first = asyncio.create_task(ask(client))
        await d.until(lambda: bool(d.worker("d0").runs))
        stopping = asyncio.create_task(d.servers[0].stop(10.0))
        await d.until(lambda: d.router.is_closing)
        second = asyncio.create_task(ask(client))
        await d.until(lambda: d.routers[1].num_active == 1)
        d.worker("d0").may_decode.set()
        for events in await asyncio.gather(first, second):
            assert_whole(events)
        await stopping
        assert d.worker("d0").num_attaches == 0


async def test_a_request_in_line_at_the_end_of_the_drain_goes_on_at_the_next_router() -> None:
    async with deployment() as d, await before_both(d) as client:
        d.router.fleet.arrays.max_running[:] = 0
        asking = asyncio.create_task(ask(client))
        await d.until(lambda: len(d.router.admission) == 1)
        await d.servers[0].stop(0.1)
        assert_whole(await asking)
        assert d.worker("d0").num_attaches == 0  # nobody can have begun it


async def test_a_request_that_runs_at_the_end_of_the_drain_is_reported_as_begun() -> None:
    async with deployment(is_emptied=False) as d:
        d.worker("d0").may_decode.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: bool(d.worker("d0").runs))
        await d.servers[0].stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        problem = from_rpc_error(cast(RpcFailure, caught.value))
        assert isinstance(problem, ShuttingDownError)
        assert problem.has_begun
        assert error_reason(caught.value) == "UNAVAILABLE"  # which clients of before go on with
