"""What an engine promises (`engine.api.Engine`), a function each. They raise AssertionError."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest

from baton.finish_reason import FinishReason
from engine.api import Engine
from engine.errors import InvalidRequestError, UnknownRequestError
from engine.request import (
    BlocksRemovedEvent,
    BlocksStoredEvent,
    FinishedEvent,
    HandoffId,
    NoCapacityEvent,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SampledToken,
    TokenEvent,
)
from tests.engine.conformance.tenants import GREEDY, NUM_BLOCKS, Running, Tenant, request

ENDS = (TokenEvent, FinishedEvent)


def tokens_of(running: Running, name: str) -> list[int]:
    """A request's output, once it has ended."""
    seen: dict[int, int] = {}

    def ended() -> bool:
        return any(
            isinstance(e, FinishedEvent) or e.finished is not None
            for e in running.events_of(name, *ENDS)
        )

    running.until_true(ended)
    for event in running.events_of(name, TokenEvent):
        assert event.index not in seen, f"token {event.index} came twice"
        seen[event.index] = event.token.token_id
    first = min(seen, default=0)
    assert sorted(seen) == list(range(first, first + len(seen))), "a token is missing"
    return [seen[index] for index in sorted(seen)]


def reserve(running: Running, spec: RequestSpec) -> ReservedEvent:
    running.call(lambda engine: engine.reserve(spec))
    answer = running.until(spec.request_id, ReservedEvent, NoCapacityEvent)
    assert isinstance(answer, ReservedEvent), answer
    return answer


def prefill(running: Running, spec: RequestSpec, num_cached: int = 0) -> PrefilledEvent:
    handoff = HandoffId(f"to {spec.request_id}")
    running.call(lambda engine: engine.add_prefill(spec, handoff, num_cached, b"opening"))
    event = running.until(spec.request_id, PrefilledEvent)
    assert isinstance(event, PrefilledEvent)
    return event


def admit(running: Running, name: str, first: SampledToken) -> None:
    running.call(lambda engine: engine.admit(RequestId(name), first))


def abort(running: Running, name: str) -> None:
    running.call(lambda engine: engine.abort(RequestId(name)))


def release(running: Running, name: str) -> None:
    running.call(lambda engine: engine.release(RequestId(name)))


def blocks_of(lease: ReservedEvent) -> set[tuple[int, int]]:
    return {(g, block) for g, table in enumerate(lease.block_ids) for block in table}


# --- the checks -----------------------------------------------------------------------------------


def added_requests_get_their_own_tokens(tenant: Tenant) -> None:
    specs = [request(f"r{number}", 10 + 20 * number) for number in range(4)]
    answers = [tenant.answer(spec) for spec in specs]
    with tenant.running() as (running,):
        for spec in specs:
            running.call(lambda engine, spec=spec: engine.add(spec))
        assert [tokens_of(running, spec.request_id) for spec in specs] == answers
        running.check_whole()


def a_handoff_carries_what_the_receiver_lacks_and_its_tokens_are_the_same(tenant: Tenant) -> None:
    for length in (1, 16, 45):
        spec = request("r", length)
        expected = tenant.answer(spec)
        with tenant.running(2) as (sender, receiver):
            lease = reserve(receiver, spec)
            sender.pushes_to(receiver, lease)
            first = prefill(sender, spec, lease.num_cached_tokens)
            assert sender.sink.calls[0] == b"opening", "a handoff opens before its pushes"
            owed = [
                (layer, ordinal)
                for layer in range(sender.spec.layout.num_layers())
                for ordinal in range(len(lease.block_ids[0]))
            ]
            assert sorted(sender.sink.pushed) == owed, "each block of each layer once"
            release(sender, "r")
            admit(receiver, "r", first.token)
            computed = tokens_of(receiver, "r")
            assert first.token.token_id == expected[0]
            assert computed in (expected, expected[1:])  # the first one may be computed again
            sender.check_whole()
            receiver.check_whole()


