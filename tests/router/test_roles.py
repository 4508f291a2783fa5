"""Roles in force, and roles that are away: requests are held until workers for them are live."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.clock import ManualClock
from baton.errors import OverloadedError, UnavailableError
from baton.v1 import common_pb2, control_pb2
from router.fleet.fleet import RolesAway
from router.fleet.registry import read_fleet
from tests.router.answers import PROMPT, ask_for, assert_whole, error_of
from tests.router.deployment import DECODE, MIXED, PREFILL, Deployment, deployment
from tests.router.fleets import admission_of, fleet_of, in_line, prompt, rounds, two_and_two


def pool(
    role: common_pb2.WorkerRole.ValueType,
    desired: int,
    *comes_back_for: common_pb2.WorkerRole.ValueType,
) -> control_pb2.PoolStatus:
    return control_pb2.PoolStatus(
        role=role, desired_replicas=desired, comes_back_for=comes_back_for
    )


def away(*pools: control_pb2.PoolStatus) -> RolesAway:
    return read_fleet(control_pb2.WatchFleetResponse(pools=pools)).away


AT_ZERO = RolesAway(prefill=True, decode=True)


def test_a_role_is_away_while_no_pool_is_to_have_workers_for_it() -> None:
    assert away(pool(PREFILL, 0), pool(DECODE, 0)) == AT_ZERO
    assert away(pool(PREFILL, 0), pool(DECODE, 0), pool(MIXED, 1)) == RolesAway()
    assert away(pool(PREFILL, 1), pool(DECODE, 0)) == RolesAway(decode=True)


def test_a_role_is_away_until_the_registry_says_that_it_is_back() -> None:
    assert away(pool(PREFILL, 1), pool(DECODE, 1)) == RolesAway()
    assert away(pool(PREFILL, 1), pool(DECODE, 1, DECODE)) == RolesAway(decode=True)
    assert away(pool(MIXED, 1, PREFILL), pool(DECODE, 1)) == RolesAway(prefill=True)


def test_a_role_that_no_pool_can_do_is_not_waited_for() -> None:
    assert away(pool(DECODE, 1)) == RolesAway()


def test_a_registry_that_keeps_pools_and_knows_of_none_has_all_of_them_to_come() -> None:
    assert read_fleet(control_pb2.WatchFleetResponse(keeps_pools=True)).away == AT_ZERO
    assert away() == RolesAway()  # workers that somebody else starts


def test_requests_wait_for_the_roles_that_they_cannot_do_without() -> None:
    assert RolesAway(decode=True).hold("always")
    assert RolesAway(prefill=True).hold("never")
    assert not RolesAway(prefill=True).hold("auto")  # decode workers prefill by themselves
    assert not RolesAway().hold("never")


# --- the line -------------------------------------------------------------------------------------


async def test_a_held_request_outwaits_a_stopped_pool_and_patience_begins_when_it_is_back() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(clock=clock)
    fleet.away = AT_ZERO
    admission = admission_of(fleet, clock, admission={"fleet_wait_s": 10.0})
    held = in_line(admission, prompt(10), 4)
    await rounds(admission, clock, 100.0)
    fleet.away = RolesAway()  # but no worker is connected
    await rounds(admission, clock, 9.0)
    assert not held.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(UnavailableError, match="no decode worker is live"):
        await held


async def test_a_request_is_not_held_for_the_workers_of_a_unit_that_leaves() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(clock=clock)
    fleet.away = AT_ZERO
    admission = admission_of(fleet, clock, admission={"fleet_wait_s": 10.0})
    held = in_line(admission, prompt(10), 4)
    await rounds(admission, clock, 100.0)
    fleet.is_leaving = True
    await rounds(admission, clock, 11.0)
    with pytest.raises(UnavailableError, match="no decode worker is live"):
        await held


async def test_held_requests_are_a_bounded_line_and_go_on_in_order_with_the_first_workers() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(clock=clock)
    fleet.away = AT_ZERO
    admission = admission_of(fleet, clock, admission={"max_queue": 2})
    held = [in_line(admission, prompt(10, n * 10), 4) for n in range(2)]
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
        pool(role, desired, *([] if live or not desired else [role])) for role in (PREFILL, DECODE)
    ]
    await d.registry.publish()
    await d.until(lambda: d.router.fleet.away.hold("never") is (live == 0))


async def test_a_router_that_runs_out_sends_away_what_waits_for_workers() -> None:
    async with deployment(prefill=0, decode=0, admission={"fleet_wait_s": 0.1}) as d:
        await tell_pools(d, 0)
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: len(d.router.admission) == 1)
        await asyncio.wait_for(d.router.run_out(), 10)
        assert (await error_of(asking)).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_request_that_comes_while_nothing_runs_is_reported_as_held_and_then_answered() -> (
    None
):
    async with deployment(prefill=0, decode=0, admission={"fleet_wait_s": 0.1}) as d:
        await tell_pools(d, 0)
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: len(d.router.admission) == 1)
        assert d.router.report().num_held == 1
        await tell_pools(d, 1)
        (ticket,) = d.router.admission.waiting
        until_s = ticket.since_s + 0.5  # five times the patience
        await d.until(lambda: d.router.clock.now_s() > until_s)
        assert not asking.done()
        await d.add_worker("p0", PREFILL)
        await d.add_worker("d0", DECODE)
        assert_whole(await asking, PROMPT)
        assert d.router.report().num_held == 0


async def test_a_held_request_ends_at_its_own_deadline() -> None:
    async with deployment(prefill=0, decode=0, admission={"fleet_wait_s": 0.1}) as d:
        await tell_pools(d, 0)
        assert (
            await error_of(d.client.ask(ask_for(PROMPT, timeout_ms=500)))
        ).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_whose_pools_are_stopped_goes_on_when_they_are_back() -> None:
    async with deployment(admission={"fleet_wait_s": 0.1}) as d:
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
        until_s = ticket.since_s + 0.5  # five times the patience
        await d.until(lambda: d.router.clock.now_s() > until_s)
        assert not asking.done()
        await tell_pools(d, 1)
        await d.add_worker("d0", DECODE, 2)
        assert_whole(await asking, PROMPT)


def split(d: Deployment, **roles: int) -> None:
    """As the registry reports it, and at once: the test continues with the roles in force."""
    for worker_id, role in roles.items():
        d.worker(worker_id).active_role = role
    workers = [worker.info() for worker in d.registry.workers]
    d.router.links.update(read_fleet(control_pb2.WatchFleetResponse(workers=workers)))


async def where(d: Deployment) -> tuple[str, str]:
    """Which worker prefills a new prompt, and which decodes it."""
    answer = await d.client.ask(ask_for(PROMPT))
    assert_whole(answer, PROMPT)
    (routed,) = answer.routed
    return routed.prefill_worker, routed.decode_worker


async def test_new_requests_go_by_the_roles_in_force() -> None:
    async with deployment(prefill=0, decode=0, mixed=2) as d:
        split(d, m0=PREFILL, m1=DECODE)
        assert {await where(d) for _ in range(8)} == {("m0", "m1")}
        split(d, m0=DECODE, m1=PREFILL)
        assert {await where(d) for _ in range(8)} == {("m1", "m0")}


async def test_a_stream_goes_on_where_it_runs_when_its_workers_role_is_taken_away() -> None:
    async with deployment(prefill=0, decode=0, mixed=2) as d:
        split(d, m0=PREFILL, m1=DECODE)
        d.worker("m1").may_decode.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: bool(d.worker("m1").runs))
        split(d, m0=DECODE, m1=PREFILL)
        d.worker("m1").may_decode.set()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert not answer.migrated
        assert [routed.decode_worker for routed in answer.routed] == ["m1"]


async def test_a_worker_is_given_no_role_that_it_does_not_have() -> None:
    async with deployment(prefill=1, decode=1) as d:
        split(d, d0=PREFILL)
        entry = d.entry("d0")
        assert not d.router.fleet.arrays.can_prefill[entry.slot]
        split(d, d0=DECODE)
        assert await where(d) == ("p0", "d0")
