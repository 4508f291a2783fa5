"""A prefill engine pushes what a decode engine leases; both hold it as long as it is touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.config.engine import EngineConfig
from baton.finish_reason import FinishReason
from engine.request import (
    BlocksStoredEvent,
    FinishedEvent,
    NoCapacityEvent,
    RequestId,
    ReservedEvent,
    SampledToken,
    TokenEvent,
)
from kv_transfer.block_hash import CacheScope, chain_hashes, chain_root, split_hashes
from tests.engine.fakes import (
    GREEDY,
    FakeEngine,
    alone,
    drain,
    fake_config,
    pair,
    pool_is_whole,
    prompt,
    reserve,
    spec_of,
)

WINDOWS = pytest.mark.parametrize("window", [None, 24, 40])


def hand_over(
    prefill: EngineConfig,
    decode: EngineConfig,
    spec_tokens: np.ndarray,
    warm: int,
    warm_decode: int,
) -> tuple[list[int], list[int]]:
    """(tokens got, tokens expected) of a prompt whose prefix of so many tokens is cached."""
    sender, receiver, wire = pair(prefill, decode)
    for engine, length in ((sender.core, warm), (receiver.core, warm_decode)):
        if length and engine is receiver.core:
            engine.add(spec_of("warm", spec_tokens[:length], replace(GREEDY, max_tokens=1)))
            drain(engine)
        elif length:
            warm_spec = spec_of("warm", spec_tokens[:length])
            lease = ReservedEvent(RequestId("warm"), 0, ())
            engine.add_prefill(warm_spec, wire.open(lease), 0)
            wire.leases.clear()
            drain(engine)
            engine.release(RequestId("warm"))
    spec = spec_of("request", spec_tokens)
    streams = drain(receiver.core, wire.complete(wire.begin(spec)))
    pool_is_whole(sender.core)
    pool_is_whole(receiver.core)
    return streams.tokens["request"], alone(spec, prefill.fake.window)


@WINDOWS
@pytest.mark.parametrize("chunk", [8, 16, 50, 512])
@pytest.mark.parametrize("length", [1, 16, 17, 150, 160])
def test_a_handoff_carries_exactly_what_the_receiver_lacks(
    window: int | None, chunk: int, length: int
) -> None:
    for warm in {0, length // 2, length - 1}:
        for warm_decode in {0, length // 3, length - 1}:
            got, expected = hand_over(
                fake_config(window=window, max_num_batched_tokens=chunk),
                fake_config(window=window, num_regions=2),
                prompt(length),
                warm,
                warm_decode,
            )
            assert got == expected, (warm, warm_decode)


def test_blocks_are_pushed_layer_by_layer_between_messages_and_the_end_of_the_step() -> None:
    sender, receiver, wire = pair(fake_config(window=24), fake_config(window=24))
    spec = spec_of("r", prompt(40))
    lease = reserve(receiver.core, spec)
    assert isinstance(lease, ReservedEvent)
    sender.core.send_to_sinks(b"open")
    sender.core.add_prefill(spec, wire.open(lease), 0)
    sender.core.step()
    assert wire.calls == ["open", "layer 0", "layer 1", "layer 2", "step"]
    sender.core.send_to_sinks(b"close")
    assert sender.core.has_work()
    sender.core.step()
    assert wire.calls[5:] == ["close", "step"]
    assert not sender.core.has_work()


def test_a_prefill_stays_pinned_until_release_even_when_aborted() -> None:
    sender, _, wire = pair(fake_config(max_num_batched_tokens=32), fake_config())
    spec = spec_of("r", prompt(100))
    wire.begin(spec)
    sender.core.step()
    sender.core.abort(spec.request_id)
    (end,) = [e for e in sender.core.step() if isinstance(e, FinishedEvent)]
    assert end.reason is FinishReason.ABORTED
    assert not sender.core.has_work()
    load = sender.core.load()
    assert (load.num_exporting, load.num_free_blocks) == (1, load.num_blocks - 7)
    sender.core.release(spec.request_id)
    pool_is_whole(sender.core)


def test_a_failed_handoffs_blocks_are_quarantined_until_the_writer_has_stopped() -> None:
    engine = FakeEngine(fake_config(num_blocks=12)).core
    engine.add(spec_of("warm", prompt(40), replace(GREEDY, max_tokens=1)))
    drain(engine)
    spec = spec_of("r", np.concatenate([prompt(40), prompt(60, 1)]))
    lease = reserve(engine, spec)
    assert isinstance(lease, ReservedEvent)
    assert lease.num_cached_tokens == 32
    engine.abort(spec.request_id)
    engine.check_integrity()
    load = engine.load()
    assert (load.num_quarantined_blocks, load.num_free_blocks) == (5, 6)
    again = reserve(engine, replace(spec, request_id=RequestId("again")))
    assert isinstance(again, NoCapacityEvent) or not set(again.block_ids[0]) & set(
        lease.block_ids[0]
    )
    engine.release(RequestId("again"))
    engine.release(spec.request_id)
    pool_is_whole(engine)


def test_a_second_quarantine_under_one_id_holds_the_first_ones_blocks_too() -> None:
    engine = FakeEngine(fake_config(num_blocks=40)).core
    spec = spec_of("r", prompt(100))
    for _ in range(2):
        reserve(engine, spec)
        engine.abort(spec.request_id)
    assert engine.load().num_quarantined_blocks == 14
    engine.release(spec.request_id)
    assert engine.load().num_quarantined_blocks == 14
    engine.release(spec.request_id)
    pool_is_whole(engine)


def test_a_reserved_requests_blocks_are_not_shared_before_it_is_admitted() -> None:
    engine = FakeEngine(fake_config()).core
    spec = spec_of("r", prompt(64))
    reserve(engine, spec)
    second = reserve(engine, replace(spec, request_id=RequestId("second")))
    assert isinstance(second, ReservedEvent)
    assert second.num_cached_tokens == 0
    engine.admit(spec.request_id, SampledToken(5))
    stored = [e for e in engine.step() if isinstance(e, BlocksStoredEvent)]
    third = reserve(engine, replace(spec, request_id=RequestId("third")))
    assert isinstance(third, ReservedEvent)
    assert third.num_cached_tokens == 48
    root = chain_root(engine.model.kv_fingerprint)
    hashes = split_hashes(chain_hashes(root, CacheScope(), spec.token_ids, 16))
    assert stored[0] == BlocksStoredEvent(None, tuple(hashes))


@pytest.mark.parametrize(("context", "num_output"), [(1024, 24), (64, 1)])
def test_the_receiver_s_context_ends_the_output_and_not_the_writer_s(
    context: int, num_output: int
) -> None:
    sender, receiver, wire = pair(fake_config(max_model_len=64), fake_config(max_model_len=context))
    spec = spec_of("r", prompt(63), replace(GREEDY, max_tokens=24))
    streams = wire.complete(wire.begin(spec))
    last: list[TokenEvent | FinishedEvent] = []
    while receiver.core.has_work():
        last = [e for e in receiver.core.step() if isinstance(e, TokenEvent | FinishedEvent)]
        streams.take(last)
    assert streams.tokens["r"] == alone(spec)[:num_output]
    (end,) = last
    reason = end.finished if isinstance(end, TokenEvent) else end.reason
    assert reason is FinishReason.LENGTH
    pool_is_whole(sender.core)
    pool_is_whole(receiver.core)


def test_a_first_token_that_ends_the_request_frees_what_was_reserved() -> None:
    engine = FakeEngine(fake_config()).core
    spec = spec_of("r", prompt(20), replace(GREEDY, ignore_eos=False))
    reserve(engine, spec)
    engine.admit(spec.request_id, SampledToken(1))
    assert FinishedEvent(spec.request_id, FinishReason.STOP) in engine.step()
    pool_is_whole(engine)
