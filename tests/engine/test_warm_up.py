"""An engine's first steps, of which nothing is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.config.engine import EngineConfig
from engine.request import SampledToken, StepPlan
from engine.run.core import build_engine, warm_up
from tests.engine import checkpoints, families
from tests.engine.driving import random_prompt, set_up
from tests.engine.fakes import (
    GREEDY,
    FakeEngine,
    alone,
    drain,
    fake_config,
    pool_is_whole,
    prompt,
    spec_of,
)
from tests.engine.watching import Watched


def warmed_up(engine: FakeEngine) -> Watched:
    watched = Watched(engine)
    warm_up(engine.config, engine.core._runner, engine.sink)
    return watched


@pytest.mark.parametrize(("window", "sees_all"), [(None, True), (20, True), (20, False)])
def test_prefill_in_chunks_and_decodes_have_run_and_nothing_is_left_of_them(
    window: int | None, sees_all: bool
) -> None:
    engine = FakeEngine(fake_config(window=window), sees_all=sees_all)
    watched = warmed_up(engine)
    steps = [(len(s.token_ids), s.start, s.samples) for p in watched.plans for s in p.seqs]
    assert steps == [(64, 0, False), (64, 64, True), *((1, 128 + i, True) for i in range(3))]
    pool_is_whole(engine.core)
    load = engine.core.load()
    assert (load.num_steps, load.prefill_tokens_per_s, load.decode_step_s) == (0, 0.0, 0.0)
    assert not engine.core.has_work()  # no event to tell either
    assert engine.core.health.predicted_step_s is None
    spec = spec_of("r", prompt(100))
    engine.core.add(spec)
    assert drain(engine.core).tokens["r"] == alone(spec, window, sees_all)


@pytest.mark.parametrize(
    "config",
    [
        fake_config(num_blocks=8),
        fake_config(num_blocks=8, window=20),
        fake_config(num_blocks=4, block_size=1, max_num_seqs=1, max_num_batched_tokens=1),
        fake_config(max_model_len=2),
        fake_config(max_num_batched_tokens=3),
    ],
)
def test_an_engine_of_any_size_warms_up_with_what_it_would_accept(config: EngineConfig) -> None:
    engine = FakeEngine(config)
    plans = warmed_up(engine).plans
    assert plans
    assert max(plan.num_tokens for plan in plans) <= config.max_num_batched_tokens
    pool_is_whole(engine.core)


def test_a_step_that_fails_is_the_warm_ups_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: StepPlan, *given: object) -> list[SampledToken]:
        raise OSError("the device is gone")

    engine = FakeEngine(fake_config())
    monkeypatch.setattr(engine.core._runner, "run", fails)
    with pytest.raises(OSError, match="the device is gone"):
        warm_up(engine.config, engine.core._runner, engine.sink)


def test_a_model_gives_the_oracles_tokens_after_it(tmp_path: Path) -> None:
    oracle = checkpoints.save("qwen2", tmp_path)  # windows, and a layer that sees all
    config = EngineConfig(dtype="float32", num_blocks=90, num_threads=1)
    setup = set_up(tmp_path, config)
    engine = build_engine(config, setup.runner, setup.sink)
    warm_up(config, setup.runner, setup.sink)
    assert setup.sink.calls == [("step_done",)] * 5
    tokens = random_prompt(100, families.VOCAB, 1)
    sampling = replace(GREEDY, max_tokens=10)
    engine.add(spec_of("r", np.array(tokens, np.uint32), sampling))
    assert drain(engine).tokens["r"] == checkpoints.greedy(oracle, tokens, 10)
    pool_is_whole(engine)
