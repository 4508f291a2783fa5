"""The fake model notices what a real one would: its tokens are an oracle with power."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.config.engine import FakeEngineConfig
from engine.api import LocalSink
from engine.request import RequestId, ScheduledSeq, StepPlan
from engine.run.core import EngineCore
from engine.run.fake_runner import FakeRunner, fake_model_spec
from engine.sampling.mixing import mix, mix_all
from tests.engine.fakes import GREEDY, FakeEngine, drain, fake_config, prompt, spec_of

LENGTH = 70  # tokens prefilled: blocks 0 to 4, the last one partial


def step_after(engine: FakeEngine, corrupt: object = None) -> int:
    """Prefill, do something to KV memory, and return the token of the next step."""
    engine.core.add(spec_of("r", prompt(LENGTH)))
    engine.core.step()
    if callable(corrupt):
        corrupt(engine, engine.core._scheduler._requests[RequestId("r")].blocks.tables)
    (event, *_) = engine.core.step()
    return int(event.token.token_id)  # type: ignore[union-attr]


LAYER_TENSORS = [(0, "k"), (0, "v"), (1, "k"), (1, "v"), (2, "k"), (2, "v")]


@pytest.mark.parametrize(("layer", "tensor"), LAYER_TENSORS)
def test_any_lost_block_of_any_layer_changes_the_next_token(layer: int, tensor: str) -> None:
    whole = step_after(FakeEngine(fake_config(window=40)))
    for ordinal in range(5):
        if layer == 2 and ordinal < 1:
            continue  # the window has left it

        def lose(engine: FakeEngine, tables: list[np.ndarray], ordinal: int = ordinal) -> None:
            group = engine.model.layout.group_of_layer(layer)
            engine.block(layer, tensor, tables[group][ordinal])[:] = 0

        assert step_after(FakeEngine(fake_config(window=40)), lose) != whole, ordinal


def test_swapped_blocks_shifted_blocks_and_swapped_heads_change_the_next_token() -> None:
    whole = step_after(FakeEngine(fake_config()))

    def swap(engine: FakeEngine, tables: list[np.ndarray]) -> None:
        tables[0][[1, 2]] = tables[0][[2, 1]]

    def shift(engine: FakeEngine, tables: list[np.ndarray]) -> None:
        tables[0][:4] = tables[0][1:5]

    def swap_heads(engine: FakeEngine, tables: list[np.ndarray]) -> None:
        block = engine.block(1, "v", tables[0][2]).reshape(2, -1)
        block[:] = block[::-1].copy()

    def swap_tensors(engine: FakeEngine, tables: list[np.ndarray]) -> None:
        k, v = (engine.block(1, tensor, tables[0][2]) for tensor in "kv")
        k[:], v[:] = v.copy(), k.copy()

    for corrupt in (swap, shift, swap_heads, swap_tensors):
        assert step_after(FakeEngine(fake_config()), corrupt) != whole, corrupt.__name__


def test_a_stale_block_of_another_prompt_changes_the_next_token() -> None:
    whole = step_after(FakeEngine(fake_config()))
    other = FakeEngine(fake_config())
    other.core.add(spec_of("o", prompt(LENGTH, seed=1)))
    other.core.step()

    def stale(engine: FakeEngine, tables: list[np.ndarray]) -> None:
        block = tables[0][3]
        engine.block(0, "k", block)[:] = other.block(0, "k", block)

    assert step_after(FakeEngine(fake_config()), stale) != whole


def test_what_lies_outside_the_request_does_not_change_its_tokens() -> None:
    whole = step_after(FakeEngine(fake_config(window=40)))

    def scribble(engine: FakeEngine, tables: list[np.ndarray]) -> None:
        used = {int(b) for table in tables for b in table}
        for block in set(range(400)) - (used - {0}):
            for layer, tensor in LAYER_TENSORS:
                engine.block(layer, tensor, block)[:] = 0x3C

    assert step_after(FakeEngine(fake_config(window=40)), scribble) == whole


def test_a_step_takes_what_the_timing_model_says() -> None:
    slept: list[float] = []
    config = replace(
        fake_config(max_num_batched_tokens=60),
        fake=FakeEngineConfig(prefill_token_s=0.001, decode_step_s=0.5, max_model_len=1024),
    )
    engine = FakeEngine(config)
    runner = FakeRunner(config, engine.model, engine.memory, LocalSink(), sleep=slept.append)
    core = EngineCore(config, runner, LocalSink())
    core.add(spec_of("r", prompt(100), replace(GREEDY, max_tokens=2)))
    seconds = []
    while core.has_work():
        core.step()
        seconds.append(sum(slept))
        slept.clear()
    assert seconds == pytest.approx([0.060, 0.040, 0.5])


def test_writing_into_the_null_block_is_refused() -> None:
    engine = FakeEngine(fake_config())
    runner = FakeRunner(engine.config, engine.model, engine.memory, LocalSink())
    table = np.zeros(1, np.int32)
    seq = ScheduledSeq(RequestId("r"), prompt(3), 0, (table,), True)
    with pytest.raises(AssertionError, match="null block"):
        runner.run(StepPlan(1, (seq,), num_tokens=3), {})


def test_a_window_too_small_to_read_back_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        fake_model_spec(fake_config(window=1))


def test_mixing_of_integers_and_of_arrays_agree() -> None:
    states = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    assert mix_all(np.array(states, np.uint64)).tolist() == [mix(s) for s in states]
    assert mix(0) == 0xE220A8397B1DCDAF  # published first output of SplitMix64 with seed 0


@pytest.mark.timeout(20)
def test_it_forbids_what_the_sampler_forbids_before_min_tokens() -> None:
    config = fake_config()
    config = replace(config, fake=replace(config.fake, vocab_size=4))  # 1 ends a sequence
    ids = np.zeros(20, np.uint32)
    lasting = replace(GREEDY, max_tokens=60, min_tokens=60)
    everything = frozenset({0, 1, 2, 3})
    for name, sampling, drawn in (
        ("ends ignored", lasting, everything),
        ("ends forbidden", replace(lasting, ignore_eos=False), {0, 2, 3}),
        ("all forbidden", replace(lasting, stop_token_ids=everything), everything),  # so none is
    ):
        core = FakeEngine(config).core
        core.add(spec_of(name, ids, sampling))
        assert set(drain(core).tokens[name]) == drawn, name
