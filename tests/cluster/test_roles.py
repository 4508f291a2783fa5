"""Both roles over real gRPC in one process: fake engine, in-memory transport."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from baton.config.workers import DecodeConfig
from baton.fleet import Role
from baton.link.frames import LinkError
from baton.v1 import common_pb2, worker_pb2
from tests.link_stub import LinkStub


async def test_a_handed_off_request_gives_the_oracles_tokens(pair: Any, kit: Any) -> None:
    for number, length in enumerate((1, 7, 8, 9, 64, 200)):
        spec = kit.make_spec(f"r{number}", length)
        assert await pair.router.generate(spec, pair.writer) == kit.oracle.tokens(spec)


async def test_local_prefill_gives_the_oracles_tokens(pair: Any, kit: Any) -> None:
    spec = kit.make_spec("local", 100)
    heard = pair.link.of("local")
    await pair.link.reserve(spec)
    await pair.link.until(lambda: heard.finished)
    assert heard.reserved is not None
    assert not heard.reserved.HasField("lease")
    assert heard.in_order() == kit.oracle.tokens(spec)
    assert heard.finished == common_pb2.FINISH_REASON_LENGTH


async def test_emitted_tokens_of_an_earlier_attempt_are_prefilled_and_the_index_goes_on(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("resumed", 50)
    expected = kit.oracle.tokens(spec)
    spec.token_ids += np.array(expected[:5], "<u4").tobytes()
    spec.attempt = 2
    heard = pair.link.of("resumed", 2)
    heard.tokens.update(enumerate(expected[:5]))
    assert await pair.router.generate(spec, pair.writer) == expected


async def test_a_second_prompt_with_the_same_prefix_moves_only_what_is_missing(
    pair: Any, kit: Any
) -> None:
    first = kit.make_spec("one", 100)
    await pair.router.generate(first, pair.writer)
    second = kit.make_spec("two", 100)
    second.token_ids = first.token_ids
    assert await pair.router.generate(second, pair.writer) == kit.oracle.tokens(second)
    assert pair.link.of("one").reserved.num_cached_tokens == 0
    assert pair.link.of("two").reserved.num_cached_tokens == 96


async def test_a_first_token_that_ends_the_request_moves_nothing_and_frees_everything(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("short", 50)
    spec.sampling.max_tokens = 1
    lease = await pair.router.reserve(spec, pair.writer)
    responses = await pair.router.hand_off(spec, lease)
    assert [r.WhichOneof("event") for r in responses] == ["first_token"]
    assert responses[0].first_token.finished == common_pb2.FINISH_REASON_LENGTH
    await pair.link.cancel("short")
    await kit.nothing_held(pair.prefill, pair.decode)


async def test_a_cancelled_prefill_call_fails_the_handoff_and_frees_both_sides(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("cut", 1500)
    lease = await pair.router.reserve(spec, pair.writer)
    call = await pair.router.prefill.prefill(worker_pb2.PrefillRequest(spec=spec, lease=lease))
    call.cancel()
    await pair.link.until(lambda: pair.link.of("cut").rejected)
    assert pair.link.of("cut").rejected.reason == worker_pb2.REJECT_REASON_HANDOFF_FAILED
    await kit.nothing_held(pair.prefill, pair.decode)


async def test_a_reservation_cancelled_before_its_prefill_is_never_served(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("early", 60)
    lease = await pair.router.reserve(spec, pair.writer)
    await pair.link.cancel("early")
    await pair.link.until(lambda: pair.link.of("early").finished)
    assert pair.link.of("early").finished == common_pb2.FINISH_REASON_ABORTED
    await kit.nothing_held(pair.prefill, pair.decode)
    with pytest.raises(LinkError) as caught:
        await pair.router.hand_off(spec, lease)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_worker_of_either_role_answers_the_fence_of_a_lease_that_names_it(
    pair: Any, kit: Any
) -> None:
    async with kit.running_worker("decode-1", Role.DECODE) as other:
        spec = kit.make_spec("misnamed", 60)
        await pair.router.reserve(spec, other.info().ref)
        await pair.link.cancel("misnamed")
        await kit.nothing_held(pair.decode, other)  # nothing stays in quarantine


async def test_a_running_request_that_is_cancelled_ends_aborted_and_frees_its_blocks(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("endless", 60)
    spec.sampling.max_tokens = 3900
    await pair.router.hand_off(spec, await pair.router.reserve(spec, pair.writer))
    heard = pair.link.of("endless")
    await pair.link.until(lambda: len(heard.tokens) > 3)
    await pair.link.cancel("endless", 0)  # an older attempt: nothing happens
    seen = len(heard.tokens)
    await pair.link.until(lambda: len(heard.tokens) > seen)
    await pair.link.cancel("endless", 1)
    await pair.link.until(lambda: heard.finished)
    assert heard.finished == common_pb2.FINISH_REASON_ABORTED
    await kit.nothing_held(pair.prefill, pair.decode)


async def test_a_newer_attempt_replaces_the_older_and_an_older_is_refused(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("again", 60, attempt=2)
    spec.sampling.max_tokens = 3000
    await pair.link.reserve(spec)
    await pair.link.until(lambda: pair.link.of("again", 2).tokens)
    older = kit.make_spec("again", 60, attempt=1)
    await pair.link.reserve(older)
    await pair.link.until(lambda: pair.link.of("again", 1).rejected)
    assert pair.link.of("again", 1).rejected.reason == worker_pb2.REJECT_REASON_STALE_ATTEMPT
    newer = kit.make_spec("again", 60, attempt=3)
    await pair.link.reserve(newer)
    await pair.link.until(lambda: pair.link.of("again", 3).finished)
    assert pair.link.of("again", 3).in_order() == kit.oracle.tokens(newer)
    assert not pair.link.of("again", 2).finished
    await kit.nothing_held(pair.decode)


async def test_another_body_under_a_known_id_and_unreadable_requests_are_refused(
    pair: Any, kit: Any
) -> None:
    await pair.link.reserve(kit.make_spec("mine", 60))
    await pair.link.until(lambda: pair.link.of("mine").finished)
    wrong = {
        "mine": {"attempt": 2, "body_digest": b"another"},
        "kind": {"kv_fingerprint": b"another"},
        "torn": {"token_ids": b"abc"},
        "long": {"num_prompt_tokens": 1000},
    }
    reasons = {}
    for request_id, changes in wrong.items():
        spec = kit.make_spec(request_id, 60)
        for name, value in changes.items():
            setattr(spec, name, value)
        await pair.link.reserve(spec)
        heard = pair.link.of(request_id, spec.attempt)
        await pair.link.until(lambda heard=heard: heard.rejected)
        reasons[request_id] = heard.rejected.reason
    invalid = worker_pb2.REJECT_REASON_INVALID
    assert reasons == {
        "mine": worker_pb2.REJECT_REASON_TAKEN,
        "kind": worker_pb2.REJECT_REASON_FINGERPRINT,
        "torn": invalid,
        "long": invalid,
    }


async def test_a_prompt_that_never_fits_is_refused_and_one_that_does_not_fit_now_may_come_again(
    pair: Any, kit: Any
) -> None:
    too_long = kit.make_spec("huge", 5000)
    await pair.link.reserve(too_long, pair.writer)
    await pair.link.until(lambda: pair.link.of("huge").rejected)
    assert pair.link.of("huge").rejected.reason == worker_pb2.REJECT_REASON_INVALID
    first = kit.make_spec("first", 3500)
    await pair.router.reserve(first, pair.writer)
    second = kit.make_spec("second", 3500)
    heard = pair.link.of("second")
    await pair.link.reserve(second, pair.writer)
    await pair.link.until(lambda: heard.rejected)
    assert heard.rejected.reason == worker_pb2.REJECT_REASON_NO_CAPACITY
    assert heard.rejected.retry_after_ms > 0
    await pair.link.cancel("first")
    await kit.nothing_held(pair.decode)
    heard.rejected = None
    assert await pair.router.generate(second, pair.writer) == kit.oracle.tokens(second)


async def test_an_orphan_runs_on_and_whoever_attaches_gets_everything_once(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("orphan", 60)
    spec.sampling.max_tokens = 1500
    await pair.router.hand_off(spec, await pair.router.reserve(spec, pair.writer))
    await pair.link.until(lambda: len(pair.link.of("orphan").tokens) > 5)
    await pair.link.close()
    other = await kit.decode_link(pair.decode.address, "router-b").open()
    ask = worker_pb2.AttachRequest(router_id="router-b", request_id="orphan", tenant="tenant")
    answer = await other.stub.attach(ask)
    assert answer.spec == spec
    assert answer.tokens.index == 0
    heard = other.of("orphan")
    heard.tokens.update(enumerate(answer.tokens.ids))
    if not answer.tokens.finished:
        await other.until(lambda: heard.finished)
    assert heard.in_order() == kit.oracle.tokens(spec)
    # Ended, it is kept a while for a router that dies right after.
    answer = await other.stub.attach(ask)
    assert list(answer.tokens.ids) == heard.in_order()
    assert answer.tokens.finished == common_pb2.FINISH_REASON_LENGTH
    for changes, code in (
        ({"tenant": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"request_id": "unheard of"}, grpc.StatusCode.NOT_FOUND),
        ({"body_digest": b"other"}, grpc.StatusCode.ALREADY_EXISTS),
        ({"seed": spec.seed + 1}, grpc.StatusCode.ALREADY_EXISTS),
        ({"router_id": "router-c"}, grpc.StatusCode.FAILED_PRECONDITION),
    ):
        wrong = worker_pb2.AttachRequest()
        wrong.CopyFrom(ask)
        for name, value in changes.items():
            setattr(wrong, name, value)
        with pytest.raises(LinkError) as caught:
            await other.stub.attach(wrong)
        assert caught.value.code() is code
    await other.close()


async def test_an_orphan_nobody_claims_is_aborted_in_time(kit: Any) -> None:
    async with kit.running_worker(
        "decode-9", Role.DECODE, decode=DecodeConfig(orphan_ttl_s=0.3)
    ) as worker:
        link = await kit.decode_link(worker.address, "router-a").open()
        spec = kit.make_spec("forgotten", 60)
        spec.sampling.max_tokens = 3900
        await link.reserve(spec)
        await link.until(lambda: link.of("forgotten").tokens)
        await link.close()
        await kit.nothing_held(worker)
        assert worker.decode.runs.num_orphans() == 0


async def test_a_deadline_ends_a_request_wherever_it_is(pair: Any, kit: Any) -> None:
    running = kit.make_spec("running", 60, timeout_ms=300)
    running.sampling.max_tokens = 3900
    await pair.link.reserve(running)
    await pair.router.reserve(kit.make_spec("leased", 60, timeout_ms=300), pair.writer)
    for request_id in ("running", "leased"):
        heard = pair.link.of(request_id)
        await pair.link.until(lambda heard=heard: heard.finished or heard.rejected)
    assert pair.link.of("running").finished == common_pb2.FINISH_REASON_ABORTED
    await kit.nothing_held(pair.decode)


async def test_kv_events_add_up_to_what_a_later_snapshot_shows(pair: Any, kit: Any) -> None:
    stub = LinkStub(pair.decode.address)
    early = await stub.follow_kv()
    held: set[bytes] = set()
    sequence = -1
    assert (await early.read()).snapshot
    for number in range(40):  # more than fits: the cache evicts
        await pair.router.generate(kit.make_spec(f"kv{number}", 200), pair.writer)
    late = await (await stub.follow_kv()).read()
    snapshot = hashes_of(late)
    assert snapshot
    sequence = 0
    removed_any = False
    async with asyncio.timeout(10):
        while held != snapshot:
            message = await early.read()
            assert message.sequence == sequence + 1
            assert not message.snapshot
            sequence += 1
            removed_any |= bool(message.removed)
            held -= set(split(message.removed))
            held |= hashes_of(message)
    assert removed_any
    await stub.close()


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 16] for i in range(0, len(hashes), 16)]


def hashes_of(message: worker_pb2.SubscribeKvResponse) -> set[bytes]:
    return {h for stored in message.stored for h in split(stored.hashes)}
