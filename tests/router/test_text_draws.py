"""The line, where cohorts have several texts: nobody is placed where another's ids are read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from baton.errors import InvalidRequestError, NotResumableError, UnavailableError
from router.admission import Admission
from router.cohort_texts import OWN, CohortTexts, TextId
from router.cohorts import Cohort
from router.fleet import Fleet, ReportedLoad
from router.ticket import OtherTextError, Size, Ticket
from tests.router.test_admission import admission_of, prompt, rounds
from tests.router.test_cohorts import (
    leave,
    names_drawn,
    pools,
    ticket_of,
    two_cohorts,
    where,
)
from tests.router.test_placement import Clock

OTHER = TextId(1)
REFUSAL = InvalidRequestError("too long", field="prompt")
EVEN: Mapping[Cohort, int] = {"old": 1, "new": 1}


def two_texts(
    clock: Clock, text: TextId | None = OTHER, weights: Mapping[Cohort, int] = EVEN
) -> Fleet:
    """The old one's is the router's own; `text`: the new one's."""
    fleet = two_cohorts(clock, **weights)
    have(fleet, text)
    return fleet


def have(fleet: Fleet, new: TextId | None) -> None:
    fleet.texts.update({"old": OWN, "new": new}, {OWN: b"one", OTHER: b"other"})


def drawn(cohort: Cohort) -> str:
    return names_drawn(cohort, EVEN, 1)[0]


def read_anew(ticket: Ticket, num_tokens: int = 12) -> None:
    ticket.other_sizes[ticket.text] = ticket.size
    ticket.text = TextId(OTHER - ticket.text)
    ticket.prompt = prompt(num_tokens)


async def test_who_draws_a_cohort_of_another_text_is_read_anew_and_goes_there() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock)
    assert await where(admission, fleet, ticket_of(admission, drawn("old"))) == "old"
    ticket = ticket_of(admission, drawn("new"))
    with pytest.raises(OtherTextError) as other:
        await admission.place(ticket)
    assert other.value.text == OTHER
    assert not len(admission)
    read_anew(ticket)
    assert await where(admission, fleet, ticket) == "new"
    assert ticket.charged == len(ticket.prompt) + ticket.max_new_tokens


async def test_the_line_sends_back_who_has_to_be_read_anew() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    full = fleet.get("d-old")
    assert full is not None
    fleet.report(full, ReportedLoad(num_requests=1000))
    admission = admission_of(fleet, clock)
    ticket = ticket_of(admission, drawn("old"))
    placing = asyncio.create_task(admission.place(ticket))
    await rounds(admission, clock, 0.5)
    assert not placing.done()
    leave(fleet, "old")
    await rounds(admission, clock, 0.25)
    with pytest.raises(OtherTextError):
        await placing
    read_anew(ticket)
    assert await where(admission, fleet, ticket) == "new"


async def test_token_ids_draw_among_cohorts_of_their_tokenizer_alone() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock)
    for name in names_drawn("new", EVEN, 10):
        ticket = ticket_of(admission, name)
        ticket.is_of_ids = True
        assert await where(admission, fleet, ticket) == "old"
    fleet.texts.update({"old": OWN, "new": OTHER, "third": None}, {OWN: b"one", OTHER: b"one"})
    with pytest.raises(OtherTextError):  # the same tokenizer, but other ends or defaults
        await admission.place(ticket)


async def test_who_is_refused_by_a_text_goes_where_it_is_not() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock)
    ticket = ticket_of(admission, drawn("new"))
    ticket.refusals[OTHER] = REFUSAL
    assert await where(admission, fleet, ticket) == "old"


@pytest.mark.parametrize("is_in_line", [False, True])
async def test_who_is_refused_by_the_text_of_every_cohort_that_is_left_is_told_so_at_once(
    is_in_line: bool,
) -> None:
    clock = Clock()
    fleet = two_texts(clock)
    leave(fleet, "old")
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    ticket = ticket_of(admission, "any")
    ticket.refusals[OTHER] = REFUSAL
    waiting = None
    if is_in_line:
        waiting = asyncio.create_task(admission.place(ticket))
        await rounds(admission, clock, 5.0)
        assert not waiting.done(), "the old one's workers may yet come"
    fleet.set_pools(pools(new=1))
    if waiting is not None:
        await rounds(admission, clock, 0.5)
    with pytest.raises(InvalidRequestError) as refused:
        await (waiting or admission.place(ticket))
    assert refused.value is REFUSAL


@pytest.mark.parametrize("text", [None, OWN], ids=["not read yet", "its own"])
async def test_who_is_refused_by_a_text_waits_while_another_cohort_may_yet_serve_it(
    text: TextId | None,
) -> None:
    clock = Clock()
    fleet = two_texts(clock)
    leave(fleet, "old")
    fleet.texts.update({"old": text, "new": OTHER}, {OWN: b"one", OTHER: b"other"})
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    ticket = ticket_of(admission, "any")
    ticket.refusals[OTHER] = REFUSAL
    waiting = asyncio.create_task(admission.place(ticket))
    await rounds(admission, clock, 9.0)
    assert not waiting.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(UnavailableError):
        await waiting


