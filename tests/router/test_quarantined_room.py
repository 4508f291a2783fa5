"""Prompts for which quarantined blocks leave no room: where they go, and whom they hold up."""

from __future__ import annotations

import asyncio

import pytest

from baton.clock import ManualClock
from baton.config.router import LocalPrefill, PlacementConfig
from baton.errors import UnavailableError
from router.fleet.fleet import Fleet, ReportedLoad
from router.placement.admission import SCAN_AHEAD
from router.placement.placement import reach
from tests.router.fleets import (
    admission_of,
    entry_of,
    facts,
    fleet_of,
    in_line,
    pick,
    place,
    prompt,
    query,
    rounds,
)

NEVER = PlacementConfig(local_prefill="never")


def quarantine(fleet: Fleet, worker_id: str, num_blocks: int) -> None:
    fleet.report(entry_of(fleet, worker_id), ReportedLoad(num_quarantined_blocks=num_blocks))


def two_prefill_workers(clock: ManualClock | None = None) -> Fleet:
    """Of 10 blocks of 16 tokens each, of which p0 has 6 in quarantine: room for 64 tokens."""
    fleet = fleet_of(
        facts("p0", True, False, num_blocks=10, max_request_tokens=160),
        facts("p1", True, False, num_blocks=10, max_request_tokens=160),
        facts("d0", False, True),
        clock=clock,
    )
    quarantine(fleet, "p0", 6)
    return fleet


def test_a_prompt_goes_where_quarantine_leaves_it_room() -> None:
    fleet = two_prefill_workers()
    fleet.arrays.queued_tokens[entry_of(fleet, "p1").slot] = 10_000  # by cost it were p0
    assert pick(fleet, query(fleet, 64), NEVER) == ("p0", "d0")
    assert pick(fleet, query(fleet, 65), NEVER) == ("p1", "d0")
    quarantine(fleet, "p0", 0)
    assert pick(fleet, query(fleet, 65), NEVER) == ("p0", "d0")


def test_what_is_cached_of_a_prompt_makes_no_room_beside_quarantine() -> None:
    """It is among what is left, and a prediction of it may be of a handoff that broke."""
    fleet = two_prefill_workers()
    assert pick(fleet, query(fleet, 64, p0=48), NEVER) == ("p0", "d0")
    assert pick(fleet, query(fleet, 96, p0=48), NEVER) == ("p1", "d0")


def test_a_window_s_span_is_all_that_a_prompt_needs_beside_quarantine() -> None:
    fleet = fleet_of(
        facts("p0", True, False, num_blocks=10, max_held_tokens=48),
        facts("d0", False, True),
    )
    quarantine(fleet, "p0", 7)
    assert pick(fleet, query(fleet, 1000), NEVER) == ("p0", "d0")
    assert reach(fleet.arrays, NEVER).takes(1000, 1).any()


@pytest.mark.parametrize("local_prefill", ["auto", "always"])
def test_a_worker_that_prefills_for_itself_has_no_more_room_than_quarantine_leaves(
    local_prefill: LocalPrefill,
) -> None:
    policy = PlacementConfig(local_prefill=local_prefill)
    fleet = fleet_of(
        facts("d0", False, True, num_blocks=10, max_request_tokens=160),
        facts("d1", False, True, num_blocks=10, max_request_tokens=160),
    )
    quarantine(fleet, "d0", 6)
    fleet.arrays.queued_tokens[entry_of(fleet, "d1").slot] = 10_000
    assert pick(fleet, query(fleet, 65), policy) == ("", "d1")
    assert reach(fleet.arrays, policy).takes(64, 1).sum() == 2
    assert reach(fleet.arrays, policy).takes(65, 1).tolist()[:2] == [False, True]


def test_who_is_within_reach_goes_by_the_prefill_workers_room() -> None:
    fleet = two_prefill_workers()
    assert reach(fleet.arrays, NEVER).takes(150, 1).any()
    quarantine(fleet, "p1", 2)
    assert reach(fleet.arrays, NEVER).takes(128, 1).any()
    assert not reach(fleet.arrays, NEVER).takes(129, 1).any()


async def test_prompts_that_fit_nowhere_hold_nobody_back_and_are_refused() -> None:
    clock = ManualClock(100.0)
    fleet = two_prefill_workers(clock)
    quarantine(fleet, "p1", 6)
    admission = admission_of(fleet, clock, admission={"fleet_wait_s": 10.0})
    tickets = [admission.ticket(prompt(100, n * 100), 4) for n in range(2 * SCAN_AHEAD)]
    large = [asyncio.create_task(place(admission, ticket)) for ticket in tickets]
    await rounds(admission, clock, 5.0)
    small = in_line(admission, prompt(50, 10_000), 4)
    await rounds(admission, clock, 0.25)
    assert small.done()
    fleet.release(small.result().booking)
    assert not any(task.done() for task in large)
    await rounds(admission, clock, 6.0)
    for task in large:
        with pytest.raises(UnavailableError, match="100 tokens"):
            await task
    fleet.check_integrity()


@pytest.mark.parametrize("registry_is_gone", [False, True])
async def test_a_prompt_is_placed_when_quarantine_ends_or_nobody_reports_it(
    registry_is_gone: bool,
) -> None:
    clock = ManualClock(100.0)
    fleet = two_prefill_workers(clock)
    quarantine(fleet, "p1", 6)
    admission = admission_of(fleet, clock, admission={"fleet_wait_s": 10.0})
    large = in_line(admission, prompt(100), 4)
    await rounds(admission, clock, 5.0)
    assert not large.done()
    if registry_is_gone:
        fleet.forget_others()
    else:
        quarantine(fleet, "p1", 0)
    await rounds(admission, clock, 0.25)
    fleet.release(large.result().booking)


async def test_a_prompt_whose_handoff_broke_and_filled_quarantine_is_refused_in_time() -> None:
    """It was predicted to be cached where it ran; that made it look as if there were room."""
    clock = ManualClock(100.0)
    fleet = two_prefill_workers(clock)
    admission = admission_of(
        fleet, clock, admission={"fleet_wait_s": 10.0}, placement={"prediction_ttl_s": 60.0}
    )
    ticket = admission.ticket(prompt(100), 4)
    first = await place(admission, ticket)
    fleet.release(first.booking)
    quarantine(fleet, first.placement.prefill_worker, 6)
    again = asyncio.create_task(place(admission, ticket))
    await rounds(admission, clock, 5.0)
    assert not again.done()
    await rounds(admission, clock, 6.0)
    with pytest.raises(UnavailableError, match="100 tokens"):
        await again
    fleet.check_integrity()
