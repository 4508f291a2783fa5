"""What is refused at the door, by its field, and what an engine says it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.config.engine import EngineConfig, FakeEngineConfig
from engine.errors import InvalidRequestError
from engine.request import HandoffId, SamplingParams
from tests.engine.fakes import (
    GREEDY,
    FakeEngine,
    Streams,
    alone,
    drain,
    fake_config,
    pool_is_whole,
    prompt,
    spec_of,
)
from tests.engine.watching import refused_field, watched


def test_what_can_never_run_is_refused_at_the_door_by_its_field() -> None:
    core, _ = watched(max_model_len=512)
    outside = np.array([1, 2048], np.uint32)
    emitted = spec_of("r", prompt(5), replace(GREEDY, max_tokens=3), emitted=[9, 9, 9])
    assert refused_field(core, spec_of("r", prompt(0))) == "prompt"
    assert refused_field(core, spec_of("r", prompt(512))) == "prompt"
    assert refused_field(core, spec_of("r", outside)) == "token_ids"
    assert refused_field(core, spec_of("r", prompt(5), SamplingParams(top_p=7.0))) == "top_p"
    assert refused_field(core, emitted) == "max_tokens"


def test_what_kv_memory_can_never_hold_is_refused_and_what_it_just_holds_runs() -> None:
    core, _ = watched(num_blocks=12)  # 11 usable blocks: 176 tokens
    assert refused_field(core, spec_of("r", prompt(177))) == "prompt"
    with pytest.raises(InvalidRequestError, match="KV memory") as caught:
        core.add(spec_of("r", prompt(160), replace(GREEDY, max_tokens=18)))
    assert caught.value.field == "max_tokens"
    fits = spec_of("r", prompt(160), replace(GREEDY, max_tokens=17))
    core.add(fits)
    assert drain(core).tokens["r"] == alone(fits)
    pool_is_whole(core)


def test_an_id_that_runs_already_is_refused() -> None:
    core, _ = watched()
    core.add(spec_of("r", prompt(5)))
    with pytest.raises(InvalidRequestError) as caught:
        core.add(spec_of("r", prompt(5)))
    assert caught.value.field == "request_id"
    streams = Streams()
    drain(core, streams)
    assert len(streams.tokens["r"]) == GREEDY.max_tokens


@pytest.mark.parametrize("cached", [8, 64, 80])
def test_a_receiver_that_claims_part_of_a_block_or_the_whole_prompt_is_refused(cached: int) -> None:
    core, _ = watched()
    with pytest.raises(InvalidRequestError) as caught:
        core.add_prefill(spec_of("r", prompt(64)), HandoffId("h"), cached)
    assert caught.value.field == "num_cached_tokens"
    pool_is_whole(core)


@pytest.mark.parametrize("settings", [EngineConfig, FakeEngineConfig])
@pytest.mark.parametrize("longest", [0, 1])
def test_a_context_without_room_for_a_prompt_and_its_first_token_is_refused_by_name(
    settings: type[EngineConfig | FakeEngineConfig], longest: int
) -> None:
    with pytest.raises(ValueError, match=f"^max_model_len must be at least 2, not {longest}$"):
        settings(max_model_len=longest)
    settings(max_model_len=2)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_below_one_are_refused(name: str) -> None:
    changes = {name: -1}
    with pytest.raises(ValueError, match=name):
        FakeEngine(fake_config(**changes))  # type: ignore[arg-type]


# --- what an engine says it takes is what it takes ------------------------------------------------


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
