"""A client that leaves before its request runs, at every point of the way: nothing is left of it.
(`test_tokenizing.py` has the points before the queue.)"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from baton.fleet import Role
from baton.v1 import router_pb2
from baton.wire import ANY_ATTEMPT
from tests.cluster.conftest import nothing_held, running_worker
from tests.router.answers import PROMPT, ask_for, assert_whole
from tests.router.deployment import Deployment, deployment
from tests.router.real_workers import SMALL_VOCABULARY, Listed, request_of, router_over, until


def in_line(d: Deployment) -> Callable[[], bool]:
    d.router.fleet.arrays.max_running[:] = 0
    return lambda: len(d.router.admission) == 1


def searched_for(d: Deployment) -> Callable[[], bool]:
    d.worker("d0").faults.hang_attaches = 1
    return lambda: d.worker("d0").num_attaching == 1


def reserving(d: Deployment) -> Callable[[], bool]:
    d.worker("d0").faults.hang_reservations = 1
    return lambda: d.worker("d0").num_reserves == 1


def prefilling(d: Deployment) -> Callable[[], bool]:
    d.worker("p0").may_prefill.clear()
    return lambda: d.worker("p0").num_prefilling == 1


def backing_off(d: Deployment) -> Callable[[], bool]:
    """After two failures, before the third attempt."""
    d.worker("p0").faults.fail_prefills = 2
    return lambda: d.worker("p0").num_prefills == 2 and d.router.fleet.num_bookings == 0


POINTS = [in_line, searched_for, reserving, prefilling, backing_off]


@pytest.mark.parametrize("by", ["cancel", "abort"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_request_that_ends_before_it_runs_leaves_nothing(
    point: Callable[[Deployment], Callable[[], bool]], by: str
) -> None:
    async with deployment(clients={"resume_window_s": 0.05}, retries={"backoff_s": 5.0}) as d:
        reached = point(d)
        request = ask_for(PROMPT)
        if by == "abort" or point is searched_for:
            request.request_id = "mine"
        if point is searched_for:
            request.resume_from_index = 0
        call = d.client.stub.Generate(request)
        await d.until(reached)
        if by == "abort":
            await d.client.stub.Abort(router_pb2.AbortRequest(request_id="mine"))
        else:
            call.cancel()
        await d.check_empty()
        await d.until(lambda: len(d.router.runs) == 0)
        d.router.check_integrity()  # no timer is left either
        d.router.fleet.arrays.max_running[:] = 16
        d.worker("p0").may_prefill.set()
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)  # nothing is in its way
        await d.check_empty()
        cancels = [attempt for _, attempt in d.worker("d0").cancels]  # a session keeps its order
        known = {
            searched_for: [ANY_ATTEMPT],  # whatever runs there under its id
            reserving: [1],
            prefilling: [1],
            backing_off: [1, 2],
        }
        assert cancels == known.get(point, [])


async def test_requests_cancelled_at_any_moment_leave_nothing_on_real_workers() -> None:
    rng = random.Random(5)
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        listed = Listed(prefill, prefill.address), Listed(decode, decode.address)
        async with router_over(*listed) as (router, client):

            async def one(number: int) -> bool:
                """Whether the request had come as far as `Routed`."""
                call = client.stub.Generate(request_of(number))
                began = asyncio.get_running_loop().create_task(call.read())
                await asyncio.wait({began}, timeout=rng.uniform(0.0, 0.06))
                call.cancel()
                await asyncio.wait({began})
                if began.cancelled() or began.exception() is not None:
                    return False
                return began.result() is not grpc.aio.EOF

            came_far = [await asyncio.gather(*(one(n) for n in range(8))) for _ in range(10)]
            assert {True, False} == {far for round_ in came_far for far in round_}
            await until(lambda: len(router.runs) == 0)
            router.check_integrity()
            assert router.fleet.num_bookings == 0
            assert len(router.admission) == 0
            await nothing_held(prefill, decode)
