"""The queue: who goes on, when, and in which order."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.errors import NoCapacityError, OverloadedError, UnavailableError
from baton.fleet import WorkerState
from router.fleet.fleet import Fleet, ReportedLoad
from router.index.prefix_index import PrefixIndex
from router.placement.admission import POLL_S, SCAN_AHEAD, Admission
from router.placement.ticket import Placed, Ticket
from tests.router.fleets import (
    admission_of,
    entry_of,
    facts,
    fleet_of,
    in_line,
    place,
    prompt,
    rounds,
    two_and_two,
)


async def test_the_lowest_priority_goes_first_then_arrival() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    admission = admission_of(fleet, clock)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        ticket = admission.ticket(prompt(10), 4, priority)
        await place(admission, ticket)
        order.append(name)

    names = (("a", 0), ("b", -5), ("c", 0), ("d", -5))
    await asyncio.gather(*(one(name, priority) for name, priority in names))
    assert order == ["b", "d", "a", "c"]


async def test_a_prompt_waits_until_its_prefill_can_start_soon() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    for name in ("p0", "p1"):
        entry = entry_of(fleet, name)
        fleet.report(entry, ReportedLoad(num_queued_tokens=4000))  # two seconds of work
    admission = admission_of(fleet, clock)
    placing = in_line(admission, prompt(10), 4, 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not placing.done()
    assert fleet.num_bookings == 0  # no decode memory is held meanwhile
    entry = entry_of(fleet, "p0")
    fleet.report(entry, ReportedLoad(num_queued_tokens=500))
    admission.kick()
    placed = await placing
    assert placed.placement.prefill_worker == "p0"
    fleet.release(placed.booking)
    fleet.check_integrity()


async def test_one_prompt_s_burst_is_drawn_to_where_its_prefix_is_about_to_be() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(
        *(facts(f"p{n}", True, False) for n in range(3)),
        *(facts(f"d{n}", False, True) for n in range(3)),
        clock=clock,
    )
    admission = admission_of(fleet, clock)
    workers = set()
    for _ in range(4):
        placed = await place(admission, admission.ticket(prompt(320), 4, 0))
        workers.add(placed.placement.prefill_worker)
        fleet.release(placed.booking)
    assert len(workers) == 1


async def test_a_full_queue_and_a_prompt_no_worker_can_hold_are_refused() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(facts("p0", True, False), facts("d0", False, True, num_blocks=4), clock=clock)
    admission = admission_of(fleet, clock, admission={"max_queue": 1})
    with pytest.raises(NoCapacityError):
        await place(admission, admission.ticket(prompt(100), 4, 0))
    fleet.arrays.max_running[:] = 0
    waiting = in_line(admission, prompt(10), 4, 0)
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as caught:
        admission.ticket(prompt(10), 4, 0)
    assert caught.value.retry_after_s == 1.0
    waiting.cancel()
    await asyncio.wait({waiting})
    assert len(admission) == 0


async def test_a_request_that_leaves_while_it_is_placed_gives_its_placement_back() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    admission = admission_of(fleet, clock)
    tickets = [admission.ticket(prompt(10, n), 4, 0) for n in range(2)]
    answers = list[object]()

    def first_is_placed(answer: object) -> None:
        answers.append(answer)
        admission.leave(tickets[1])  # placed in the same round, and not told yet

    admission.enter(tickets[0], first_is_placed)
    admission.enter(tickets[1], answers.append)
    await rounds(admission, clock, 0.25)
    (placed,) = answers
    assert isinstance(placed, Placed)
    fleet.release(placed.booking)
    assert fleet.num_bookings == 0
    fleet.check_integrity()


async def test_a_prompt_longer_than_memory_is_placed_where_windows_leave_blocks() -> None:
    clock = ManualClock(100.0)
    decode = facts("d0", False, True, num_blocks=8, max_held_tokens=64)  # 128 tokens
    fleet = fleet_of(facts("p0", True, False), decode, clock=clock)
    admission = admission_of(fleet, clock)
    placed = [await place(admission, admission.ticket(prompt(1000, n * 1000), 4)) for n in (0, 1)]
    assert [one.booking.kv_tokens for one in placed] == [64, 64]
    third = in_line(admission, prompt(1000, 5000), 4)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not third.done()  # 128 tokens are booked
    fleet.release(placed[0].booking)
    await rounds(admission, clock, 0.25)
    fleet.release((await third).booking)
    fleet.release(placed[1].booking)
    fleet.check_integrity()


async def test_a_request_goes_only_where_all_it_asks_for_fits() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(
        facts("p0", True, False),
        facts("d0", False, True, max_model_len=101, max_request_tokens=100),
        facts("d1", False, True, max_model_len=201, max_request_tokens=200),
        clock=clock,
    )
    admission = admission_of(fleet, clock)
    for first in range(4):
        placed = await place(admission, admission.ticket(prompt(100, first), 2))
        assert placed.placement.decode_worker == "d1"
        fleet.release(placed.booking)
    with pytest.raises(NoCapacityError, match="100 tokens and 102 more exceed"):
        await place(admission, admission.ticket(prompt(100), 102))


async def test_a_request_in_line_is_refused_once_nobody_is_left_who_could_take_it() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(
        facts("p0", True, False),
        facts("d0", False, True, max_request_tokens=100),
        facts("d1", False, True),
        clock=clock,
    )
    admission = admission_of(fleet, clock)
    fleet.arrays.max_running[:] = 0
    long = in_line(admission, prompt(150), 4)
    short = in_line(admission, prompt(50), 4)
    await asyncio.sleep(0)
    assert len(admission) == 2
    large = entry_of(fleet, "d1")
    fleet.remove(large)
    fleet.arrays.max_running[:] = 8
    admission.kick()
    with pytest.raises(NoCapacityError):
        await long
    fleet.release((await short).booking)


# --- requests that cannot start -------------------------------------------------------------------


def unequal_fleet(clock: ManualClock) -> Fleet:
    """A large and a small decode worker: 200 tokens, 100 tokens."""
    return fleet_of(
        facts("p0", True, False),
        facts("large", False, True, max_model_len=200),
        facts("small", False, True, max_model_len=100),
        clock=clock,
    )


@pytest.mark.parametrize("state", [WorkerState.SUSPECT, WorkerState.DRAINING])
async def test_requests_that_only_an_unusable_worker_takes_hold_nobody_back(
    state: WorkerState,
) -> None:
    clock = ManualClock(100.0)
    fleet = unequal_fleet(clock)
    fleet.set_state(entry_of(fleet, "large"), state)
    admission = admission_of(fleet, clock, admission={"fleet_wait_s": 10.0})
    tickets = [admission.ticket(prompt(150, n * 200), 4) for n in range(2 * SCAN_AHEAD)]
    long = [asyncio.create_task(place(admission, ticket)) for ticket in tickets]
    await rounds(admission, clock, 5.0)
    short = in_line(admission, prompt(50), 4)
    await rounds(admission, clock, 0.5)
    assert short.done()
    fleet.release(short.result().booking)
    assert not any(task.done() for task in long)
    await rounds(admission, clock, 6.0)
    for task in long:
        with pytest.raises(UnavailableError, match="no decode worker that takes 154 tokens"):
            await task
    fleet.check_integrity()


async def test_a_request_that_no_prefill_worker_can_compute_holds_nobody_back() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(
        facts("large", True, False, max_model_len=200),
        facts("small", True, False, max_model_len=100),
        facts("d0", False, True),
        clock=clock,
    )
    fleet.set_connected(entry_of(fleet, "large"), False)
    admission = admission_of(fleet, clock)
    long = in_line(admission, prompt(150), 4)
    await rounds(admission, clock, 2.0)
    short = in_line(admission, prompt(50), 4)
    await rounds(admission, clock, 0.5)
    assert short.done()
    fleet.set_connected(entry_of(fleet, "large"), True)
    await rounds(admission, clock, 0.25)
    assert (await long).placement.prefill_worker == "large"


async def test_a_request_that_waits_for_the_large_worker_gets_it_and_leaves_the_small_one() -> None:
    clock = ManualClock(100.0)
    fleet = unequal_fleet(clock)
    fleet.arrays.max_running[:] = 2
    admission = admission_of(fleet, clock)
    large = [await place(admission, admission.ticket(prompt(120, n * 200), 4)) for n in range(2)]
    waiting = in_line(admission, prompt(150, 900), 4)
    await rounds(admission, clock, 2.0)
    shorts = [in_line(admission, prompt(50, 1000 * n), 4) for n in range(3)]
    await rounds(admission, clock, 0.5)
    assert [task.done() for task in shorts] == [True, True, False]
    assert all(task.result().placement.decode_worker == "small" for task in shorts[:2])
    fleet.release(large[0].booking)
    await rounds(admission, clock, 0.25)
    assert (await waiting).placement.decode_worker == "large"  # not given to the third short one
    fleet.release(large[1].booking)
    await rounds(admission, clock, 0.25)
    assert (await shorts[2]).placement.decode_worker == "large"


async def test_requests_that_have_waited_long_outlive_a_blink_of_the_last_worker() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    admission = admission_of(fleet, clock, admission={"fleet_wait_s": 10.0})
    fleet.arrays.max_running[:] = 0
    waiting = [in_line(admission, prompt(10, n * 10), 4) for n in range(3)]
    await rounds(admission, clock, 15.0)
    for _ in range(2):
        for name in ("d0", "d1"):
            fleet.set_connected(entry_of(fleet, name), False)
        await rounds(admission, clock, 6.0)
        assert not any(task.done() for task in waiting)
        for name in ("d0", "d1"):
            fleet.set_connected(entry_of(fleet, name), True)
        await rounds(admission, clock, 0.5)
    fleet.arrays.max_running[:] = 8
    await rounds(admission, clock, 0.5)
    assert all(task.done() for task in waiting)
    for task in waiting:
        fleet.release(task.result().booking)
    late = in_line(admission, prompt(10), 4)
    for name in ("d0", "d1"):
        fleet.set_connected(entry_of(fleet, name), False)
    await rounds(admission, clock, 11.0)
    with pytest.raises(UnavailableError, match="no decode worker is live"):
        await late


async def test_rounds_leave_the_event_loop_to_the_streams() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    began: list[float] = []

    class SlowIndex(PrefixIndex):
        """Every look-up takes 5 ms."""

        def lookup(self, *args: Any) -> Any:
            began.append(clock.now_s())
            clock.advance(0.005)
            return super().lookup(*args)

    config = changed(RouterConfig(), placement={"local_prefill": "never"})
    admission = Admission(config, fleet, SlowIndex(), clock, random.Random(0))
    fleet.arrays.free_tokens[:], fleet.arrays.running[:] = 0, 1  # no room for anyone
    waiting = [in_line(admission, prompt(10, n * 10), 4) for n in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    began.clear()
    for waited_s, is_over in ((0.079, False), (0.002, True)):  # four times the first round's 20 ms
        admission.kick()
        clock.advance(waited_s)
        await asyncio.sleep(0)
        assert bool(began) is is_over
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_rounds_that_try_nobody_look_at_nobody_and_leave_the_event_loop_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    admission = admission_of(fleet, clock)
    fleet.arrays.max_running[:] = 0
    waiting = [in_line(admission, prompt(10, n * 10), 4) for n in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    looked_at: list[Ticket] = []

    def num_tokens(ticket: Ticket) -> int:
        """Takes 5 ms."""
        looked_at.append(ticket)
        clock.advance(0.005)
        return len(ticket.prompt) + ticket.least_new_tokens

    monkeypatch.setattr(Ticket, "num_tokens", property(num_tokens))
    for _ in range(3):
        admission.kick()
        await asyncio.sleep(0)
    assert not looked_at  # nothing has changed for them
    clock.advance(POLL_S)
    admission.kick()
    await asyncio.sleep(0)
    assert len(looked_at) == 4
    # A round that tries nobody shows nobody when the next one may begin.
    assert admission._pause_until_s == pytest.approx(clock.now_s() + 4 * 0.02)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