def the_first_token_that_was_sent_stands(tenant: Tenant) -> None:
    spec = request("r", 45)
    other = (tenant.answer(spec)[0] + 1) % 300
    told = replace(spec, token_ids=np.append(spec.token_ids, np.uint32(other)))
    expected = tenant.answer(told)
    with tenant.running(2) as (sender, receiver):
        sender.pushes_to(receiver, reserve(receiver, spec))
        prefill(sender, spec)
        receiver.call(lambda engine: engine.admit(spec.request_id, SampledToken(other)))
        tokens_of(receiver, "r")
        later = [e for e in receiver.events_of("r", TokenEvent) if e.index > 0]
        assert [e.token.token_id for e in later] == expected


def a_first_token_that_ends_the_request_ends_it(tenant: Tenant) -> None:
    spec = request("r", 20, replace(GREEDY, max_tokens=1))
    with tenant.running() as (running,):
        reserve(running, spec)
        running.call(lambda engine: engine.admit(spec.request_id, SampledToken(5)))
        assert running.until("r", FinishedEvent).reason is FinishReason.LENGTH
        running.check_whole()


def a_reservation_without_room_is_refused_or_answered_once_there_is(tenant: Tenant) -> None:
    with tenant.running() as (running,):
        first = reserve(running, request("first", 16 * (NUM_BLOCKS - 4)))
        spec = request("second", 16 * 8)
        running.call(lambda engine: engine.reserve(spec))
        running.idle()
        assert not running.events_of("second", ReservedEvent), "blocks that there are not"
        release(running, "first")
        answer = running.until("second", ReservedEvent, NoCapacityEvent)
        if isinstance(answer, NoCapacityEvent):
            running.call(
                lambda engine: engine.reserve(replace(spec, request_id=RequestId("third")))
            )
            assert isinstance(running.until("third", ReservedEvent, NoCapacityEvent), ReservedEvent)
        running.idle()
        for name in ("first", "second", "third"):
            assert len(running.events_of(name, ReservedEvent, NoCapacityEvent)) <= 1
            release(running, name)
        assert len(blocks_of(first)) == len(first.block_ids) * (NUM_BLOCKS - 4)
        running.check_whole()


def an_aborted_reservation_keeps_its_blocks_until_its_writer_has_stopped(tenant: Tenant) -> None:
    with tenant.running() as (running,):
        lease = reserve(running, request("lost", 160))
        abort(running, "lost")
        assert running.until("lost", FinishedEvent).reason is FinishReason.ABORTED
        assert running.call(lambda engine: engine.load()).num_quarantined_blocks >= 10
        other = reserve(running, request("other", 96))
        assert not blocks_of(lease) & blocks_of(other), "a late writer could reach them"
        release(running, "other")
        release(running, "lost")
        running.check_whole()
        whole = reserve(running, request("whole", 16 * (NUM_BLOCKS - 2)))
        assert blocks_of(lease) <= blocks_of(whole) | {(0, NUM_BLOCKS - 1)}
        release(running, "whole")


def an_aborted_prefill_keeps_its_blocks_until_nobody_reads_them(tenant: Tenant) -> None:
    with tenant.running() as (running,):
        prefill(running, request("done", 100))
        running.call(
            lambda engine: engine.add_prefill(request("early", 100), HandoffId("h"), 0, b"opening")
        )
        abort(running, "early")
        abort(running, "done")
        running.idle()
        ends = running.events_of("early", FinishedEvent, PrefilledEvent)
        assert len(ends) == 1, ends
        assert not running.events_of("done", FinishedEvent), "it had ended"
        load = running.call(lambda engine: engine.load())
        assert load.num_blocks - load.num_free_blocks >= 7, "blocks that may be read are not free"
        for name in ("done", "early"):
            release(running, name)
        running.idle()
        running.check_whole()


def an_aborted_request_ends_at_once_and_once(tenant: Tenant) -> None:
    endless = replace(GREEDY, max_tokens=200)
    with tenant.running() as (running,):
        for name in ("runs", "waits"):
            running.call(lambda engine, name=name: engine.add(request(name, 150, endless)))
        running.until("runs", TokenEvent)
        for name in ("runs", "waits", "runs", "unknown"):
            abort(running, name)
            release(running, "nobody")
        for name in ("runs", "waits"):
            assert running.until(name, FinishedEvent).reason is FinishReason.ABORTED
        running.idle()
        last = {name: len(running.events_of(name, *ENDS)) for name in ("runs", "waits")}
        running.check_whole()
        assert last == {name: len(running.events_of(name, *ENDS)) for name in last}
        assert all(len(running.events_of(name, FinishedEvent)) == 1 for name in last)


