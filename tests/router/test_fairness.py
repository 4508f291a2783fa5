"""Whose turn it is: in the queue, and in the line before the decode workers are asked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.config.router import PlacementConfig, TenantLimits
from baton.errors import OverloadedError
from baton.status import from_rpc_error
from router.fleet.fleet import Fleet, ReportedLoad
from router.placement.admission import Admission
from router.placement.fairness import SWEEP_ABOVE, FairLine, FairShare
from router.placement.placing import earliest_first_token_s
from router.placement.ticket import Ticket
from router.units import router
from tests.router.answers import PROMPT, ask_for, assert_whole, error_reason, refusal
from tests.router.deployment import QUICK, deployment
from tests.router.fleets import (
    admission_of,
    entry_of,
    facts,
    fleet_of,
    in_line,
    place,
    prompt,
    query,
    rounds,
    two_and_two,
)

POLICY = PlacementConfig()


Request = tuple[str, int, int]
"""Its tenant, priority and tokens."""


def full() -> tuple[ManualClock, Fleet, Admission]:
    """A worker of each role, neither with room."""
    clock = ManualClock(100.0)
    fleet = fleet_of(facts("p0", True, False), facts("d0", False, True), clock=clock)
    fleet.arrays.max_running[:] = 0
    return clock, fleet, admission_of(fleet, clock)


async def served_order(requests: list[Request]) -> list[str]:
    return [tenant for tenant, _, _ in await served(requests)]


async def served(requests: list[Request], **grants: int) -> list[Request]:
    """Requests in the order in which they leave a line of one slot."""
    _, fleet, admission = full()
    order: list[Request] = []

    async def one(ticket: Ticket, request: Request) -> None:
        placed = await place(admission, ticket)
        order.append(request)
        fleet.release(placed.booking)
        admission.kick()

    async with asyncio.TaskGroup() as group:
        for request in requests:
            tenant, priority, tokens = request
            urgency = TenantLimits(grants.get(tenant, 0)).urgency(priority)
            ticket = admission.ticket(prompt(tokens), 4, priority, tenant, urgency=urgency)
            group.create_task(one(ticket, request))
            await asyncio.sleep(0)  # all are in line before the first leaves it
        fleet.arrays.max_running[:] = 1
        admission.kick()
    assert fleet.num_bookings == 0
    return order


async def test_a_tenant_with_many_requests_does_not_keep_another_waiting() -> None:
    order = await served_order([("many", 0, 10)] * 20 + [("few", 0, 10)] * 3)
    assert order[:6].count("few") == 3
    assert order.count("many") == 20


async def test_a_tenant_pays_for_long_prompts() -> None:
    order = await served_order([("long", 0, 96)] * 8 + [("short", 0, 6)] * 8)
    assert order[:9].count("short") >= 7  # ten short ones are as much work as one long one


async def test_a_tenant_pays_for_long_answers_as_they_come() -> None:
    async with deployment(placement={"decode_growth_tokens": 4}) as d:
        d.worker("d0").step_s = 0.001
        slots = d.router.fleet.arrays.max_running
        slots[:] = 0
        order: list[str] = []

        async def one(tenant: str, number: int, num_tokens: int) -> None:
            request = ask_for(f"{number:02}", num_tokens, tenant=tenant)
            assert_whole(await d.client.ask(request), f"{number:02}", num_tokens)
            order.append(tenant)

        asking = [asyncio.create_task(one("long", number, 60)) for number in range(3)]
        asking += [asyncio.create_task(one("short", number, 4)) for number in range(10, 16)]
        await d.until(lambda: len(d.router.admission) == 9)
        slots[:] = 1
        d.router.admission.kick()
        await asyncio.gather(*asking)
        assert order[:7].count("short") == 6  # one long answer is more than all of them


async def test_those_in_line_are_tried_in_the_order_of_what_their_tenants_owe_by_then() -> None:
    clock, fleet, admission = full()
    tenants = ("long", "short", "none")
    waiting = [in_line(admission, prompt(10), 4, tenant=tenant) for tenant in tenants]
    await rounds(admission, clock, 0.25)
    growth = POLICY.decode_growth_tokens
    admission.emitted("long", growth, growth + 100_000)
    fleet.arrays.max_running[:] = 2
    await rounds(admission, clock, 0.25)
    assert [ticket.tenant for ticket in admission.waiting] == ["long"]
    for task in waiting:
        task.cancel()


async def test_an_answer_s_tokens_are_paid_once_by_who_comes_before_and_after_them() -> None:
    _, fleet, admission = full()
    tickets = [admission.ticket(prompt(10), 4, tenant="long")]
    waiting = [asyncio.create_task(place(admission, tickets[0]))]
    await asyncio.sleep(0)
    admission.emitted("long", POLICY.decode_growth_tokens, POLICY.decode_growth_tokens + 1000)
    for _ in range(2):
        tickets.append(admission.ticket(prompt(10), 4, tenant="long"))
        waiting.append(asyncio.create_task(place(admission, tickets[-1])))
        await asyncio.sleep(0)
    fleet.arrays.max_running[:] = 1
    admission.kick()
    await waiting[0]
    assert [ticket.rank[1] for ticket in tickets] == [1000, 1014, 1028]
    for task in waiting:
        task.cancel()


async def test_what_is_refused_costs_its_tenant_nothing() -> None:
    clock, fleet, admission = full()
    fleet.report(entry_of(fleet, "p0"), ReportedLoad(prefill_tokens_per_s=100.0))
    first = in_line(admission, prompt(10), 4, 0, "other")
    await asyncio.sleep(0)
    before = admission.ticket(prompt(10), 4, 0, "hasty").rank[1]
    for _ in range(5):
        with pytest.raises(OverloadedError):
            await place(
                admission,
                admission.ticket(prompt(500), 4, 0, "hasty", deadline_s=clock.now_s() + 1.0),
            )
    assert admission.ticket(prompt(10), 4, 0, "hasty").rank[1] == before + 14
    first.cancel()
    await asyncio.wait({first})


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(-(1 << 31), 2), st.integers(1, 50)),
        max_size=60,
    )
)
def test_priority_orders_a_tenant_s_own_requests_and_takes_nothing_of_others_share(
    requests: list[Request],
) -> None:
    order = asyncio.run(served(requests))
    assert sorted(order) == sorted(requests)
    for tenant in "ab":
        own = [request for request in requests if request[0] == tenant]
        assert [r for r in order if r[0] == tenant] == sorted(own, key=lambda r: r[1])
    done, left = dict.fromkeys("ab", 0), Counter(tenant for tenant, _, _ in requests)
    for tenant, _, tokens in order:
        done[tenant] += tokens + 4
        left[tenant] -= 1
        if all(left[each] for each in "ab"):
            assert abs(done["a"] - done["b"]) <= 2 * 54, order  # a request of each


async def test_priority_goes_before_other_tenants_as_far_as_it_is_granted() -> None:
    asked = [("plain", -9, 10), ("last", -9, 10), ("first", -9, 10), ("first", 5, 10)]
    order = await served(asked * 2, first=-3, last=3)
    assert [tenant for tenant, _, _ in order[:2]] == ["first"] * 2
    assert [tenant for tenant, _, _ in order[6:]] == ["last"] * 2
    assert [TenantLimits(-3).urgency(priority) for priority in (-9, -1, 5)] == [-3, -1, 0]


async def test_what_is_refused_gives_its_place_back_to_its_tenant_s_own() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(facts("p0", True, False), facts("d0", False, True), clock=clock)
    fleet.arrays.max_running[:] = 0
    admission = admission_of(fleet, clock)
    before = in_line(admission, prompt(10), 4, 1, "own")
    await asyncio.sleep(0)
    (ticket,) = admission.waiting
    urgent = in_line(admission, prompt(30), 4, 0, "own")
    await asyncio.sleep(0)
    assert [each.rank[1] for each in admission.waiting] == [0, 34]
    urgent.cancel()
    admission.leave(admission.waiting[0])
    assert (list(admission.waiting), ticket.rank[1]) == ([ticket], 0)
    before.cancel()
    await asyncio.wait({before, urgent})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=200))
def test_backlogged_tenants_are_served_the_same_amount_of_work(
    arrivals: list[tuple[str, int]],
) -> None:
    shares = FairShare()
    line = []
    for number, (tenant, work) in enumerate(arrivals):
        line.append((shares.stamp(tenant), number, tenant, work))
        shares.charge(tenant, work)
    left = {tenant: sum(w for t, w in arrivals if t == tenant) for tenant in "abc"}
    done = dict.fromkeys("abc", 0)
    for stamp, _, tenant, work in sorted(line):
        shares.served(stamp)
        done[tenant] += work
        left[tenant] -= work
        waiting = [done[t] for t in "abc" if left[t]]
        if len(waiting) > 1:
            assert max(waiting) - min(waiting) <= 2 * 50  # one request of each, whatever came


def test_an_idle_tenant_saves_up_nothing_and_is_forgotten() -> None:
    shares = FairShare()
    for _ in range(10):
        stamp = shares.stamp("busy")
        shares.charge("busy", 100)
        shares.served(stamp)
    assert shares.stamp("new") == 900  # beside the busy one, not far ahead of it
    shares.idle()
    assert len(shares) == 0
    assert shares.stamp("busy") == shares.stamp("new") == 1000
    for number in range(3 * SWEEP_ABOVE):
        tenant = f"tenant {number}"
        stamp = shares.stamp(tenant)
        shares.charge(tenant, 1)
        shares.served(stamp + 1)
    assert len(shares) <= SWEEP_ABOVE


async def test_a_full_line_sheds_the_newest_request_of_who_asked_for_most() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    fleet.arrays.max_running[:] = 0
    admission = admission_of(fleet, clock, admission={"max_queue": 4})
    tasks = [in_line(admission, prompt(10), 4, 0, "many") for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        admission.ticket(prompt(10), 4, 0, "many")
    few = in_line(admission, prompt(10), 4, 0, "few")
    await asyncio.wait({tasks[3]})
    assert isinstance(tasks[3].exception(), OverloadedError)
    assert len(admission) == 4
    fleet.arrays.max_running[:] = 8
    admission.kick()
    for task in (*tasks[:3], few):
        fleet.release((await task).booking)
    assert fleet.num_bookings == 0


# --- too late from the start ----------------------------------------------------------------------


def learned(fleet: Fleet, rate: float, **queued: int) -> None:
    for entry in fleet:
        if entry.facts.can_prefill:
            tokens = queued.get(entry.facts.worker_id, 0)
            fleet.report(entry, ReportedLoad(prefill_tokens_per_s=rate, num_queued_tokens=tokens))


def earliest(fleet: Fleet, tokens: int, ahead: float = 0.0, **cached: int) -> float | None:
    return earliest_first_token_s(query(fleet, tokens, **cached), fleet.arrays, ahead)


def test_the_earliest_first_token_is_the_best_worker_s_queue_and_prefill() -> None:
    fleet = two_and_two()
    learned(fleet, 1000.0, p0=3000, p1=1000, d0=9000, d1=9000)
    never = dataclasses.replace(POLICY, local_prefill="never")
    asked = dataclasses.replace(query(fleet, 500), policy=never)
    assert earliest_first_token_s(asked, fleet.arrays, 0.0) == pytest.approx(1.5)
    # A decode worker that may prefill is idle, and counts as the fastest.
    assert earliest(fleet, 500) == pytest.approx(0.5)
    assert earliest(fleet, 500, p1=400, d0=500) == pytest.approx(0.001)


def test_the_line_ahead_is_shared_by_all_workers() -> None:
    fleet = two_and_two()
    learned(fleet, 1000.0)
    assert earliest(fleet, 500, ahead=8000) == pytest.approx(2.5)  # four workers may compute


def test_default_rates_predict_nothing() -> None:
    fleet = two_and_two()
    assert earliest(fleet, 1 << 20) is None
    entry = entry_of(fleet, "p0")
    fleet.report(entry, ReportedLoad(prefill_tokens_per_s=0.1))
    assert earliest(fleet, 1 << 20) is None  # the other prefill worker may be quick
    assert earliest(fleet_of(), 10) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.floats(0, 1e6), st.floats(0, 1e6))
def test_more_work_ahead_never_brings_the_first_token_nearer(
    tokens: int, ahead: float, more: float
) -> None:
    fleet = two_and_two()
    learned(fleet, 2000.0, p0=100)
    fewer_s, more_s = earliest(fleet, tokens, ahead), earliest(fleet, tokens, ahead + more)
    assert fewer_s is not None
    assert more_s is not None
    assert fewer_s <= more_s
    assert np.isfinite(more_s)


async def test_a_request_that_cannot_meet_its_deadline_is_refused_at_once() -> None:
    async with deployment() as d:
        entry = d.entry("p0")
        hurried = ask_for(PROMPT, timeout_ms=3000)
        assert_whole(await d.client.ask(hurried), PROMPT)  # only default rates: it is tried
        d.router.fleet.report(entry, ReportedLoad(prefill_tokens_per_s=0.1))
        error = await refusal(d.client, hurried)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_reason(error) == "OVERLOADED"
        assert "deadline" in (error.details() or "")
        assert d.worker("d0").num_reserves == 1
        d.router.fleet.report(entry, ReportedLoad(prefill_tokens_per_s=1e5))
        assert_whole(await d.client.ask(hurried), PROMPT)


class Searches:
    """What searches under the turns that it is given, in the order in which they came."""

    def __init__(self, max_queue: int) -> None:
        self.turns = FairLine("found", 2, 2 + max_queue, QUICK.admission.overload_retry_s)
        self.begun: list[str] = []
        self.on_end: Callable[[], object] = lambda: None
        self._may_end: dict[str, asyncio.Event] = {}

    def ask(self, name: str) -> asyncio.Task[None]:
        """`name`: the tenant's letter and a number."""
        self._may_end[name] = asyncio.Event()
        return asyncio.create_task(self._search(name))

    async def _search(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.begun.append(name)
            await self._may_end[name].wait()
        self.on_end()

    async def end(self, name: str) -> None:
        self._may_end[name].set()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_that_asks_for_little_waits_behind_its_own_requests_only() -> None:
    searches = Searches(max_queue=10)
    asked = {name: searches.ask(name) for name in ("a1", "a2", "a3", "a4", "a5", "b1")}
    await settled()
    assert searches.begun == ["a1", "a2"]
    await searches.end("a2")
    for name in ("a1", "a3", "b1", "a4", "a5"):
        await searches.end(name)
    await asyncio.gather(*asked.values())
    assert searches.begun == ["a1", "a2", "b1", "a3", "a4", "a5"]
    assert searches.turns.num_requests == 0


async def test_a_full_line_refuses_the_newest_of_the_tenant_that_has_most_of_it() -> None:
    searches = Searches(max_queue=2)
    asked = {name: searches.ask(name) for name in ("a1", "a2", "a3", "a4")}
    await settled()
    with pytest.raises(OverloadedError) as caught:
        await searches.ask("a5")
    assert caught.value.retry_after_s == QUICK.admission.overload_retry_s
    other = searches.ask("b1")
    with pytest.raises(OverloadedError):
        await asked.pop("a4")
    others = [other, searches.ask("b2")]
    with pytest.raises(OverloadedError):
        await asked.pop("a3")
    with pytest.raises(OverloadedError):
        await searches.ask("b3")  # what `a` has left runs
    for name in ("a1", "a2", "b1", "b2"):
        await searches.end(name)
    await asyncio.gather(*others, *asked.values())
    assert searches.turns.num_requests == 0


async def test_who_leaves_gives_its_turn_to_the_next_also_when_it_has_just_come() -> None:
    searches = Searches(max_queue=10)
    asked = {name: searches.ask(name) for name in ("a1", "a2", "a3", "a4", "a5")}
    await settled()
    asked["a3"].cancel()
    await settled()
    searches.on_end = asked["a4"].cancel  # whose turn it is then, but that it has yet to hear
    await searches.end("a1")
    assert asked["a4"].cancelled()
    assert searches.begun == ["a1", "a2", "a5"]
    for name in ("a2", "a5"):
        await searches.end(name)
    await asyncio.gather(*asked.values(), return_exceptions=True)
    assert searches.turns.num_requests == 0


async def test_resumes_ask_the_workers_no_faster_than_searches_may_and_are_refused_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "SEARCHES_AT_ONCE", 2)
    async with deployment(admission={"max_queue": 1}, timeouts={"attach_s": 20.0}) as d:
        worker = d.worker("d0")
        worker.faults.hang_attaches = 2
        asking = []
        for number in range(3):
            request = ask_for(PROMPT, request_id=f"r{number}", resume_from_index=0)
            asking.append(asyncio.create_task(d.client.ask(request)))
            await d.until(lambda n=number: d.router.num_active == n + 1)  # type: ignore[misc]
        await d.until(lambda: worker.num_attaching == 2)
        error = await refusal(d.client, ask_for(PROMPT, request_id="r3", resume_from_index=0))
        problem = from_rpc_error(error)  # type: ignore[arg-type]
        assert isinstance(problem, OverloadedError)
        assert problem.retry_after_s == QUICK.admission.overload_retry_s
        assert worker.num_attaching == 2
        asking[0].cancel()
        assert_whole(await asking[2], PROMPT)  # it was nowhere, and ran
        asking[1].cancel()
