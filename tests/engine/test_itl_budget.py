"""Running streams keep their gaps while prompts are computed beside them, and prompts go on."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.config.engine import EngineConfig, FakeEngineConfig
from engine.request import SampledToken, StepPlan, TokenEvent
from engine.run.core import EngineCore
from engine.schedule.step_work import StepWork
from tests.engine.fakes import (
    GREEDY,
    FakeEngine,
    Streams,
    alone,
    fake_config,
    pool_is_whole,
    prompt,
    spec_of,
)

FACTOR = 4.0
BLOCK = 16
DECODE_S, TOKEN_S = 0.02, 0.001  # so some 60 prompt tokens beside decodes


class Step:
    """What a step does, and seconds: `alone_s` is what its decodes take alone."""

    def __init__(self, plan: StepPlan, core: EngineCore, slower: float) -> None:
        self.work = StepWork.of(plan)
        self.predicted_s = core._rates.seconds(self.work)
        self.predicted_alone_s = core._rates.seconds(self.work.decodes_alone)
        self.s = slower * (DECODE_S + TOKEN_S * self.work.num_prompt_tokens)
        self.alone_s = slower * DECODE_S

    @property
    def is_mixed(self) -> bool:
        return self.work.num_decodes > 0 and self.work.num_prompt_tokens > 0


class Timed:
    """A fake engine on a clock of its own, which the runner alone moves on."""

    def __init__(self, num_blocks: int = 400, **changes: object) -> None:
        timing = FakeEngineConfig(
            max_model_len=1024, prefill_token_s=TOKEN_S, decode_step_s=DECODE_S
        )
        changes = {"max_itl_factor": FACTOR, "fake": timing, **changes}
        engine = FakeEngine(fake_config(num_blocks, **changes))
        self.now_s, self.slower, self.noise = 0.0, 1.0, random.Random(0)
        self.spread = 0.0
        self.steps: list[Step] = []
        runner = engine.core._runner
        runner._sleep = self._sleep  # type: ignore[attr-defined]
        self.core = EngineCore(engine.config, runner, engine.sink, clock=lambda: self.now_s)
        run = runner.run

        def remember(plan: StepPlan, *given: Any) -> list[SampledToken]:
            self.steps.append(Step(plan, self.core, self.slower))
            return run(plan, *given)

        runner.run = remember  # type: ignore[method-assign]

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds * self.slower * self.noise.uniform(1 - self.spread, 1 + self.spread)

    def saturate(self, num_steps: int, num_requests: int = 8) -> list[Step]:
        """Steps with that many requests at any time, mostly with some of them to prefill."""
        num_live = 0
        first = len(self.steps)
        while len(self.steps) < first + num_steps:
            for _ in range(num_requests - num_live):
                number = self.core._scheduler._num_arrived
                sampling = replace(GREEDY, max_tokens=20 + number % 30)
                tokens = prompt(200 + 37 * number % 300, number)
                self.core.add(spec_of(f"{number}", tokens, sampling))
            events = self.core.step()
            ended = sum(isinstance(e, TokenEvent) and e.finished is not None for e in events)
            num_live = num_requests - ended
        return self.steps[first:]


@pytest.mark.parametrize("seed", range(8))
def test_a_step_keeps_its_budget_or_has_one_block_of_prompt_and_no_prompt_stands_still(
    seed: int,
) -> None:
    rng = random.Random(seed)
    timed = Timed(rng.choice([90, 400]), max_num_batched_tokens=rng.choice([64, 512]))
    timed.spread = rng.choice([0.0, 0.3])
    core, streams, specs = timed.core, Streams(), []
    behind = 0  # steps without prompts while one was being computed
    while core.has_work() or len(specs) < 40:
        if len(specs) < 40 and rng.random() < 0.1:
            sampling = replace(GREEDY, max_tokens=rng.randint(1, 60))
            spec = spec_of(str(len(specs)), prompt(rng.randint(1, 600), seed), sampling)
            specs.append(spec)
            core.add(spec)
        if rng.random() < 0.02:
            timed.slower = rng.choice([0.3, 1.0, 3.0])
        begun = [r.num_left for r in core._scheduler._running if not r.decodes]
        num_steps = len(timed.steps)
        streams.take(core.step())
        core.check_integrity()
        if len(timed.steps) == num_steps:
            continue
        step = timed.steps[-1]
        num_prompt_tokens = step.work.num_prompt_tokens
        if step.is_mixed and num_prompt_tokens > BLOCK:
            assert step.predicted_s is not None
            assert step.predicted_alone_s is not None
            assert step.predicted_s <= FACTOR * step.predicted_alone_s
        if begun and num_prompt_tokens < min(BLOCK, begun[0]) and begun[0] > 1:
            behind += 1
            assert behind == 1, "prompts wait for one step at most"
        else:
            behind = 0
    for spec in specs:
        assert streams.tokens[spec.request_id] == alone(spec)
    pool_is_whole(core)


def test_streams_keep_their_gaps_and_prompts_get_what_is_left() -> None:
    steps = Timed().saturate(600)[100:]
    mixed = [step for step in steps if step.is_mixed]
    assert len(mixed) > 0.9 * len(steps)
    assert max(step.s / step.alone_s for step in mixed) <= FACTOR
    assert np.mean([step.s / step.alone_s for step in mixed]) > 0.75 * FACTOR


@pytest.mark.parametrize("slower", [0.3, 3.0])
def test_chunks_follow_a_change_of_speed_though_prompts_never_end(slower: float) -> None:
    timed = Timed()
    timed.spread = 0.1
    timed.saturate(200)
    timed.slower = slower
    timed.saturate(300)
    ratios = [step.s / step.alone_s for step in timed.saturate(300) if step.is_mixed]
    assert np.percentile(ratios, 99) < 1.15 * FACTOR
    assert np.mean(ratios) > 0.6 * FACTOR
    assert timed.core.load().decode_step_s == pytest.approx(slower * DECODE_S, rel=0.2)


def test_an_engine_that_knows_nothing_lets_decodes_run_alone_and_chunks_grow_from_a_block() -> None:
    timed = Timed()
    timed.core.add(spec_of("stream", prompt(40), replace(GREEDY, max_tokens=100)))
    timed.core.step()
    timed.core.add(spec_of("prompt", prompt(500, 1)))
    for _ in range(4):
        timed.core.step()
    assert [s.work.num_prompt_tokens for s in timed.steps[1:4]] == [0, BLOCK, 2 * BLOCK]
    assert 2 * BLOCK < timed.steps[4].work.num_prompt_tokens <= 4 * BLOCK


def test_decodes_run_alone_now_and_then_though_prompts_never_end() -> None:
    steps = Timed().saturate(500)
    is_alone = [step.work.num_prompt_tokens == 0 for step in steps]
    assert 500 // 40 <= sum(is_alone) <= 500 // 30


def test_without_streams_a_step_takes_all_the_prompt_tokens_it_may() -> None:
    timed = Timed()
    timed.core.add(spec_of("first", prompt(520)))
    timed.core.add(spec_of("second", prompt(600, 1)))
    timed.core.step()
    timed.core.step()
    assert [s.work.num_prompt_tokens for s in timed.steps] == [512, 512]


def test_without_a_factor_tokens_alone_bound_a_step() -> None:
    steps = Timed(max_itl_factor=None).saturate(50)
    assert max(s.work.num_prompt_tokens for s in steps if s.is_mixed) > 400


def test_the_reported_rate_is_what_a_prompt_gets_beside_the_streams_that_run() -> None:
    timed = Timed()
    timed.saturate(300)
    while timed.core.has_work():
        timed.core.step()
    assert timed.core.load().prefill_tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.1)
    timed.core.add(spec_of("stream", prompt(40), replace(GREEDY, max_tokens=100)))
    timed.core.step()
    reported = timed.core.load().prefill_tokens_per_s
    timed.core.add(spec_of("prompt", prompt(800, 3)))
    begin_s, first = timed.now_s, len(timed.steps)
    while timed.core.load().num_queued_tokens > 0:
        timed.core.step()
    assert len(timed.steps) > first + 5
    assert reported == pytest.approx(800 / (timed.now_s - begin_s), rel=0.15)


def test_a_factor_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_itl_factor must be at least 1, not 0\.5"):
        EngineConfig(max_itl_factor=0.5)
