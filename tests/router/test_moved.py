"""A request that another router has attached: what its former router may still do, and must not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.v1 import router_pb2, worker_pb2
from baton.wire import ANY_ATTEMPT
from tests.router.answers import PROMPT, Answer, ask_for, assert_whole, error_of
from tests.router.deployment import Deployment, attempts, deployment, held


@asynccontextmanager
async def moved_in_prefill(
    **changes: Any,
) -> AsyncIterator[tuple[Deployment, asyncio.Task[Answer], asyncio.Task[Answer]]]:
    """Two routers' streams of one request, whose prompt hangs until `unhang` at its writer."""
    async with deployment(retries={"eject_s": 30.0}, **changes) as d:
        prefill, decode = d.worker("p0"), d.worker("d0")
        prefill.faults.hang_prefills = 1
        request = ask_for(PROMPT, request_id="mine")
        second = await d.add_router()
        await d.connected(2, d.routers[1])
        former = asyncio.create_task(d.client.ask(request))
        await d.until(lambda: prefill.num_prefilling == 1 and prefill.faults.hang_prefills == 0)
        again = ask_for(PROMPT, request_id="mine", resume_from_index=0)
        latter = asyncio.create_task(second.ask(again))
        await d.until(lambda: decode.num_attaches == 1 and prefill.num_prefills == 2)
        await d.until(lambda: any(state.has_moved for state in attempts(d.router)))
        yield d, former, latter


async def test_a_former_router_without_a_client_sees_the_prefill_through() -> None:
    async with moved_in_prefill(clients={"resume_window_s": 0.1}) as (d, former, latter):
        loop = asyncio.get_running_loop()
        former.cancel()
        until_s = loop.time() + 0.5
        await d.until(lambda: loop.time() > until_s)
        assert d.worker("p0").num_prefilling == 1
        d.worker("p0").unhang.set()
        answer = await latter
        assert_whole(answer, PROMPT)
        assert [routed.attempt for routed in answer.routed] == [1]


async def test_a_former_router_that_loses_its_session_takes_nothing_back() -> None:
    async with moved_in_prefill() as (d, former, latter):
        decode = d.worker("d0")
        (lost,) = [s for s in decode.sessions if s != decode.runs["mine"].router_id]
        decode.session_calls[lost].cancel()
        await d.until(lambda: len(decode.sessions) == 2 and lost not in decode.sessions)
        await d.connected(2)
        d.worker("p0").unhang.set()
        assert "another router" in str((await error_of(former)).details())
        assert_whole(await latter, PROMPT)
        assert decode.num_attaches == 1


async def test_an_abort_at_the_former_router_ends_the_request() -> None:
    async with moved_in_prefill() as (d, former, latter):
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id="mine"))
        await d.until(lambda: ("mine", ANY_ATTEMPT) in d.worker("d0").cancels)
        await d.until(lambda: d.worker("p0").num_prefilling == 0)
        assert (await former).finished is not None
        latter.cancel()


async def test_a_session_lost_after_a_failed_handoff_is_not_blamed_for_it() -> None:
    async with deployment(2, 2, retries={"eject_s": 30.0}, timeouts={"handoff_report_s": 0.5}) as d:
        for name in ("p0", "p1"):
            d.worker(name).faults.hang_prefills = 1
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="mine")))
        await d.until(lambda: d.worker("p0").num_prefilling + d.worker("p1").num_prefilling == 1)
        for name in ("p0", "p1"):
            d.worker(name).faults.hang_prefills = 0
        decode = next(d.worker(name) for name in ("d0", "d1") if d.worker(name).runs)
        session_id = decode.runs["mine"].router_id
        assert session_id is not None
        decode.give_up(worker_pb2.Lease(lease_id=decode.runs["mine"].lease_id))
        decode.session_calls[session_id].cancel()
        assert_whole(await asking, PROMPT)
        assert not held(d) & {"d0", "d1"}
