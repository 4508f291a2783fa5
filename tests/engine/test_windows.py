"""Layers that look back a window only: prompts longer than the pool, and what is handed over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.request import ReservedEvent
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
from tests.engine.watching import refused_field, watched


def windowed(num_blocks: int, chunk: int, window: int = 40) -> FakeEngine:
    """An engine of whose layers none sees everything."""
    config = fake_config(num_blocks, window, max_num_batched_tokens=chunk)
    return FakeEngine(config, sees_all=False)


@pytest.mark.parametrize("chunk", [7, 16, 64, 512])
def test_a_prompt_longer_than_the_pool_is_served_where_every_window_fits(chunk: int) -> None:
    core = windowed(num_blocks=8, chunk=chunk).core  # 7 usable blocks: 112 tokens
    spec = spec_of("r", prompt(500), replace(GREEDY, max_tokens=200))
    core.add(spec)
    assert drain(core).tokens["r"] == alone(spec, 40, sees_all=False)
    pool_is_whole(core)


def test_a_prompt_longer_than_the_pool_is_refused_where_a_layer_sees_everything() -> None:
    core, _ = watched(num_blocks=8, window=40)
    assert refused_field(core, spec_of("r", prompt(113))) == "prompt"


def test_a_prompt_longer_than_the_pool_is_refused_where_its_window_does_not_fit() -> None:
    core = windowed(num_blocks=4, chunk=16).core
    assert refused_field(core, spec_of("r", prompt(49))) == "prompt"
    fits = spec_of("r", prompt(30), replace(GREEDY, max_tokens=19))
    core.add(fits)
    assert drain(core).tokens["r"] == alone(fits, 40, sees_all=False)


def test_long_prompts_take_turns_on_a_pool_of_a_few_windows() -> None:
    core = windowed(num_blocks=16, chunk=32).core
    specs = [spec_of(str(n), prompt(300 + n, n, shared=200)) for n in range(6)]
    for spec in specs:
        core.add(spec)
    streams = drain(core)
    for spec in specs:
        assert streams.tokens[spec.request_id] == alone(spec, 40, sees_all=False)
    pool_is_whole(core)


def test_a_prompt_longer_than_both_pools_is_handed_over_by_its_last_window() -> None:
    config = fake_config(8, 40, max_num_batched_tokens=16)
    sender, receiver, wire = pair(config, config, sees_all=False)
    spec = spec_of("r", prompt(500))
    # The receiver lacks nothing that its next token does not look at.
    streams = drain(receiver.core, wire.complete(wire.begin(spec)))
    assert streams.tokens["r"] == alone(spec, 40, sees_all=False)
    pool_is_whole(sender.core)
    pool_is_whole(receiver.core)


@pytest.mark.parametrize("window", [None, 24, 40])
@pytest.mark.parametrize("length", [33, 40, 41, 47, 48, 49])
def test_a_receiver_finds_every_whole_block_of_a_prompt_that_was_handed_to_it(
    length: int, window: int | None
) -> None:
    config = fake_config(window=window)
    _, receiver, wire = pair(config, config)
    spec = spec_of("r", prompt(length), replace(GREEDY, max_tokens=2))
    drain(receiver.core, wire.complete(wire.begin(spec)))
    again = reserve(receiver.core, spec)
    assert isinstance(again, ReservedEvent)
    assert again.num_cached_tokens == (length - 1) // 16 * 16
