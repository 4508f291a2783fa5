"""A request whose id, or whose stream, another router or another body asks for."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest

from baton.fleet import Role
from baton.link.frames import LinkError
from baton.v1 import common_pb2, worker_pb2
from cluster.worker.worker import Worker
from decode_worker.service import DecodeService
from decode_worker.session import Refusal, Rejected, Update
from tests.cluster.conftest import (
    DecodeLink,
    Oracle,
    make_spec,
    nothing_held,
    running_worker,
    until,
)
from tests.decode_worker.links import linked


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running_worker("decode-0", Role.DECODE) as worker:
        yield worker
        await nothing_held(worker)


OpenLink = Callable[[str], Awaitable[DecodeLink]]


@pytest.fixture
async def open_link(worker: Worker) -> AsyncIterator[OpenLink]:
    """Opens a router's session by its id; all are closed at the end."""
    async with contextlib.AsyncExitStack() as links:

        async def open_one(session_id: str) -> DecodeLink:
            link = await links.enter_async_context(linked(worker, session_id))
            sessions = worker.decode._sessions  # opening one sends no answer
            await until(lambda: session_id in sessions)
            return link

        yield open_one


def endless(request_id: str) -> worker_pb2.RequestSpec:
    spec = make_spec(request_id)
    spec.sampling.max_tokens = 3900
    return spec


def ask_of(link: DecodeLink) -> worker_pb2.AttachRequest:
    return worker_pb2.AttachRequest(router_id=link.router_id, request_id="x", tenant="tenant")


def refusals(update: Update) -> list[Refusal]:
    return [notice.refusal for notice in update.notices if isinstance(notice, Rejected)]


async def barrier(link: DecodeLink, name: str) -> None:
    """Everything that was sent on the link before has been seen to."""
    unreadable = make_spec(name)
    unreadable.token_ids = b"abc"
    await link.reserve(unreadable)
    await link.until(lambda: link.of(name).rejected)


async def test_a_router_whose_request_was_taken_over_hears_of_it_and_cannot_end_it(
    open_link: OpenLink,
) -> None:
    former, latter = await open_link("router-a/1"), await open_link("router-b/1")
    await former.reserve(endless("x"))
    await former.until(lambda: len(former.of("x").tokens) > 3)
    answer = await latter.stub.attach(ask_of(latter))
    await former.until(lambda: former.of("x").moved)
    await former.cancel("x")
    await barrier(former, "after the cancel")
    heard = latter.of("x")
    heard.tokens.update(enumerate(answer.tokens.ids))
    seen = len(heard.tokens)
    await latter.until(lambda: len(heard.tokens) > seen + 3)
    assert not heard.finished
    assert not former.of("x").finished
    await latter.cancel("x")
    await latter.until(lambda: heard.finished)
    assert heard.in_order() == Oracle().tokens(endless("x"))[: len(heard.tokens)]


async def test_a_router_whose_request_another_one_began_anew_hears_of_it(
    open_link: OpenLink,
) -> None:
    former, latter = await open_link("router-a/1"), await open_link("router-b/1")
    await former.reserve(endless("x"))
    await former.until(lambda: former.of("x").tokens)
    anew = make_spec("x", attempt=2)
    await latter.reserve(anew)
    await former.until(lambda: former.of("x").moved)
    await latter.until(lambda: latter.of("x", 2).finished)
    assert not former.of("x").finished
    assert latter.of("x", 2).in_order() == Oracle().tokens(anew)


async def test_logprobs_that_are_not_as_many_as_the_emitted_tokens_are_no_fault_of_the_client_s(
    worker: Worker,
) -> None:
    session = worker.decode.open_session("router-a/1")
    service = DecodeService(worker.decode)
    known = [common_pb2.Logprobs(logprob=-0.5, rank=1)] * 2
    spec = make_spec("x")
    spec.num_prompt_tokens -= 3
    # One message of a session, without the stream around it.
    service._reserve(session, worker_pb2.Reserve(spec=spec, emitted_logprobs=known))
    (rejected,) = (await anext(session.updates())).notices
    assert isinstance(rejected, Rejected)
    assert rejected.refusal is Refusal.INTERNAL
    assert "2 emitted_logprobs of 3 tokens" in rejected.message
    worker.decode.close_session(session)


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("decode_worker.service.read_spec", OverflowError("of a kind that no check knows")),
        ("decode_worker.role.DecodeRole.submit", KeyError("of ours")),
    ],
    ids=["reading it", "taking it"],
)
async def test_an_unforeseen_error_in_a_request_ends_that_request_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    session = worker.decode.open_session("router-a/1")
    service = DecodeService(worker.decode)
    with monkeypatch.context() as patched:
        patched.setattr(part, fail)
        # One message of a session, without the stream around it.
        service._reserve(session, worker_pb2.Reserve(spec=make_spec("x")))
    assert refusals(await anext(session.updates())) == [Refusal.INTERNAL]
    assert not session.closed
    worker.decode.close_session(session)


