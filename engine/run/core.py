"""The engine on rank 0: a scheduler that decides and records, a runner that computes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from baton.config.engine import EngineConfig
from engine.api import EngineCapacity, EngineHealth, KvSink, Runner
from engine.engines import FindTokenizer
from engine.kv.kv_cache import KvCache
from engine.request import (
    EngineEvent,
    EngineLoad,
    HandoffId,
    RequestId,
    RequestSpec,
    SampledToken,
    SamplingParams,
    Scores,
    StepPlan,
)
from engine.sampling.constraints import Constraints, GrammarCompiler
from engine.schedule.admission import Limits
from engine.schedule.itl_budget import ItlBudget
from engine.schedule.learned_rates import LearnedRates
from engine.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

_WARM_UP_CHUNK = 64
_WARM_UP_LEN = 132  # two chunks, the second looking back at the first, and a few decodes
_WARM_UP_OUTPUT_TOKENS = 4


class EngineCore:
    """The `engine.api.Engine` over a scheduler and a runner.

    `sink` must be the one that the runner calls as layers finish. The core only puts into plans
    what is to be delivered. Without a `compiler`, requests with a grammar are refused.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        sink: KvSink,
        *,
        compiler: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model = runner.model
        self._config = config
        self._runner = runner
        self._sink = sink
        self._clock = clock
        self._kv = KvCache(
            model.layout,
            runner.num_blocks,
            model.kv_fingerprint,
            max_step_tokens=config.max_num_batched_tokens,
            prefix_cache=config.prefix_cache,
        )
        self._limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=min(config.max_model_len or model.max_model_len, model.max_model_len),
            max_kv_tokens=self._kv.max_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
        self._rates = LearnedRates(config.max_num_batched_tokens)
        block_size = model.layout.block_size
        self._itl = ItlBudget(self._rates, block_size, config.max_itl_factor)
        self._scheduler = Scheduler(self._limits, self._kv, self._itl, clock)
        self._constraints = Constraints(compiler)
        self._sink_messages: list[bytes] = []
        self._num_steps = 0
        self._predicted_step_s: float | None = None

    def start(self, wake: Callable[[], None]) -> None:
        warm_up(self._config, self._runner, self._sink)

    # --- requests -------------------------------------------------------------------------------

    def prepare(self, spec: RequestSpec) -> None:
        self._constraints.prepare(spec)

    def add(self, spec: RequestSpec) -> None:
        with self._constraints.opening(spec):
            self._scheduler.add(spec)

    def add_prefill(
        self,
        spec: RequestSpec,
        handoff_id: HandoffId,
        num_receiver_cached_tokens: int,
        opening: bytes = b"",
    ) -> None:
        with self._constraints.opening(spec):
            self._scheduler.add_prefill(spec, handoff_id, num_receiver_cached_tokens)
        if opening:
            self._sink_messages.append(opening)

    def reserve(self, spec: RequestSpec) -> None:
        with self._constraints.opening(spec):
            self._scheduler.reserve(spec)

    def admit(self, request_id: RequestId, first: SampledToken) -> None:
        self._scheduler.admit(request_id, first)

    def abort(self, request_id: RequestId) -> None:
        self._scheduler.abort(request_id)

    def release(self, request_id: RequestId) -> None:
        self._constraints.close(request_id)
        self._scheduler.release(request_id)

    # --- steps ----------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return (
            self._scheduler.has_work()
            or bool(self._sink_messages)
            or self._scheduler.has_events
            or bool(self._kv.events)
        )

    def step(self) -> list[EngineEvent]:
        events = self._scheduler.take_events()
        if not events:  # else who waits for them would wait for a computation
            messages, self._sink_messages = tuple(self._sink_messages), []
            plan = self._scheduler.plan(messages)
            scores: Scores = {}
            sampled = self._run(plan, scores)
            events = self._scheduler.commit(plan, sampled, scores)
        self._constraints.close_ended(events)
        return [*events, *self._kv.events.take()]

    def _run(self, plan: StepPlan, scores: Scores) -> list[SampledToken]:
        if not plan.seqs and not plan.sink_messages:
            return []
        self._predicted_step_s = self._rates.predict(plan)
        started_at = self._clock()
        specs = self._scheduler.specs(plan)
        masks = self._constraints.masks(plan, specs)
        sampled = self._runner.run(plan, specs, masks, scores)
        ended_at = self._clock()
        self._rates.learn(plan, ended_at - started_at, ended_at)
        self._num_steps += 1
        return sampled

    # --- what the outside may know --------------------------------------------------------------

    @property
    def capacity(self) -> EngineCapacity:
        limits, kv = self._limits, self._kv
        return EngineCapacity(
            num_blocks=kv.num_blocks - 1,  # the null block is nobody's
            max_model_len=(
                limits.max_model_len
                if kv.max_tokens is None
                else min(limits.max_model_len, kv.max_tokens + 1)
            ),
            max_request_tokens=kv.max_tokens,
            max_held_tokens=kv.max_held_tokens,
        )

    @property
    def health(self) -> EngineHealth:
        return EngineHealth(self._predicted_step_s, self._scheduler.blocked_since)

    def load(self) -> EngineLoad:
        load, decode_step_s = self._scheduler.load(), self._rates.decode_step_s
        return replace(load, num_steps=self._num_steps, decode_step_s=decode_step_s)

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def close(self) -> None:
        self._runner.close()


def build_engine(
    config: EngineConfig, runner: Runner, sink: KvSink, find_tokenizer: FindTokenizer | None = None
) -> EngineCore:
    """Make an engine over a runner. `find_tokenizer`: None, it refuses grammars."""
    model, compiler = runner.model, None
    if find_tokenizer is not None:
        compiler = GrammarCompiler(find_tokenizer, model.vocab_size, model.eos_token_ids)
    return EngineCore(config, runner, sink, compiler=compiler)


def warm_up(config: EngineConfig, runner: Runner, sink: KvSink) -> None:
    """Run one short request through prefill and decode, so that no client waits for the first
    steps. Raises what a step raises.

    First steps are slow on every rank: they start threads, build kernels and plans, and touch
    memory. Call it on the thread that will step, before anybody holds a KV block. The request has a
    scheduler, blocks and rates of its own, and leaves no trace in the engine that serves.
    """
    started_at = time.monotonic()
    budget = min(_WARM_UP_CHUNK, config.max_num_batched_tokens)
    alone = replace(config, prefix_cache=False, max_num_seqs=1, max_num_batched_tokens=budget)
    core = EngineCore(alone, runner, sink)
    max_len = min(_WARM_UP_LEN, core.capacity.max_model_len)
    num_prompt_tokens = max(1, max_len - _WARM_UP_OUTPUT_TOKENS)
    prompt = np.arange(num_prompt_tokens, dtype=np.uint32) % core.model.vocab_size
    sampling = SamplingParams(max_tokens=max_len - num_prompt_tokens, ignore_eos=True)
    core.add(RequestSpec(RequestId("warm-up"), prompt, num_prompt_tokens, sampling))
    while core.has_work():
        core.step()
    log.info("warmed up in %.2f s", time.monotonic() - started_at)
