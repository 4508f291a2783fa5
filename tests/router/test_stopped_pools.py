"""Pools at zero by plan: requests are held, up to their own deadline, until workers are live."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from baton.errors import OverloadedError, UnavailableError
from baton.v1 import control_pb2
from router.stopped_pools import PoolReport, StoppedPools
from router.text import TextModel
from tests.router.deployment import DECODE, PREFILL, PROMPT, Deployment, ask_for, deployment
from tests.router.test_admission import admission_of, prompt, rounds
from tests.router.test_placement import Clock, fleet_of, two_and_two
from tests.router.test_requests import assert_whole


def prefill(desired: int, live: int = 0, failed: int = 0) -> PoolReport:
    return PoolReport("prefill", True, False, desired, live, failed)


def decode(desired: int, live: int = 0, failed: int = 0) -> PoolReport:
    return PoolReport("decode", False, True, desired, live, failed)


def stopped_pools(*history: tuple[PoolReport, ...]) -> StoppedPools:
    stopped = StoppedPools()
    for pools in history:
        stopped.update(pools)
    return stopped


AT_ZERO = (prefill(0), decode(0))


def test_requests_are_held_from_the_order_to_stop_until_a_worker_of_each_role_is_live() -> None:
    coming = (prefill(1), decode(1))
    assert stopped_pools((prefill(0, live=1), decode(0, live=1))).holds("never")  # they drain
    assert stopped_pools(AT_ZERO).holds("never")
    assert stopped_pools(AT_ZERO, coming).holds("never")
    half = (prefill(1), decode(1, live=1))
    assert stopped_pools(AT_ZERO, coming, half).holds("never")
    assert not stopped_pools(AT_ZERO, coming, half).holds("auto")  # it may prefill by itself
    assert not stopped_pools(AT_ZERO, coming, (prefill(1, live=1), decode(1, live=1))).holds(
        "never"
    )


def test_a_router_that_starts_while_pools_come_back_holds_as_those_do_that_saw_them_go() -> None:
    coming = (prefill(1), replace(decode(1), decode_comes_back=True))
    assert stopped_pools(coming).holds("auto")
    assert not stopped_pools(coming, (prefill(1), decode(1, live=1))).holds("auto")
    assert not stopped_pools(
        (replace(prefill(1), prefill_comes_back=True), decode(1, live=1))
    ).holds("auto")
    assert stopped_pools((replace(prefill(1), prefill_comes_back=True), decode(1, live=1))).holds(
        "never"
    )


def test_what_has_no_worker_without_having_been_stopped_holds_nothing() -> None:
    assert not stopped_pools().holds("never")
    assert not stopped_pools((prefill(1), decode(1))).holds("never")  # they have yet to load
    died = (prefill(1), decode(1))
    back = (prefill(1, live=1), decode(1, live=1))
    assert not stopped_pools(AT_ZERO, back, died).holds("never")


def test_a_pool_that_fails_to_start_again_is_waited_for_no_longer_than_any_other() -> None:
    assert not stopped_pools(AT_ZERO, (prefill(1), decode(1, failed=1))).holds("auto")


def test_a_pool_that_is_new_brings_a_role_back_as_one_that_was_stopped_does() -> None:
    """Another revision of it, say: the stopped one stays at zero."""
    assert stopped_pools(AT_ZERO, (*AT_ZERO, prefill(1), decode(1))).holds("auto")
    assert not stopped_pools(AT_ZERO, (*AT_ZERO, prefill(1), decode(1, live=1))).holds("auto")


def test_a_registry_that_was_started_again_and_knows_no_pool_yet_ends_no_hold() -> None:
    assert stopped_pools(AT_ZERO, (), (prefill(1), decode(1))).holds("auto")
    assert not stopped_pools((), (prefill(1), decode(1))).holds("auto")


def test_a_role_is_away_only_when_all_pools_that_can_do_it_are() -> None:
    mixed = PoolReport("mixed", True, True, 1, 1)
    assert not stopped_pools((*AT_ZERO, mixed)).holds("never")
    assert stopped_pools((prefill(1, live=1), decode(0))).holds("auto")
    assert not stopped_pools((prefill(0), decode(1, live=1))).holds("always")


# --- the line -------------------------------------------------------------------------------------


async def test_a_held_request_outwaits_a_stopped_pool_and_patience_begins_when_it_is_back() -> None:
    clock = Clock()
    fleet = fleet_of(clock=clock)
    fleet.stopped.update(AT_ZERO)
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    held = asyncio.create_task(admission.place(admission.ticket(prompt(10), 4)))
    await rounds(admission, clock, 100.0)
    fleet.stopped.update((prefill(1), decode(1)))
    await rounds(admission, clock, 100.0)
    assert not held.done()
    fleet.stopped.update((prefill(1, live=1), decode(1, live=1)))  # but no worker is connected
    await rounds(admission, clock, 9.0)
    assert not held.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(UnavailableError, match="no decode worker is live"):
        await held


async def test_held_requests_are_a_bounded_line_and_go_on_in_order_with_the_first_workers() -> None:
    clock = Clock()
    fleet = fleet_of(clock=clock)
    fleet.stopped.update(AT_ZERO)
    admission = admission_of(fleet, clock, max_queue=2)
    held = [
        asyncio.create_task(admission.place(admission.ticket(prompt(10, n * 10), 4)))
        for n in range(2)
    ]
    await rounds(admission, clock, 20.0)
    with pytest.raises(OverloadedError):
        admission.ticket(prompt(10), 4)
    for worker in two_and_two(clock):
        entry = fleet.add(worker.facts)
        fleet.set_connected(entry, True)
        fleet.set_state(entry, worker.state)
    await rounds(admission, clock, 0.5)
    for task in held:
        fleet.release((await task).booking)
    fleet.check_integrity()


# --- a whole router -------------------------------------------------------------------------------


async def tell_pools(d: Deployment, desired: int, live: int = 0) -> None:
    d.registry.pools = [
        control_pb2.PoolStatus(name=name, role=role, desired_replicas=desired, live_replicas=live)
        for name, role in (("prefill", PREFILL), ("decode", DECODE))
    ]
    await d.registry.publish()
    await d.until(lambda: d.router.fleet.stopped.holds("never") is (live == 0))


async def test_a_request_that_comes_while_nothing_runs_is_told_as_held_and_then_answered(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, prefill=0, decode=0, fleet_wait_s=0.1) as d:
        await tell_pools(d, 0)
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: len(d.router.admission) == 1)
        assert d.router._report().num_held == 1
        await tell_pools(d, 1)
        (ticket,) = d.router.admission.waiting
        await d.until(lambda: d.router.clock() - ticket.since_s > 0.5)  # five times the patience
        assert not asking.done()
        await d.add_worker("p0", PREFILL)
        await d.add_worker("d0", DECODE)
        assert_whole(await asking, PROMPT)
        assert d.router._report().num_held == 0
        await d.check_empty()


async def test_a_held_request_ends_at_its_own_deadline(text_model: TextModel) -> None:
    async with deployment(text_model, prefill=0, decode=0, fleet_wait_s=0.1) as d:
        await tell_pools(d, 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await d.client.ask(ask_for(PROMPT, timeout_ms=500))
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await d.check_empty()


async def test_a_stream_whose_pools_are_stopped_goes_on_when_they_are_back(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, fleet_wait_s=0.1) as d:
        worker, has_begun = d.worker("d0"), asyncio.Event()

        def stop(_: object) -> None:
            worker.may_decode.clear()
            has_begun.set()

        worker.on_token = stop
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await has_begun.wait()
        await tell_pools(d, 0)
        await worker.die()
        await d.until(lambda: len(d.router.admission) == 1)
        (ticket,) = d.router.admission.waiting
        await d.until(lambda: d.router.clock() - ticket.since_s > 0.5)  # five times the patience
        assert not asking.done()
        await tell_pools(d, 1)
        await d.add_worker("d0", DECODE, 2)
        assert_whole(await asking, PROMPT)
        await d.check_empty()
