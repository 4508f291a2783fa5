"""Drives a runner with plans made by hand: the thinnest scheduler there can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from baton.config.engine import EngineConfig
from engine.api import LocalKvMemory, ModelSpec
from engine.request import (
    BlockPush,
    RequestId,
    RequestSpec,
    SampledToken,
    ScheduledSeq,
    StepPlan,
    TokenLogprobs,
)
from engine.run.torch_engine import describe
from engine.run.torch_runner import SampleFn, TorchRunner, load_torch_decoder
from engine.run.tp import TpGroup
from kv_transfer.layout import RegionLayout
from tests.engine.greedy import Greedy


@dataclass
class RecordingSink:
    """A KvSink that records its calls."""

    calls: list[tuple[object, ...]] = field(default_factory=list)

    def message(self, payload: bytes) -> None:
        self.calls.append(("message", payload))

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        self.calls.append(("layer_done", layer, tuple(pushes)))

    def step_done(self) -> None:
        self.calls.append(("step_done",))


def argmax(
    logits: torch.Tensor,
    seqs: Sequence[ScheduledSeq],
    specs: dict[RequestId, RequestSpec],
    masks: object = None,
) -> list[SampledToken]:
    assert logits.dtype == torch.float32
    assert len(logits) == len(seqs)
    likeliest = logits.log_softmax(-1).max(-1)
    return [
        SampledToken(token, TokenLogprobs(logprob, 1))
        for token, logprob in zip(likeliest.indices.tolist(), likeliest.values.tolist())
    ]


@dataclass
class Setup:
    """A runner with its memory and layout."""

    runner: TorchRunner
    spec: ModelSpec
    memory: LocalKvMemory
    regions: RegionLayout
    sink: RecordingSink


def set_up(
    folder: Path, config: EngineConfig, tp: TpGroup | None = None, sample: SampleFn = argmax
) -> Setup:
    spec = describe(str(folder), config, tp)
    regions = spec.region_layout(config, tp.rank if tp else 0, tp.size if tp else 1)
    stride = -(-regions.num_bytes() // 4096) * 4096
    memory = LocalKvMemory(config.num_regions, stride, regions.num_blocks)
    memory.buffer[:] = 0xFF  # NaN, so that a stray read shows
    sink = RecordingSink()
    decoder = load_torch_decoder(str(folder), config, spec, tp)
    runner = TorchRunner(spec, decoder, memory, sink, sample, tp)
    return Setup(runner, spec, memory, regions, sink)


class Driver:
    """Prefills prompts in chunks and decodes them together; blocks come in a shuffled order."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        layout = setup.spec.layout
        self._free = [
            np.random.default_rng(seed + group).permutation(np.arange(1, setup.runner.num_blocks))
            for group in range(len(layout.groups))
        ]
        self.tables: dict[int, tuple[np.ndarray, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.computed: dict[int, int] = {}
        self._step = 0

    def add(self, seq: int, prompt: list[int], max_tokens: int) -> None:
        size = self.setup.spec.layout.block_size
        count = -(-(len(prompt) + max_tokens) // size)
        tables = []
        for group, free in enumerate(self._free):
            tables.append(free[:count].astype(np.int32))
            assert len(tables[-1]) == count, "the pool is too small for this test"
            self._free[group] = free[count:]
        self.tables[seq] = tuple(tables)
        self.tokens[seq] = list(prompt)
        self.logprobs[seq] = []
        self.computed[seq] = 0

    def step(self, counts: dict[int, int]) -> dict[int, int]:
        """Compute the next `counts[seq]` tokens of each; give the tokens sampled."""
        seqs = []
        for seq, count in counts.items():
            start = self.computed[seq]
            tokens = np.array(self.tokens[seq][start : start + count], dtype=np.uint32)
            samples = start + count == len(self.tokens[seq])
            tables = self._windowed(seq, start)
            seqs.append(ScheduledSeq(RequestId(str(seq)), tokens, start, tables, samples))
            self.computed[seq] = start + count
        self._step += 1
        plan = StepPlan(self._step, tuple(seqs), num_tokens=sum(counts.values()))
        sampled = iter(self.setup.runner.run(plan, {}))
        found = {int(s.request_id): next(sampled) for s in seqs if s.samples}
        for seq, token in found.items():
            assert token.logprobs is not None
            self.tokens[seq].append(token.token_id)
            self.logprobs[seq].append(token.logprobs.logprob)
        return {seq: token.token_id for seq, token in found.items()}

    def answer(self, seq: int) -> Greedy:
        """What was sampled so far."""
        logprobs = list(self.logprobs[seq])
        return Greedy(self.tokens[seq][len(self.tokens[seq]) - len(logprobs) :], logprobs)

    def _windowed(self, seq: int, start: int) -> tuple[np.ndarray, ...]:
        """Tables as a scheduler gives them: what a window has left is the null block."""
        layout = self.setup.spec.layout
        tables = []
        for group, table in zip(layout.groups, self.tables[seq]):
            if group.window is not None:
                table = table.copy()
                table[: max(0, start + 1 - group.window) // layout.block_size] = 0
            tables.append(table)
        return tuple(tables)


def generate(driver: Driver, prompts: list[list[int]], num_tokens: int, chunk: int) -> list[Greedy]:
    """Greedy tokens of all prompts, prefilled in chunks and decoded as one batch."""
    for seq, prompt in enumerate(prompts):
        driver.add(seq, prompt, num_tokens)
    pending = {seq: len(prompt) for seq, prompt in enumerate(prompts)}
    while any(pending.values()):
        counts = {seq: min(chunk, left) for seq, left in pending.items() if left}
        driver.step(counts)
        for seq, count in counts.items():
            pending[seq] -= count
    for _ in range(num_tokens - 1):
        driver.step(dict.fromkeys(range(len(prompts)), 1))
    return [driver.answer(seq) for seq in range(len(prompts))]


def random_prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()
