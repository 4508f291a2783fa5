"""What an engine says a request may have of it is what it takes, neither more nor less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import InvalidRequestError
from tests.engine.fakes import GREEDY, FakeEngine, Streams, drain, fake_config, prompt, spec_of


@pytest.mark.parametrize("window", [None, 40], ids=["full", "full and windowed"])
@pytest.mark.parametrize(("num_blocks", "longest"), [(12, 11 * 16 + 1), (400, 1024)])
def test_the_longest_request_is_as_long_as_the_context_or_as_kv_memory_holds(
    num_blocks: int, longest: int, window: int | None
) -> None:
    core = FakeEngine(fake_config(num_blocks=num_blocks, window=window)).core
    capacity = core.capacity
    assert capacity.max_model_len == longest
    assert capacity.num_blocks == num_blocks - 1 == core.load().num_blocks
    assert capacity.max_request_tokens == (num_blocks - 1) * 16
    assert capacity.max_held_tokens is None
    most = replace(GREEDY, max_tokens=longest - 30)
    core.add(spec_of("longest", prompt(30), most))
    assert len(drain(core).tokens["longest"]) == longest - 30
    if longest < 1024:  # the context itself cuts a request short, memory refuses it
        with pytest.raises(InvalidRequestError):
            core.add(spec_of("longer", prompt(30), replace(most, max_tokens=longest - 29)))


def test_where_every_layer_has_a_window_memory_bounds_what_is_held_and_not_a_requests_length() -> (
    None
):
    config = fake_config(num_blocks=16, window=40, max_num_batched_tokens=64)
    core = FakeEngine(config, sees_all=False).core
    capacity = core.capacity
    assert (capacity.max_model_len, capacity.max_request_tokens) == (1024, None)
    assert capacity.max_held_tokens is not None
    core.add(spec_of("long", prompt(500), replace(GREEDY, max_tokens=300)))
    streams, held = Streams(), set()
    while core.has_work():
        streams.take(core.step())
        load = core.load()
        held.add((load.num_blocks - load.num_free_blocks) * config.block_size)
    assert len(streams.tokens["long"]) == 300
    assert 40 < max(held) <= capacity.max_held_tokens < 500


def test_a_window_that_the_pool_cannot_hold_is_held_as_far_as_there_are_blocks() -> None:
    core = FakeEngine(fake_config(num_blocks=4, window=400), sees_all=False).core
    assert core.capacity.max_request_tokens == core.capacity.max_held_tokens == 3 * 16
