"""Two sets of weights in one cohort: a stream is its model's, and goes on wherever that runs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from baton.errors import InvalidRequestError, NotResumableError, UnavailableError
from router.admission import SCAN_AHEAD, Admission
from router.fleet import Fleet, ReportedLoad
from router.resume import Origin, origin_of
from router.stopped_pools import PoolReport
from router.text import TextModel
from router.ticket import Ticket
from router.validate import ParsedRequest, RequestLimits, parse_generate
from router.worker_facts import ModelIds, WorkerFacts
from tests.router.deployment import ask_for
from tests.router.scripted_worker import MODEL
from tests.router.test_admission import admission_of, prompt, rounds
from tests.router.test_placement import POLICY, Clock, facts, fleet_of

ONE, OTHER = b"one", b"other"


def pair(name: str, kv: bytes, model: bytes, block_size: int = 16) -> list[WorkerFacts]:
    """A prefill and a decode worker."""
    roles = (("p", True, False), ("d", False, True))
    made = (facts(f"{kind}-{name}", *role, kv_fingerprint=kv) for kind, *role in roles)
    return [
        dataclasses.replace(each, model_fingerprint=model, block_size=block_size) for each in made
    ]


def two_models(clock: Clock) -> Fleet:
    return fleet_of(*pair("one", b"kv1", ONE), *pair("other", b"kv2", OTHER), clock=clock)


def bound_to(admission: Admission, *model_ids: bytes) -> Ticket:
    ticket = admission.ticket(prompt(10), 4)
    ticket.cohort, ticket.is_bound, ticket.model_ids = "", True, frozenset(model_ids)
    return ticket


async def where(admission: Admission, fleet: Fleet, ticket: Ticket) -> str:
    """The decode worker that a request is placed on."""
    placed = await admission.place(ticket)
    fleet.release(placed.booking)
    assert placed.booking.prefill.facts.kv_class == placed.booking.decode.facts.kv_class
    return placed.placement.decode_worker


def leave(fleet: Fleet, *names: str) -> None:
    for name in names:
        worker = fleet.get(name)
        assert worker is not None
        fleet.remove(worker)


# --- the line -------------------------------------------------------------------------------------


async def test_a_stream_goes_on_with_its_own_model_however_busy_that_is() -> None:
    clock = Clock()
    fleet = two_models(clock)
    busy = fleet.get("p-one")
    assert busy is not None
    fleet.report(busy, ReportedLoad(num_queued_tokens=500))
    admission = admission_of(fleet, clock)
    assert await where(admission, fleet, admission.ticket(prompt(10), 4)) == "d-other"
    for _ in range(5):
        assert await where(admission, fleet, bound_to(admission, b"kv1", ONE)) == "d-one"
    fleet.check_integrity()


async def test_without_a_worker_of_its_model_a_stream_is_told_so_after_its_wait() -> None:
    clock = Clock()
    fleet = two_models(clock)
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    leave(fleet, "p-one", "d-one")
    fleet.set_pools([PoolReport("all", True, True, 1, 1)])
    placing = asyncio.create_task(admission.place(bound_to(admission, b"kv1", ONE)))
    await rounds(admission, clock, 9.0)
    assert not placing.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(NotResumableError, match="the model that its tokens come from"):
        await placing


@pytest.mark.parametrize(
    ("kv", "model", "block_size"),
    [
        (b"kv1", ONE, 16),
        (b"kv3", ONE, 32),  # its KV is computed anew there
        (b"kv1", b"", 16),  # a worker that tells no model
    ],
)
async def test_a_stream_goes_on_wherever_the_same_weights_are(
    kv: bytes, model: bytes, block_size: int
) -> None:
    clock = Clock()
    fleet = two_models(clock)
    facts_of_one = fleet.get("d-one")
    assert facts_of_one is not None
    model_ids = fleet.kinds.model_ids(facts_of_one.facts)
    leave(fleet, "p-one", "d-one")
    back = fleet_of(*pair("other", b"kv2", OTHER), *pair("new", kv, model, block_size), clock=clock)
    admission = admission_of(back, clock)
    assert await where(admission, back, bound_to(admission, *model_ids)) == "d-new"


async def test_a_worker_that_tells_no_model_runs_that_of_those_it_exchanges_kv_with() -> None:
    clock = Clock()
    fleet = fleet_of(*pair("old", b"kv1", b""), *pair("new", b"kv1", ONE), clock=clock)
    fleet.add(dataclasses.replace(pair("far", b"kv3", ONE, 32)[0]))
    old = fleet.get("d-old")
    assert old is not None
    assert fleet.kinds.model_ids(old.facts) == {b"kv1", ONE}
    leave(fleet, "p-new", "d-new")
    admission = admission_of(fleet, clock)
    assert await where(admission, fleet, bound_to(admission, b"kv3", ONE)) == "d-old"


async def test_what_waits_for_its_model_keeps_no_other_s_workers() -> None:
    clock = Clock()
    fleet = two_models(clock)
    full = fleet.get("d-one")
    assert full is not None
    fleet.report(full, ReportedLoad(num_requests=1000))
    admission = admission_of(fleet, clock, max_bypass_s=0.0)
    waiting = asyncio.create_task(admission.place(bound_to(admission, b"kv1", ONE)))
    await rounds(admission, clock, 1.0)
    assert await where(admission, fleet, bound_to(admission, b"kv2", OTHER)) == "d-other"
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])


@pytest.mark.parametrize("max_bypass_s", [0.0, 60.0])
@pytest.mark.parametrize("is_full", [True, False], ids=["no place", "no memory"])
async def test_however_many_wait_for_one_model_the_other_s_workers_do_not_idle(
    is_full: bool, max_bypass_s: float
) -> None:
    clock = Clock()
    fleet = two_models(clock)
    worker = fleet.get("d-one")
    assert worker is not None
    quarantined = worker.facts.num_blocks - 2  # two are left: the prompt fits, not beside another
    load = ReportedLoad(num_requests=1000)
    if not is_full:
        load = ReportedLoad(num_requests=1, num_quarantined_blocks=quarantined)
    fleet.report(worker, load)
    admission = admission_of(fleet, clock, max_bypass_s=max_bypass_s)
    mine = [bound_to(admission, b"kv1", ONE) for _ in range(SCAN_AHEAD + 8)]
    for ticket in mine:
        ticket.max_new_tokens = 100
    waiting = [asyncio.create_task(admission.place(ticket)) for ticket in mine]
    await rounds(admission, clock, 1.0)
    behind = [admission.ticket(prompt(10), 4), bound_to(admission, b"kv2", OTHER)]
    placing = [asyncio.create_task(where(admission, fleet, ticket)) for ticket in behind]
    await rounds(admission, clock, 1.0)
    assert [task.done() and task.result() for task in placing] == ["d-other", "d-other"]
    assert not any(task.done() for task in waiting)
    for task in (*waiting, *placing):
        task.cancel()
    await asyncio.wait([*waiting, *placing])


@pytest.mark.parametrize("num_in_front", [8, SCAN_AHEAD + 8])
async def test_whoever_may_use_any_model_overtakes_none_of_those_who_wait_for_one(
    num_in_front: int,
) -> None:
    """However many in front are too large for what room there is."""
    clock = Clock()
    fleet = two_models(clock)
    one, other = fleet.get("d-one"), fleet.get("d-other")
    assert one is not None
    assert other is not None
    quarantined = one.facts.num_blocks - 8
    fleet.report(one, ReportedLoad(num_requests=1, num_quarantined_blocks=quarantined))
    fleet.report(other, ReportedLoad(num_requests=1000))
    admission = admission_of(fleet, clock, max_bypass_s=60.0)
    in_front = [bound_to(admission, b"kv1", ONE) for _ in range(num_in_front)]
    for ticket in in_front:
        ticket.max_new_tokens = 5000
    waiting = [asyncio.create_task(admission.place(ticket)) for ticket in in_front]
    await rounds(admission, clock, 0.5)
    order: list[str] = []

    async def one_of(name: str, ticket: Ticket) -> None:
        await admission.place(ticket)
        order.append(name)

    behind = {"bound": bound_to(admission, b"kv1", ONE), "free": admission.ticket(prompt(10), 4)}
    placing = [asyncio.create_task(one_of(*each)) for each in behind.items()]
    await rounds(admission, clock, 1.0)
    assert order == ([] if num_in_front > SCAN_AHEAD else ["bound", "free"])
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await rounds(admission, clock, 1.0)
    assert order == ["bound", "free"]
    await asyncio.wait(placing)


async def test_of_those_who_may_use_one_worker_whoever_came_first_goes_first() -> None:
    clock = Clock()
    fleet = two_models(clock)
    leave(fleet, "p-other", "d-other")
    admission = admission_of(fleet, clock)
    order: list[int] = []

    async def one(number: int, ticket: Ticket) -> None:
        await admission.place(ticket)
        order.append(number)

    tickets = [
        bound_to(admission, b"kv1", ONE) if number % 2 else admission.ticket(prompt(10), 4)
        for number in range(6)
    ]
    await asyncio.gather(*(one(number, ticket) for number, ticket in enumerate(tickets)))
    assert order == [0, 1, 2, 3, 4, 5]


# --- run again after a lost router ----------------------------------------------------------------


def resumed(text_model: TextModel, *model_ids: bytes) -> ParsedRequest:
    request = ask_for("hello", request_id="r", resume_from_index=5, model_fingerprints=model_ids)
    return parse_generate(request, text_model, RequestLimits(512, model_names=(MODEL,)))


@pytest.mark.parametrize(
    ("models", "told", "model_ids"),
    [
        ((ONE, OTHER), [ONE], {ONE}),
        ((ONE, OTHER), [], None),
        ((ONE,), [], {ONE, b"kv0"}),
        ((ONE, b""), [], {ONE, b"kv0", b"kv1"}),  # nothing says that it is another
    ],
)
def test_tokens_of_an_unknown_model_are_not_gone_on_with_where_there_are_several(
    text_model: TextModel,
    models: Sequence[bytes],
    told: Sequence[bytes],
    model_ids: ModelIds | None,
) -> None:
    members = [pair(f"w{n}", b"kv%d" % n, model) for n, model in enumerate(models)]
    fleet = fleet_of(*(each for both in members for each in both))
    if model_ids is not None:
        assert origin_of(resumed(text_model, *told), fleet) == Origin("", model_ids)
        return
    with pytest.raises(NotResumableError) as refused:
        origin_of(resumed(text_model, *told), fleet)
    assert refused.value.field == "model_fingerprints"


def test_a_model_whose_workers_have_left_is_known_for_as_long_as_a_stream_of_it_may_live(
    text_model: TextModel,
) -> None:
    clock = Clock()
    fleet = two_models(clock)
    leave(fleet, "p-one", "d-one")
    clock.now_s += POLICY.max_timeout_s
    with pytest.raises(NotResumableError) as refused:
        origin_of(resumed(text_model), fleet)
    assert refused.value.field == "model_fingerprints"
    clock.now_s += 1.0
    assert origin_of(resumed(text_model), fleet) == Origin("", frozenset({b"kv2", OTHER}))
    fleet.check_integrity()


def test_a_cohort_whose_workers_have_left_is_known_for_as_long(text_model: TextModel) -> None:
    clock = Clock()
    new = [dataclasses.replace(each, cohort="new") for each in pair("new", b"kv2", OTHER)]
    fleet = fleet_of(*pair("one", b"kv1", ONE), *new, clock=clock)
    leave(fleet, "p-one", "d-one")
    with pytest.raises(NotResumableError) as refused:
        origin_of(resumed(text_model, ONE), fleet)
    assert refused.value.field == "cohort"
    clock.now_s += POLICY.max_timeout_s + 1.0
    assert origin_of(resumed(text_model), fleet).cohort == "new"


def test_a_model_that_is_back_is_known_from_when_it_leaves_again(text_model: TextModel) -> None:
    clock = Clock()
    fleet = two_models(clock)
    leave(fleet, "p-one", "d-one")
    clock.now_s += POLICY.max_timeout_s
    for each in pair("one", b"kv1", ONE):
        fleet.add(each)
    leave(fleet, "p-one", "d-one")
    clock.now_s += POLICY.max_timeout_s
    with pytest.raises(NotResumableError):
        origin_of(resumed(text_model), fleet)


async def test_a_stream_of_the_one_model_that_was_seen_takes_no_token_of_one_that_comes(
    text_model: TextModel,
) -> None:
    clock = Clock()
    fleet = fleet_of(*pair("one", b"kv1", ONE), clock=clock)
    fleet.set_pools([PoolReport("all", True, True, 1, 1)])
    leave(fleet, "p-one", "d-one")
    origin = origin_of(resumed(text_model), fleet)
    back = fleet_of(*pair("other", b"kv2", OTHER), *pair("same", b"kv3", ONE, 32), clock=clock)
    admission = admission_of(back, clock)
    assert await where(admission, back, bound_to(admission, *origin.model_ids)) == "d-same"


@pytest.mark.parametrize("is_to_come", [True, False])
def test_a_stream_of_whose_cohort_nobody_was_seen_waits_or_has_to_tell_its_model(
    text_model: TextModel, is_to_come: bool
) -> None:
    fleet = fleet_of()
    fleet.set_pools([PoolReport("all", True, True, 1, 0 if is_to_come else 1)])
    assert origin_of(resumed(text_model, ONE), fleet) == Origin("", frozenset({ONE}))
    with pytest.raises(UnavailableError if is_to_come else NotResumableError):
        origin_of(resumed(text_model), fleet)


def test_fingerprints_are_bounded_and_make_no_other_request(text_model: TextModel) -> None:
    limits = RequestLimits(512, model_names=(MODEL,))
    plain = ask_for("hello", request_id="r", resume_from_index=5)
    told = ask_for("hello", request_id="r", resume_from_index=5, model_fingerprints=[ONE])
    first, second = (parse_generate(each, text_model, limits) for each in (plain, told))
    assert first.body_digest == second.body_digest
    assert second.model_ids == ModelIds({ONE})
    for much in ([b"x" * 65], [b"x"] * 65):
        request = ask_for("hello", model_fingerprints=much)
        with pytest.raises(InvalidRequestError) as refused:
            parse_generate(request, text_model, limits)
        assert refused.value.field == "model_fingerprints"
