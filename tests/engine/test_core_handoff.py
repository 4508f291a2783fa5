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


def test_blocks_are_pushed_layer_by_layer_between_the_opening_and_the_end_of_the_step() -> None:
    sender, receiver, wire = pair(fake_config(window=24), fake_config(window=24))
    spec = spec_of("r", prompt(40))
    lease = reserve(receiver.core, spec)
    assert isinstance(lease, ReservedEvent)
    sender.core.add_prefill(spec, wire.open(lease), 0, b"open")
    sender.core.step()
    assert wire.calls == ["open", "layer 0", "layer 1", "layer 2", "step"]
    assert not sender.core.has_work()


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
