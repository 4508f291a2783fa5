"""Sessions and the request log: every token exactly once, and how sessions end."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.finish_reason import FinishReason
from baton.fleet import Role
from baton.link.frames import LinkError
from baton.v1 import worker_pb2
from decode_worker.request_log import (
    NotHereError,
    Record,
    RequestLog,
    StaleAttemptError,
    Submission,
)
from decode_worker.session import Admitted, Refusal, Rejected, RouterSession, Update
from engine.api import Engine
from engine.request import RequestId, RequestSpec, SampledToken, SamplingParams, TokenLogprobs
from tests.cluster.conftest import Oracle, make_spec, running_worker, until
from tests.decode_worker.links import linked
from tests.link_stub import LinkStub


def submission(
    request_id: str = "r", attempt: int = 1, emitted: int = 0, logprobs: int | None = None
) -> Submission:
    spec = RequestSpec(
        RequestId(f"{request_id}#{attempt}"),
        np.arange(100, 110 + emitted, dtype=np.uint32),
        10,
        SamplingParams(logprobs=logprobs),
    )
    return Submission(spec, request_id, attempt, "tenant", b"digest", b"kind", None, b"wire")


def make_log(max_finished_bytes: int = 1 << 20) -> RequestLog:
    return RequestLog(finished_ttl_s=30.0, max_finished=3, max_finished_bytes=max_finished_bytes)


def find(log: RequestLog, request_id: str) -> Record | None:
    try:
        return log.find_for(request_id, "tenant", b"", None, None)
    except NotHereError:
        return None


async def take(session: RouterSession) -> Update:
    session.flush()
    return await anext(session.updates())


def test_a_record_begins_with_what_earlier_attempts_emitted() -> None:
    record = make_log().open(submission(attempt=2, emitted=3))
    assert record.since(0).token_ids == (110, 111, 112)
    record.append(3, SampledToken(7))
    assert record.since(2).token_ids == (112, 7)
    with pytest.raises(AssertionError):
        record.append(3, SampledToken(8))


def test_a_record_begins_with_the_logprobs_that_earlier_attempts_sent() -> None:
    known = (TokenLogprobs(-0.5, 1), None, TokenLogprobs(-2.0, 3, ((4, -0.25),)))
    sent = dataclasses.replace(submission(attempt=2, emitted=3, logprobs=1), emitted_logprobs=known)
    assert make_log().open(sent).since(0).logprobs == known


def test_logprobs_stay_aligned_with_tokens_that_have_none_here() -> None:
    record = make_log().open(submission(attempt=2, emitted=1, logprobs=0))
    logprobs = TokenLogprobs(-0.5, 1)
    record.append(1, SampledToken(7, logprobs))
    assert record.since(0).logprobs == (None, logprobs)


def test_ended_requests_are_forgotten_by_age_and_by_number() -> None:
    log = make_log()
    for number in range(5):
        record = log.open(submission(f"r{number}"))
        log.finish(record, FinishReason.STOP, "", now_s=float(number))
    assert [find(log, f"r{n}") is not None for n in range(5)] == [False, False, True, True, True]
    log.expire(now_s=33.5)
    assert [find(log, f"r{n}") is not None for n in range(5)] == [False] * 4 + [True]
    running = log.open(submission("running"))
    log.expire(now_s=1e9)
    assert find(log, "running") is running
    assert len(log) == 1


def test_ended_requests_are_forgotten_by_their_bytes() -> None:
    log = make_log(max_finished_bytes=1000)
    for number, num_emitted in enumerate((1, 10, 10, 100)):
        record = log.open(submission(f"r{number}", emitted=num_emitted))
        log.finish(record, FinishReason.STOP, "", now_s=0.0)
        kept = [n for n in range(4) if find(log, f"r{n}") is not None]
        assert kept == [[0], [0, 1], [1, 2], []][number]


def test_an_attempt_that_left_no_record_is_still_remembered_for_a_while() -> None:
    log = make_log()
    log.use_up(submission(attempt=4), now_s=0.0)
    log.expire(now_s=29.0)
    with pytest.raises(StaleAttemptError):
        log.check_new(submission(attempt=4))
    log.check_new(submission(attempt=5))
    log.expire(now_s=31.0)
    log.check_new(submission(attempt=4))


def test_attempts_that_left_no_record_are_remembered_up_to_a_number_without_their_prompts() -> None:
    log = make_log()
    used = [submission(f"r{number}") for number in range(5)]
    prompts = [weakref.ref(one) for one in used]
    for one in used:
        log.use_up(one, now_s=0.0)
    for one in used[2:]:
        with pytest.raises(StaleAttemptError):
            log.check_new(one)
    for one in used[:2]:
        log.check_new(one)
    del used, one
    assert not any(prompt() for prompt in prompts)


def test_a_replaced_attempt_that_ends_late_does_not_touch_the_newer_one() -> None:
    log = make_log()
    older = log.open(submission(attempt=1))
    newer = log.open(submission(attempt=2))
    log.finish(older, FinishReason.ABORTED, "", now_s=0.0)
    log.expire(now_s=1e9)
    assert find(log, "r") is newer


@given(st.lists(st.sampled_from(["token", "read", "attach"]), max_size=60))
def test_whatever_the_pace_every_token_comes_exactly_once_and_in_order(steps: list[str]) -> None:
    async def check() -> None:
        record = make_log().open(submission(emitted=2))
        session = RouterSession("router")
        session.follow(record, sent=2)
        seen = list(record.since(0).token_ids)
        for step in steps:
            if step == "token":
                record.append(len(record.token_ids), SampledToken(len(record.token_ids)))
                session.changed(record)
            elif step == "attach":
                session = RouterSession("router")
                seen = list(record.token_ids)
                session.follow(record, sent=len(seen))
            elif len(record.token_ids) > len(seen):
                (run,) = (await take(session)).tokens
                assert run.index == len(seen)
                seen += run.token_ids
        record.finished = FinishReason.LENGTH
        session.changed(record)
        (run,) = (await take(session)).tokens
        assert [*seen, *run.token_ids] == record.token_ids
        assert run.finished is FinishReason.LENGTH

    asyncio.run(check())


async def test_a_slow_reader_gets_one_message_for_many_steps() -> None:
    session = RouterSession("router")
    log = make_log()
    records = [log.open(submission(f"r{n}")) for n in range(3)]
    for record in records:
        session.follow(record, sent=0)
    for index in range(100):
        for record in records:
            record.append(index, SampledToken(index))
            session.changed(record)
        session.flush()
    session.notice(Admitted("r0", 1))
    session.notice(Rejected("r9", 1, Refusal.DRAINING, "draining"))
    update = await take(session)
    assert [len(run.token_ids) for run in update.tokens] == [100, 100, 100]
    assert [type(notice) for notice in update.notices] == [Admitted, Rejected]


async def test_the_first_token_that_the_writer_sent_is_not_sent_again() -> None:
    session = RouterSession("router")
    record = make_log().open(submission(emitted=2))
    session.follow(record, sent=3)
    record.append(2, SampledToken(7))
    session.changed(record)
    record.append(3, SampledToken(8))
    session.changed(record)
    (run,) = (await take(session)).tokens
    assert (run.index, run.token_ids) == (3, (8,))


async def test_nothing_more_is_sent_about_a_dropped_request_and_a_closed_session_ends() -> None:
    session = RouterSession("router")
    record = make_log().open(submission())
    session.follow(record, sent=0)
    record.append(0, SampledToken(7))
    session.changed(record)
    session.drop("r")
    session.notice(Admitted("other", 1))
    assert (await take(session)).tokens == ()
    session.close()
    assert [update async for update in session.updates()] == []


async def test_news_of_a_former_attempt_is_not_sent_in_the_next_ones_name() -> None:
    log, session = make_log(), RouterSession("router")
    former = log.open(submission(attempt=1))
    session.follow(former, sent=0)
    log.finish(former, FinishReason.ABORTED, "", now_s=0.0)
    session.changed(former)
    latter = log.open(submission(attempt=2))
    session.follow(latter, sent=0)
    session.notice(Admitted("other", 1))
    assert (await take(session)).tokens == ()
    latter.append(0, SampledToken(7))
    session.changed(latter)
    (run,) = (await take(session)).tokens
    assert (run.attempt, run.token_ids) == (2, (7,))


async def test_a_session_that_does_not_name_its_router_is_ended_by_a_typed_error() -> None:
    async with running_worker("decode-0", Role.DECODE) as worker:
        stub = LinkStub(worker.address)
        call = stub.session()
        await call.write(worker_pb2.SessionRequest())
        with pytest.raises(LinkError, match="a session begins with `open`") as caught:
            await asyncio.wait_for(call.read(), 10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await stub.close()
        async with linked(worker) as link:
            spec = make_spec("good")
            await link.reserve(spec)
            await link.until(lambda: link.of("good").finished)
            assert link.of("good").in_order() == Oracle().tokens(spec)


async def test_a_worker_whose_engine_has_stopped_takes_nothing_more_and_blames_no_request() -> None:
    def fail(_: Engine) -> None:
        raise RuntimeError("the device is gone")

    async def ask_after_the_failure() -> None:
        async with running_worker("decode-0", Role.DECODE) as worker, linked(worker) as link:
            await until(lambda: worker.decode._sessions)  # opening it sends no answer
            worker.engine.post(fail)
            await link.reserve(make_spec("x"))
            await link.until(lambda: link.of("x").rejected)
            rejections.append(link.of("x").rejected)

    rejections: list[worker_pb2.Rejected | None] = []
    with pytest.raises(RuntimeError, match="the device is gone"):
        await ask_after_the_failure()
    assert [rejected and rejected.reason for rejected in rejections] == [
        worker_pb2.REJECT_REASON_DRAINING
    ]