async def test_what_fails_while_a_request_is_taken_leaves_nothing_of_it(
    worker: Worker, open_link: OpenLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router gets a rejection, and may ask for the same attempt again."""

    def fail(*_: object) -> None:
        raise LookupError("of ours")

    link = await open_link("router-a/1")
    session = worker.decode._sessions[link.router_id]  # the worker's end of the link
    with monkeypatch.context() as patched:
        patched.setattr(session, "follow", fail)
        await link.reserve(make_spec("x"))
        await link.until(lambda: link.of("x").rejected)
    rejected = link.of("x").rejected
    assert rejected is not None
    assert rejected.reason == worker_pb2.REJECT_REASON_INTERNAL
    assert not worker.decode.runs  # a leak that no call shows
    await link.reserve(make_spec("x"))
    await link.until(lambda: link.of("x").finished)
    assert link.of("x").in_order() == Oracle().tokens(make_spec("x"))


async def test_a_router_ends_in_its_next_session_what_it_began_in_the_last(
    worker: Worker,
    open_link: OpenLink,
) -> None:
    lost = await open_link("router-a/1")  # of which the worker is yet to hear
    await lost.reserve(endless("x"))
    await lost.until(lambda: lost.of("x").tokens)
    following = await open_link("router-a/2")
    await following.cancel("x")
    await nothing_held(worker)


async def test_a_client_that_wants_the_request_ended_is_heard_at_any_router(
    open_link: OpenLink,
) -> None:
    link, other = await open_link("router-a/1"), await open_link("router-b/1")
    await link.reserve(endless("x"))
    await link.until(lambda: link.of("x").tokens)
    await other.cancel("x", (1 << 32) - 1)
    await link.until(lambda: link.of("x").finished)
    assert link.of("x").finished == common_pb2.FINISH_REASON_ABORTED


async def test_a_taken_id_is_refused_and_an_aborted_one_is_free_for_another_body(
    open_link: OpenLink,
) -> None:
    link = await open_link("router-a/1")
    await link.reserve(endless("x"))
    await link.until(lambda: link.of("x").tokens)
    for attempt in (1, 2):
        other = make_spec("y", attempt=attempt)
        other.request_id = "x"
        heard = link.of("x", attempt)
        await link.reserve(other)
        await link.until(lambda heard=heard: heard.rejected)  # type: ignore[misc]
        assert heard.rejected is not None
        assert heard.rejected.reason == worker_pb2.REJECT_REASON_TAKEN
    await link.cancel("x")
    await link.until(lambda: link.of("x").finished)
    again = make_spec("y", attempt=1)
    again.request_id = "x"
    link.of("x").rejected = None
    await link.reserve(again)  # what is sent about attempt 1 could still be the former request's
    await link.until(lambda: link.of("x").rejected)
    stale = link.of("x").rejected
    assert stale is not None
    assert stale.reason == worker_pb2.REJECT_REASON_STALE_ATTEMPT
    again.attempt = 5
    await link.reserve(again)
    await link.until(lambda: link.of("x", 5).finished)
    assert link.of("x", 5).in_order() == Oracle().tokens(again)


async def test_a_router_takes_nothing_back_that_another_attached_while_its_session_was_lost(
    worker: Worker,
    open_link: OpenLink,
) -> None:
    """Nor does it end it; whether or not the other's own session is lost by then."""
    assert worker.decode is not None
    runs = worker.decode.runs  # which attempt is whose, which no call shows
    lost = await open_link("router-a/1")
    await lost.reserve(endless("x"))
    await lost.until(lambda: lost.of("x").tokens)
    await lost.close()
    await until(lambda: runs.num_orphans() == 1)
    latter = await open_link("router-b/1")
    await latter.stub.attach(ask_of(latter))
    former = await open_link("router-a/2")
    its_own = ask_of(former)
    its_own.attempt = 1
    await refused_and_unheard(worker, former, its_own)
    await latter.close()
    await until(lambda: runs.num_orphans() == 1)
    await refused_and_unheard(worker, former, its_own)
    latter = await open_link("router-b/2")
    its_own.router_id = latter.router_id
    assert (await latter.stub.attach(its_own)).tokens.ids
    await latter.cancel("x")
    await latter.until(lambda: latter.of("x").finished)
    assert not former.of("x").tokens


async def refused_and_unheard(
    worker: Worker, link: DecodeLink, ask: worker_pb2.AttachRequest
) -> None:
    """The router is not given the request, and its cancel is of no account."""
    assert worker.decode is not None
    orphans = worker.decode.runs.num_orphans()
    with pytest.raises(LinkError) as caught:
        await link.stub.attach(ask)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    await link.cancel("x")
    await barrier(link, f"after the cancel with {orphans} orphans")
    assert len(worker.decode.runs) == 1  # it runs on; nothing is sent to an orphan
    assert worker.decode.runs.num_orphans() == orphans
