"""Cohorts: how new requests are divided among them, and that nothing of one waits for another."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from baton.errors import NotResumableError, OverloadedError, UnavailableError
from router.admission import SCAN_AHEAD, Admission
from router.cohort_figures import WINDOW_S, CohortFigures
from router.cohorts import Cohorts, draw
from router.fleet import Fleet, ReportedLoad, WorkerState
from router.resume import Origin, origin_of
from router.stopped_pools import PoolReport
from router.text import TextModel
from router.ticket import Ticket
from router.validate import ParsedRequest, RequestLimits, parse_generate
from tests.router.deployment import ask_for
from tests.router.scripted_worker import MODEL
from tests.router.test_admission import admission_of, prompt, rounds
from tests.router.test_placement import Clock, facts, fleet_of

IDS = [f"tenant/request-{number}" for number in range(4000)]


def drawn(weights: Mapping[str, int]) -> list[str]:
    return [draw(wire_id, weights) for wire_id in IDS]


# --- the draw -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(99, 1), (90, 10), (50, 50), (1, 3)])
def test_requests_are_divided_by_the_weights(weights: tuple[int, int]) -> None:
    share = weights[1] / sum(weights)
    found = drawn({"old": weights[0], "new": weights[1]}).count("new") / len(IDS)
    assert abs(found - share) < 4 * (share * (1 - share) / len(IDS)) ** 0.5


def test_a_new_weight_moves_only_those_requests_that_it_is_about() -> None:
    before, after = drawn({"old": 90, "new": 10}), drawn({"old": 50, "new": 50})
    moves = Counter(zip(before, after))
    assert moves["new", "old"] == 0
    assert moves["old", "new"] > 0


def test_a_cohort_that_cannot_serve_takes_no_other_s_requests_with_it() -> None:
    all_three = drawn({"a": 30, "b": 30, "c": 40})
    without = drawn({"a": 30, "c": 40})
    assert all(now == then for then, now in zip(all_three, without) if then != "b")
    assert {now for then, now in zip(all_three, without) if then == "b"} == {"a", "c"}


def test_weights_of_nothing_make_no_outage_and_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cohorts = Cohorts()
    cohorts.update({"old": 100, "new": 0})
    caplog.set_level(logging.WARNING, "router.cohorts")
    assert {cohorts.draw(wire_id, ["old", "new"]) for wire_id in IDS[:100]} == {"old"}
    assert not caplog.records
    assert {cohorts.draw(wire_id, ["new"]) for wire_id in IDS[:100]} == {"new"}
    assert len(caplog.records) == 1
    cohorts.update({"old": 0, "new": 0})
    assert {cohorts.draw(wire_id, ["old", "new"]) for wire_id in IDS[:100]} == {"old", "new"}
    assert len(caplog.records) == 2


def test_one_cohort_needs_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    cohorts = Cohorts()
    cohorts.update({"": 0})
    assert cohorts.draw("any", [""]) == ""
    assert not caplog.records


# --- the line -------------------------------------------------------------------------------------


def pools(**weights: int) -> list[PoolReport]:
    return [
        PoolReport(f"all-{cohort}", True, True, 1, 1, cohort=cohort, cohort_weight=weight)
        for cohort, weight in weights.items()
    ]


def two_cohorts(clock: Clock, **weights: int) -> Fleet:
    """Of a prefill and a decode worker each; the KV would fit together."""
    fleet = fleet_of(
        *(facts(f"p-{cohort}", True, False, cohort=cohort) for cohort in ("old", "new")),
        *(facts(f"d-{cohort}", False, True, cohort=cohort) for cohort in ("old", "new")),
        clock=clock,
    )
    fleet.set_pools(pools(**weights))
    return fleet


def ticket_of(admission: Admission, wire_id: str) -> Ticket:
    ticket = admission.ticket(prompt(10), 4)
    ticket.wire_id = wire_id
    return ticket


def names_drawn(cohort: str, weights: Mapping[str, int], count: int) -> list[str]:
    return [wire_id for wire_id in IDS if draw(wire_id, weights) == cohort][:count]


async def where(admission: Admission, fleet: Fleet, ticket: Ticket) -> str:
    """The cohort of both workers that a request is placed on."""
    placed = await admission.place(ticket)
    fleet.release(placed.booking)
    prefill, decode = placed.booking.prefill.facts, placed.booking.decode.facts
    assert prefill.cohort == decode.cohort == placed.placement.cohort
    return decode.cohort


def leave(fleet: Fleet, cohort: str) -> None:
    for worker in fleet:
        if worker.facts.cohort == cohort:
            fleet.remove(worker)


async def test_a_request_goes_where_its_id_draws_even_where_kv_of_both_would_fit_together() -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=1, new=1)
    admission = admission_of(fleet, clock)
    for wire_id in IDS[:40]:
        found = await where(admission, fleet, ticket_of(admission, wire_id))
        assert found == draw(wire_id, {"old": 1, "new": 1})
    fleet.check_integrity()


async def test_what_waits_for_a_full_cohort_holds_up_no_request_of_another() -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=1, new=1)
    busy = fleet.get("d-old")
    assert busy is not None
    fleet.report(busy, ReportedLoad(num_requests=31))
    filled = fleet.book_running(busy, 15_990)  # a place, but no room
    admission = admission_of(fleet, clock, max_bypass_s=0.0)
    names = names_drawn("old", {"old": 1, "new": 1}, SCAN_AHEAD + 5)
    held = [asyncio.create_task(admission.place(ticket_of(admission, name))) for name in names]
    await rounds(admission, clock, 1.0)
    assert not any(task.done() for task in held)
    (name,) = names_drawn("new", {"old": 1, "new": 1}, 1)
    assert await where(admission, fleet, ticket_of(admission, name)) == "new"
    fleet.release(filled)
    await rounds(admission, clock, 0.25)
    assert [task.done() for task in held] == [True] + [False] * (len(held) - 1)
    for task in held[1:]:
        task.cancel()
    await asyncio.wait(held)
    fleet.release(held[0].result().booking)
    fleet.check_integrity()


async def in_line(fleet: Fleet, cohort: str, deadline_s: float, name: str = "late") -> bool:
    """Whether a request of that deadline is let into the line behind 900 tokens of streams, which
    are bound to `cohort`; nobody has room now."""
    clock = Clock()
    for entry in fleet:
        if entry.facts.can_prefill:
            fleet.report(entry, ReportedLoad(prefill_tokens_per_s=100.0))
    fleet.arrays.max_running[:] = 0
    admission = admission_of(fleet, clock)
    tickets = [admission.ticket(prompt(90, number * 90), 4) for number in range(10)]
    for ticket in tickets:
        ticket.cohort, ticket.is_bound = cohort, True
    late = admission.ticket(prompt(100), 4, deadline_s=clock() + deadline_s)
    late.wire_id = name
    placing = [asyncio.create_task(admission.place(ticket)) for ticket in (*tickets, late)]
    await asyncio.sleep(0)
    is_refused = placing[-1].done()
    if is_refused:
        with pytest.raises(OverloadedError, match="the first token is expected in 10"):
            await placing[-1]
    for task in placing:
        task.cancel()
    await asyncio.wait(placing)
    return not is_refused


async def test_streams_that_are_bound_to_the_only_cohort_are_ahead_of_who_has_a_deadline() -> None:
    def fleet() -> Fleet:
        p, d = facts("p", True, False, cohort="old"), facts("d", False, True, cohort="old")
        return fleet_of(p, d, clock=Clock())

    assert not await in_line(fleet(), "old", deadline_s=9.0)
    assert await in_line(fleet(), "old", deadline_s=11.0)
    assert await in_line(fleet(), "gone", deadline_s=9.0), "they wait for others' workers"


async def test_who_waits_for_another_cohort_is_ahead_of_nobody_here() -> None:
    (name,) = names_drawn("new", {"old": 1, "new": 1}, 1)
    assert await in_line(two_cohorts(Clock(), old=1, new=1), "old", 9.0, name)
    assert not await in_line(two_cohorts(Clock(), old=1, new=1), "new", 9.0, name)


async def test_weights_count_at_once_also_for_who_is_in_line() -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=0, new=1)
    full = fleet.get("d-new")
    assert full is not None
    fleet.report(full, ReportedLoad(num_requests=1000))
    admission = admission_of(fleet, clock)
    placing = asyncio.create_task(where(admission, fleet, ticket_of(admission, "any")))
    await rounds(admission, clock, 0.5)
    assert not placing.done()
    fleet.set_pools(pools(old=1, new=0))
    await rounds(admission, clock, 0.25)
    assert await placing == "old"


async def test_a_request_without_tokens_draws_again_when_its_cohort_has_gone() -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=1, new=1)
    admission = admission_of(fleet, clock)
    (name,) = names_drawn("new", {"old": 1, "new": 1}, 1)
    ticket = ticket_of(admission, name)
    assert await where(admission, fleet, ticket) == "new"
    leave(fleet, "new")
    assert await where(admission, fleet, ticket) == "old"


@pytest.mark.parametrize("stopped", [False, True])
async def test_one_with_tokens_waits_for_its_cohort_and_is_then_told_that_it_has_gone(
    stopped: bool,
) -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=1, new=1)
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    leave(fleet, "new")
    if stopped:  # what has no worker at all is held; but not a request that waits for its cohort
        leave(fleet, "old")
        fleet.set_pools([PoolReport("all-new", True, True, 0, cohort="new")])
    ticket = ticket_of(admission, "any")
    ticket.cohort, ticket.is_bound = "new", True
    placing = asyncio.create_task(admission.place(ticket))
    await rounds(admission, clock, 9.0)
    assert not placing.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(NotResumableError, match="its cohort, 'new'") as refused:
        await placing
    assert refused.value.field == "cohort"


async def test_one_with_tokens_may_come_again_while_its_cohort_s_workers_are_to_come_back() -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=1, new=1)
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    leave(fleet, "new")
    lost = PoolReport("all-new", True, True, 1, live_replicas=0, cohort="new", cohort_weight=1)
    fleet.set_pools([*pools(old=1), lost])
    ticket = ticket_of(admission, "any")
    ticket.cohort, ticket.is_bound = "new", True
    placing = asyncio.create_task(admission.place(ticket))
    await rounds(admission, clock, 11.0)
    with pytest.raises(UnavailableError, match="is live yet") as refused:
        await placing
    assert refused.value.retry_after_s > 0


async def test_one_with_tokens_goes_on_where_its_cohort_comes_back() -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=1, new=0)
    admission = admission_of(fleet, clock)
    back = fleet.get("d-new")
    assert back is not None
    fleet.set_state(back, WorkerState.SUSPECT)
    ticket = ticket_of(admission, "any")
    ticket.cohort, ticket.is_bound = "new", True
    placing = asyncio.create_task(where(admission, fleet, ticket))
    await rounds(admission, clock, 1.0)
    assert not placing.done()
    fleet.set_state(back, WorkerState.LIVE)
    await rounds(admission, clock, 0.25)
    assert await placing == "new"


async def test_the_only_workers_of_a_cohort_are_not_ejected_for_another_s_number() -> None:
    clock = Clock()
    old = [facts(f"d{number}", False, True, cohort="old") for number in range(9)]
    fleet = fleet_of(*old, facts("d-new", False, True, cohort="new"), clock=clock)
    only = fleet.get("d-new")
    assert only is not None
    fleet.eject(only, 60.0)
    assert fleet.arrays.hold_until_s[only.slot] == 0.0


async def test_candidates_of_the_cohort_that_is_drawn_come_first() -> None:
    clock = Clock()
    fleet = two_cohorts(clock, old=1, new=1)
    admission = admission_of(fleet, clock)
    slow = fleet.get("p-new")
    assert slow is not None
    fleet.report(slow, ReportedLoad(num_queued_tokens=10_000))
    for cohort in ("new", "old"):
        (name,) = names_drawn(cohort, {"old": 1, "new": 1}, 1)
        found = admission.candidates(ticket_of(admission, name), 10)
        assert [one.cohort for one in found] == [cohort, "old" if cohort == "new" else "new"]


# --- run again after a lost router ----------------------------------------------------------------


def resumed(text_model: TextModel, index: int, cohort: str | None) -> ParsedRequest:
    request = ask_for("hello", request_id="r", resume_from_index=index, cohort=cohort)
    request.model_fingerprints[:] = [b"model"]
    return parse_generate(request, text_model, RequestLimits(512, model_names=(MODEL,)))


@pytest.mark.parametrize(
    ("index", "told", "known", "found"),
    [
        (5, "new", ["old", "new"], "new"),
        (5, "new", ["old"], "new"),  # it has gone: the line says so
        (5, "", ["", "new"], ""),
        (5, None, ["old"], "old"),
        (0, "new", ["old", "new"], None),  # it may draw again
        (0, None, ["old", "new"], None),
    ],
)
def test_a_request_that_is_run_again_goes_on_in_the_cohort_of_its_tokens(
    text_model: TextModel, index: int, told: str | None, known: Sequence[str], found: str | None
) -> None:
    fleet = fleet_of()
    fleet.set_pools([PoolReport(name, True, True, 1, cohort=name) for name in known])
    origin = origin_of(resumed(text_model, index, told), fleet)
    assert origin == Origin(found, frozenset() if found is None else frozenset({b"model"}))


def test_where_no_cohort_is_known_yet_tokens_are_not_gone_on_with(text_model: TextModel) -> None:
    with pytest.raises(UnavailableError):
        origin_of(resumed(text_model, 5, None), fleet_of())


def test_tokens_of_an_unknown_cohort_are_not_gone_on_with(text_model: TextModel) -> None:
    with pytest.raises(NotResumableError, match="cohort") as refused:
        origin_of(resumed(text_model, 5, None), two_cohorts(Clock()))
    assert refused.value.field == "cohort"


# --- figures --------------------------------------------------------------------------------------


def test_each_cohort_s_figures_are_those_of_the_last_seconds() -> None:
    clock = Clock()
    figures = CohortFigures(clock)
    for second in range(30):
        clock.now_s += 1.0
        for gap_s in (0.01, 0.02, 0.03):
            figures.meter("old").saw_gap(gap_s, clock.now_s)
        figures.meter("old").ended(failed=False)
        if second == 20:
            figures.meter("new").ended(failed=True)
            figures.meter("new").ended(failed=False)
    clock.now_s += 0.5
    old, new = figures.report()
    assert (old.cohort, new.cohort) == ("old", "new")
    assert old.requests_per_s == pytest.approx(1.0, rel=0.1)
    assert old.failures_per_s == 0.0
    assert old.itl_s == pytest.approx(0.02)
    assert new.failures_per_s == pytest.approx(new.requests_per_s / 2)
    assert not new.HasField("itl_s")
    clock.now_s += WINDOW_S
    assert figures.report() == []


@pytest.mark.parametrize("pause_s", [0.3, 2.0, 12.0, 30.0])
def test_summed_over_time_each_request_counts_as_one(pause_s: float) -> None:
    clock, told_each_s, num_requests = Clock(), 0.5, 0.0
    figures = CohortFigures(clock)
    for tick in range(1200):
        if tick * told_each_s % pause_s < told_each_s:
            figures.meter("new").ended(failed=True)
        clock.now_s += told_each_s
        num_requests += sum(each.failures_per_s * told_each_s for each in figures.report())
    assert num_requests == pytest.approx(600 / max(pause_s, told_each_s), rel=0.1)