async def test_token_ids_that_every_model_of_their_tokenizer_refuses_wait_for_no_other() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    leave(fleet, "old")
    fleet.set_pools(pools(new=1, third=1))
    vocabularies = {OWN: b"one", OTHER: b"one", TextId(2): b"other"}
    fleet.texts.update({"new": OTHER, "third": TextId(2)}, vocabularies)
    admission = admission_of(fleet, clock)
    ticket = ticket_of(admission, "any")
    ticket.is_of_ids = True
    ticket.refusals[OTHER] = REFUSAL
    with pytest.raises(InvalidRequestError):
        await admission.place(ticket)


async def test_what_is_too_long_in_another_text_is_not_sent_back_for_it_again() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock)
    ticket = ticket_of(admission, drawn("new"))
    ticket.other_sizes[OTHER] = Size(1 << 29, 1 << 29)
    assert await where(admission, fleet, ticket) == "old"


async def test_a_cohort_without_text_gets_nothing_and_who_waits_is_told_why() -> None:
    clock = Clock()
    fleet = two_texts(clock, None, {"old": 0, "new": 100})
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    assert await where(admission, fleet, ticket_of(admission, drawn("new"))) == "old"
    leave(fleet, "old")
    waiting = asyncio.create_task(admission.place(ticket_of(admission, "any")))
    await rounds(admission, clock, 9.0)
    assert not waiting.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(UnavailableError, match="has not read the text"):
        await waiting


async def test_who_waits_for_a_text_is_read_with_it_as_soon_as_it_is_there() -> None:
    clock = Clock()
    fleet = two_texts(clock, None)
    leave(fleet, "old")
    admission = admission_of(fleet, clock)
    ticket = ticket_of(admission, "any")
    waiting = asyncio.create_task(admission.place(ticket))
    await rounds(admission, clock, 1.0)
    assert not waiting.done()
    have(fleet, OTHER)
    await rounds(admission, clock, 0.25)
    with pytest.raises(OtherTextError):
        await waiting


async def test_a_stream_that_has_begun_stays_with_its_model_whatever_is_read_since() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock)
    ticket = ticket_of(admission, "any")
    ticket.cohort, ticket.is_bound, ticket.text = "new", True, OTHER
    ticket.prompt.extend_to([5])
    have(fleet, None)
    assert await where(admission, fleet, ticket) == "new"


def bound(admission: Admission) -> Ticket:
    """To the new one's cohort by tokens that another router has put out."""
    ticket = ticket_of(admission, "any")
    ticket.cohort, ticket.is_bound = "new", True
    return ticket


async def test_a_stream_that_another_router_began_is_read_as_its_cohort_is() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock)
    ticket = bound(admission)
    ticket.is_of_ids = True
    with pytest.raises(OtherTextError):
        await admission.place(ticket)
    read_anew(ticket)
    assert await where(admission, fleet, ticket) == "new"


async def test_a_stream_that_another_router_began_waits_for_its_text_and_comes_again() -> None:
    clock = Clock()
    fleet = two_texts(clock, None)
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    waiting = asyncio.create_task(admission.place(bound(admission)))
    await rounds(admission, clock, 9.0)
    assert not waiting.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(UnavailableError, match="has not read the text"):
        await waiting


async def test_a_stream_that_its_own_cohort_s_text_refuses_is_told_so() -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock)
    ticket = bound(admission)
    ticket.refusals[OTHER] = REFUSAL
    with pytest.raises(InvalidRequestError):
        await admission.place(ticket)


@pytest.mark.parametrize("tokens", [[5], []], ids=["put out here", "of another router"])
async def test_a_stream_whose_cohort_is_forgotten_is_ended_by_nothing_that_another_text_refuses(
    tokens: list[int],
) -> None:
    clock = Clock()
    fleet = two_texts(clock)
    admission = admission_of(fleet, clock, fleet_wait_s=10.0)
    ticket = bound(admission)
    ticket.text = OTHER
    ticket.prompt.extend_to(tokens)
    ticket.refusals[OWN] = REFUSAL
    leave(fleet, "new")
    fleet.set_pools(pools(old=1))
    fleet.texts.update({"old": OWN}, {OWN: b"one"})
    waiting = asyncio.create_task(admission.place(ticket))
    await rounds(admission, clock, 9.0)
    assert not waiting.done()
    await rounds(admission, clock, 2.0)
    with pytest.raises(NotResumableError):
        await waiting


async def test_where_all_texts_are_one_nobody_is_sent_back() -> None:
    clock = Clock()
    fleet = two_texts(clock, OWN)
    admission = admission_of(fleet, clock)
    for cohort in EVEN:
        assert await where(admission, fleet, ticket_of(admission, drawn(cohort))) == cohort


# --- whose ids ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "main"),
    [
        ({"old": 99, "new": 1}, OWN),
        ({"old": 50, "new": 50}, OWN),
        ({"old": 40, "new": 60}, OTHER),
        ({"old": 40, "new": 30, "newer": 30}, OTHER),
        ({"old": 1, "unread": 99}, OWN),
        ({}, OWN),
    ],
)
def test_the_main_text_is_that_of_the_model_that_most_requests_go_to(
    weights: dict[str, int], main: TextId
) -> None:
    texts = CohortTexts()
    texts.update({"old": OWN, "new": OTHER, "newer": OTHER, "unread": None}, {})
    assert texts.main(weights) == main
    assert texts.unread == ["unread"]


def test_a_registry_that_tells_of_no_text_means_the_router_s_own() -> None:
    fleet = two_cohorts(Clock(), **EVEN)
    fleet.set_pools(pools(**EVEN))
    assert fleet.texts.of("old") == fleet.texts.of("new") == OWN
