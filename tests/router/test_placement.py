"""The choice of workers: pure, in seconds, and explained."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.fleet import WorkerState
from router.fleet.fleet import Fleet, RecentPeak, ReportedLoad
from router.placement.choice import choose, ranked
from router.placement.terms import queue
from tests.router.fleets import (
    POLICY,
    cheapest,
    entry_of,
    facts,
    fleet_of,
    pick,
    query,
    two_and_two,
)


def test_a_cached_prefix_decides_among_idle_workers() -> None:
    fleet = two_and_two()
    assert pick(fleet, query(fleet, 1000, p1=800, d0=800)) == ("p1", "d0")


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    fleet = two_and_two()
    holder = entry_of(fleet, "p1")
    fleet.report(holder, ReportedLoad(num_queued_tokens=5000))
    assert pick(fleet, query(fleet, 1000, p1=800))[0] == "p0"


def test_a_prompt_the_decode_worker_holds_almost_whole_is_prefilled_there() -> None:
    fleet = two_and_two()
    assert pick(fleet, query(fleet, 1000, d1=999)) == ("", "d1")
    never = dataclasses.replace(POLICY, local_prefill="never")
    assert pick(fleet, query(fleet, 1000, d1=999), never)[0] in ("p0", "p1")


def test_ties_are_broken_at_random() -> None:
    fleet = two_and_two()
    wanted = query(fleet, 100)
    rng = random.Random(1)
    seen = set()
    for _ in range(64):
        placement = choose(wanted, fleet.arrays, rng)
        assert placement is not None
        seen.add((placement.prefill_worker, placement.decode_worker))
    assert seen == {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")}


def test_unequal_kv_never_pairs() -> None:
    fleet = fleet_of(facts("p0", True, False), facts("d0", False, True, kv_fingerprint=b"other"))
    assert choose(query(fleet, 100), fleet.arrays, random.Random(0)) is None


def test_a_worker_without_room_a_suspect_and_a_disconnected_one_get_nothing() -> None:
    fleet = two_and_two()
    d0, p0 = entry_of(fleet, "d0"), entry_of(fleet, "p0")
    fleet.report(d0, ReportedLoad(num_requests=32))
    fleet.set_state(p0, WorkerState.SUSPECT)
    assert pick(fleet, query(fleet, 500)) == ("p1", "d1")
    fleet.set_state(p0, WorkerState.LIVE)
    fleet.set_connected(p0, False)
    assert pick(fleet, query(fleet, 500)) == ("p1", "d1")


def test_a_worker_that_failed_the_request_is_taken_only_when_no_other_is_left() -> None:
    fleet = two_and_two()
    p0 = entry_of(fleet, "p0")
    wanted = dataclasses.replace(query(fleet, 500, p0=499), failed=frozenset({p0.slot}))
    assert pick(fleet, wanted)[0] == "p1"
    p1 = entry_of(fleet, "p1")
    fleet.remove(p1)
    never = dataclasses.replace(POLICY, local_prefill="never")
    assert pick(fleet, wanted, never)[0] == "p0"


def test_the_reason_names_workers_tokens_and_terms() -> None:
    fleet = two_and_two()
    placement = cheapest(fleet, query(fleet, 1000, p1=800))
    assert "prefill on p1 (800 of 1000 tokens cached)" in placement.reason
    assert "\n" not in placement.reason
    assert placement.num_uncached_tokens == 200


@settings(max_examples=50, deadline=None)
@given(
    num_tokens=st.integers(1, 4000),
    cached=st.lists(st.integers(0, 4000), min_size=4, max_size=4),
    queued=st.lists(st.integers(0, 9000), min_size=4, max_size=4),
)
def test_the_choice_is_the_cheapest_candidate_and_its_terms_add_up(
    num_tokens: int, cached: list[int], queued: list[int]
) -> None:
    fleet = two_and_two()
    names = ("p0", "p1", "d0", "d1")
    for name, tokens in zip(names, queued):
        entry = entry_of(fleet, name)
        fleet.report(entry, ReportedLoad(num_queued_tokens=tokens))
    held = {name: min(count, num_tokens - 1) for name, count in zip(names, cached)}
    wanted = query(fleet, num_tokens, **held)
    chosen = choose(wanted, fleet.arrays, random.Random(0))
    everything = ranked(wanted, fleet.arrays, 100)
    assert chosen is not None
    assert len(everything) == 6
    assert chosen.cost_s <= everything[0].cost_s + 1e-9
    for candidate in everything:
        assert abs(sum(candidate.terms_s.values()) - candidate.cost_s) < 1e-9


def reports(fleet: Fleet, worker_id: str, **figures: float) -> None:
    entry = entry_of(fleet, worker_id)
    fleet.report(entry, dataclasses.replace(ReportedLoad(), **figures))  # type: ignore[arg-type]


def test_a_worker_that_was_never_measured_counts_as_the_best_of_its_class() -> None:
    """Else nothing would go to a new one: its default may be far below what the others do."""
    fleet = two_and_two()
    reports(fleet, "p0", prefill_tokens_per_s=90_000.0)
    reports(fleet, "d0", decode_step_s=0.001)
    rng, policy = random.Random(1), dataclasses.replace(POLICY, local_prefill="never")
    wanted = dataclasses.replace(query(fleet, 4000), policy=policy)
    chosen = [choose(wanted, fleet.arrays, rng) for _ in range(64)]
    pairs = {
        (placement.prefill_worker, placement.decode_worker) for placement in chosen if placement
    }
    assert pairs >= {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")}


def test_a_worker_that_looked_slow_once_is_tried_again_when_its_measure_is_old() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    for name, rate, step_s in (("0", 10_000.0, 0.005), ("1", 380.0, 0.1)):
        reports(fleet, f"p{name}", prefill_tokens_per_s=rate)
        reports(fleet, f"d{name}", decode_step_s=step_s)

    def chosen(explores: bool) -> set[str]:
        wanted = query(fleet, 1000, explores=explores, now_s=clock.now_s())
        rng, names = random.Random(1), set()
        for _ in range(64):
            placement = choose(wanted, fleet.arrays, rng)
            assert placement is not None
            names |= {placement.prefill_worker, placement.decode_worker}
        return names

    assert chosen(True) == {"p0", "d0"}
    clock.advance(POLICY.trust_rates_s + 1)
    reports(fleet, "p1", prefill_tokens_per_s=380.0)  # reported again, but not measured again
    assert chosen(False) == {"p0", "d0"}
    assert chosen(True) == {"p0", "d0", "p1", "d1"}
    reports(fleet, "p1", prefill_tokens_per_s=381.0)
    reports(fleet, "d1", decode_step_s=0.11)
    assert chosen(True) == {"p0", "d0"}


def test_patience_goes_by_a_worker_s_own_measure_also_where_it_is_not_trusted() -> None:
    fleet = two_and_two()
    reports(fleet, "p0", prefill_tokens_per_s=10_000.0)
    reports(fleet, "p1", prefill_tokens_per_s=100.0)
    now_s = 100.0 + POLICY.trust_rates_s + 1
    wanted = query(fleet, 6000, explores=True, now_s=now_s)
    policy = dataclasses.replace(POLICY, local_prefill="never")
    for placement in ranked(dataclasses.replace(wanted, policy=policy), fleet.arrays, 4):
        assert placement.prefill_s == 0.6
        entry = entry_of(fleet, placement.prefill_worker)
        expected_s = 60.0 if placement.prefill_worker == "p1" else 0.6
        assert placement.first_token_s(fleet.prefill_tokens_per_s(entry)) == expected_s


def test_a_booking_is_felt_at_once_and_released_exactly_once() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    placement = cheapest(fleet, query(fleet, 1000))
    booking = fleet.book(*placement.load(16))
    slot = placement.prefill_slot
    assert slot is not None

    def queue_s() -> float:
        return float(queue.of(fleet.arrays, query(fleet, 1, now_s=clock.now_s()))[slot])

    assert queue_s() == 0.5
    clock.advance(0.3)  # the prompt at the head of the queue has made progress since
    assert abs(queue_s() - 0.2) < 1e-9
    fleet.check_integrity()
    fleet.release_prefill(booking)
    fleet.release_prefill(booking)
    assert queue_s() == 0
    assert fleet.arrays.running[placement.decode_slot] == 1
    fleet.release(booking)
    assert fleet.arrays.running[placement.decode_slot] == 0
    assert fleet.num_bookings == 0
    fleet.check_integrity()


def test_a_booking_on_a_worker_that_left_touches_nobody_in_its_row() -> None:
    fleet = two_and_two()
    placement = cheapest(fleet, query(fleet, 1000))
    booking = fleet.book(*placement.load(16))
    fleet.remove(booking.decode)
    fleet.remove(booking.prefill)
    newcomers = [fleet.add(facts("p9", True, False)), fleet.add(facts("d9", False, True))]
    assert {e.slot for e in newcomers} == {booking.decode.slot, booking.prefill.slot}
    fleet.release(booking)
    assert all(fleet.arrays.running[e.slot] == 0 for e in newcomers)
    assert all(fleet.arrays.queued_tokens[e.slot] == 0 for e in newcomers)
    fleet.check_integrity()


def test_no_more_than_a_third_of_a_pool_is_ejected_at_once() -> None:
    fleet = fleet_of(*(facts(f"d{n}", False, True) for n in range(6)))
    for n in range(6):
        entry = entry_of(fleet, f"d{n}")
        fleet.eject(entry, 5.0)
    assert int((fleet.arrays.hold_until_s > 100.0).sum()) == 2


def held_after(fleet: Fleet, *failing: str) -> set[str]:
    """Who is held once these workers have failed, one after the other."""
    for worker_id in failing:
        entry = entry_of(fleet, worker_id)
        fleet.eject(entry, 5.0)
    holds = fleet.arrays.hold_until_s
    return {entry.facts.worker_id for entry in fleet if holds[entry.slot] > 100.0}


def test_the_only_worker_of_a_pool_is_never_ejected_and_pools_do_not_count_together() -> None:
    lone = fleet_of(facts("d0", False, True), facts("p0", True, False), facts("p1", True, False))
    assert held_after(lone, "d0") == set()
    assert held_after(lone, "p0") == {"p0"}


def test_one_of_two_workers_is_ejected_while_the_other_serves() -> None:
    assert held_after(two_and_two(), "d0") == {"d0"}
    assert held_after(two_and_two(), "d0", "d0") == {"d0"}


def test_when_both_of_two_workers_fail_both_serve_until_one_fails_again() -> None:
    fleet = two_and_two()
    assert held_after(fleet, "d0", "d1") == set()
    assert held_after(fleet, "d1") == {"d1"}


def test_a_worker_held_for_want_of_room_is_not_let_go_by_another_s_failure() -> None:
    fleet = two_and_two()
    full = entry_of(fleet, "d0")
    fleet.hold(full, 9.0)
    assert held_after(fleet, "d1") == {"d0"}


def test_a_worker_that_fails_while_it_is_held_does_not_count_twice() -> None:
    fleet = fleet_of(*(facts(f"d{n}", False, True) for n in range(6)))
    assert held_after(fleet, "d0", "d0", "d1", "d1", "d2") == {"d0", "d1"}


def test_a_report_of_a_moment_ago_does_not_count_what_has_ended_since() -> None:
    clock = ManualClock(100.0)
    fleet = two_and_two(clock)
    prefill, decode = entry_of(fleet, "p0"), entry_of(fleet, "d0")
    placement = cheapest(fleet, query(fleet, 1000, p0=1, d0=1))
    assert (placement.prefill_slot, placement.decode_slot) == (prefill.slot, decode.slot)
    bookings = [fleet.book(*placement.load(16)) for _ in range(32)]
    for booking in bookings[1:]:
        fleet.release(booking)
    clock.advance(1.3)
    fleet.report(decode, ReportedLoad(num_requests=35))  # three are another router's
    fleet.report(prefill, ReportedLoad(num_queued_tokens=32 * 999 + 500))
    assert fleet.arrays.running[decode.slot] == 1 + 3
    assert fleet.arrays.queued_tokens[prefill.slot] == 999 + 500
    clock.advance(1.0)
    fleet.report(decode, ReportedLoad(num_requests=35))  # and now they are others', all but one
    fleet.report(prefill, ReportedLoad(num_queued_tokens=32 * 999 + 500))
    assert fleet.arrays.running[decode.slot] == 35
    assert fleet.arrays.queued_tokens[prefill.slot] == 32 * 999 + 500
    fleet.release(bookings[0])
    fleet.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=40))
def test_a_recent_peak_is_the_highest_value_within_its_window(
    steps: list[tuple[int, int]],
) -> None:
    peak, now_s, value = RecentPeak(5.0), 0, 0
    held_until: list[tuple[int, int]] = []
    for following, wait_s in steps:
        now_s += wait_s
        if following < value:
            peak.falls(value, now_s)
            held_until.append((now_s, value))
        value = following
        within = [held for until_s, held in held_until if until_s >= now_s - 5]
        assert peak.over(value, now_s) == max([value, *within])