def an_id_comes_again_once_its_blocks_are_free(tenant: Tenant) -> None:
    with tenant.running() as (running,):
        spec = request("r", 40)
        for _ in range(2):
            reserve_num = len(running.events_of("r", ReservedEvent)) + 1
            running.call(lambda engine: engine.reserve(spec))
            running.until("r", ReservedEvent, num=reserve_num)
            abort(running, "r")
            with pytest.raises(InvalidRequestError, match="already"):
                running.call(lambda engine: engine.add(spec))
            release(running, "r")
        running.check_whole()


def what_could_never_run_is_refused_with_its_field(tenant: Tenant) -> None:
    with tenant.running() as (running,):
        capacity = running.engine.capacity
        assert capacity.num_blocks == NUM_BLOCKS - 1
        most = capacity.max_request_tokens
        assert most == 16 * capacity.num_blocks
        for field, spec in (
            ("prompt", request("long", most + 1)),
            ("top_p", request("improbable", 10, replace(GREEDY, top_p=2.0))),
            ("max_tokens", request("large", most, replace(GREEDY, max_tokens=9))),
        ):
            for enter in (Engine.add, Engine.reserve):
                with pytest.raises(InvalidRequestError) as caught:
                    running.call(lambda engine, e=enter, s=spec: getattr(engine, e.__name__)(s))
                assert caught.value.field == field
        running.call(lambda engine: engine.add(request("fits", most - 5)))
        assert len(tokens_of(running, "fits")) == GREEDY.max_tokens
        for name in ("nobody", "fits"):
            with pytest.raises(UnknownRequestError):
                running.call(lambda e, n=name: e.admit(RequestId(n), SampledToken(1)))
        running.check_whole()


def kv_events_name_parents_first_and_remove_what_they_stored(tenant: Tenant) -> None:
    """An engine without a prefix cache sends none."""
    known: set[bytes] = set()
    with tenant.running() as (running,):
        for number in range(8):
            running.call(lambda engine, n=number: engine.add(request(f"r{n}", 40 + 16 * n)))
            tokens_of(running, f"r{number}")
        running.idle()
        for event in running.events:
            if isinstance(event, BlocksStoredEvent):
                assert event.parent is None or event.parent in known, "a child before its parent"
                assert not known & set(event.hashes), "stored twice"
                known |= set(event.hashes)
            elif isinstance(event, BlocksRemovedEvent):
                assert known >= set(event.hashes), "removed what was not stored"
                known -= set(event.hashes)
        assert len(known) < NUM_BLOCKS
        running.check_whole()


def a_device_that_fails_ends_the_engines_thread(tenant: Tenant) -> None:
    def fail(*given: object) -> None:
        raise OSError("the device is gone")

    with tenant.running() as (running,):
        running.engine._runner.run = fail  # type: ignore[attr-defined]
        running.thread.post(lambda engine: engine.add(request("r", 10)))
        assert wait([running.fatal], running.wait_s).done, "it goes on"
        assert isinstance(running.fatal.result(), OSError)


CHECKS: tuple[Callable[[Tenant], None], ...] = (
    added_requests_get_their_own_tokens,
    a_handoff_carries_what_the_receiver_lacks_and_its_tokens_are_the_same,
    the_first_token_that_was_sent_stands,
    a_first_token_that_ends_the_request_ends_it,
    a_reservation_without_room_is_refused_or_answered_once_there_is,
    an_aborted_reservation_keeps_its_blocks_until_its_writer_has_stopped,
    an_aborted_prefill_keeps_its_blocks_until_nobody_reads_them,
    an_aborted_request_ends_at_once_and_once,
    an_id_comes_again_once_its_blocks_are_free,
    what_could_never_run_is_refused_with_its_field,
    kv_events_name_parents_first_and_remove_what_they_stored,
    a_device_that_fails_ends_the_engines_thread,
)
