"""Prefill and decode speed of the engine beside transformers, on the same weights in the same run.

Rounds alternate between the two, medians are compared. Prefill is tokens a second of one prompt,
to its first token; decode is tokens a second of a batch whose prompts are computed already.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench import checkpoints
from engine import build
from engine.api import Engine
from engine.config import EngineConfig
from engine.local_memory import LocalKvMemory, LocalSink
from engine.request import RequestId, RequestSpec, SamplingParams, TokenEvent

PREFILL_LENGTHS = (512, 2048)
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT = 256
DECODE_STEPS = 16
ROUNDS = 3


@dataclass(frozen=True)
class Cell:
    """One row of the table; tokens a second, medians."""

    model: str
    what: str
    baton: float
    transformers: float

    @property
    def ratio(self) -> float:
        return self.baton / self.transformers


def random_prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 30000, length, dtype=np.uint32)


class BatonSide:
    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            max_num_batched_tokens=max(PREFILL_LENGTHS),
            max_num_seqs=max(DECODE_BATCHES),
            max_model_len=4096,
            num_blocks=32 * (DECODE_CONTEXT + 64) // 16 + 256,
            num_regions=1,
            prefix_cache=False,
            num_threads=torch.get_num_threads(),
        )
        spec = build.load_model_spec(str(folder), config)
        region = build.region_layout(spec, config, 0, 1)
        memory = LocalKvMemory.of(region, config.num_regions)
        sink = LocalSink()
        runner = build.build_runner(str(folder), config, spec, memory, sink, None)
        self.engine: Engine = build.build_engine(config, runner, sink)
        self._next = 0

    def _add(self, prompt: np.ndarray, max_tokens: int) -> RequestId:
        self._next += 1
        request_id = RequestId(f"r{self._next}")
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(RequestSpec(request_id, prompt, len(prompt), sampling))
        return request_id

    def _drain(self) -> None:
        while self.engine.has_work():
            self.engine.step()

    def prefill_s(self, prompt: np.ndarray) -> float:
        self._add(prompt, 1)
        start = time.perf_counter()
        self._drain()
        return time.perf_counter() - start

    def decode_s(self, prompts: list[np.ndarray]) -> float:
        """Seconds of DECODE_STEPS steps of the whole batch."""
        waiting = {self._add(prompt, DECODE_STEPS + 8) for prompt in prompts}
        while waiting:  # until each has its first token
            waiting -= {e.request_id for e in self.engine.step() if isinstance(e, TokenEvent)}
        for _ in range(2):
            self.engine.step()
        start = time.perf_counter()
        for _ in range(DECODE_STEPS):
            self.engine.step()
        elapsed = time.perf_counter() - start
        self._drain()
        return elapsed


class TransformersSide:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.train(False)

    @torch.inference_mode()
    def prefill_s(self, prompt: np.ndarray) -> float:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        start = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode_s(self, prompts: list[np.ndarray]) -> float:
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        elapsed = 0.0
        for step in range(DECODE_STEPS + 2):
            start = time.perf_counter()
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            if step >= 2:
                elapsed += time.perf_counter() - start
        return elapsed


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Median seconds of both, measured turn by turn after one warm-up each."""
    ours(), theirs()
    samples = [(ours(), theirs()) for _ in range(rounds)]
    columns = list(zip(*samples, strict=True))
    return statistics.median(columns[0]), statistics.median(columns[1])


@contextmanager
def both_sides(folder: Path) -> Iterator[tuple[BatonSide, TransformersSide]]:
    baton, theirs = BatonSide(folder), TransformersSide(folder)
    try:
        yield baton, theirs
    finally:
        del baton, theirs
        gc.collect()


def measure(model: str, progress: Callable[[str], None]) -> list[Cell]:
    """All cells of one model."""
    progress(f"making the random {model} checkpoint (once)")
    folder = checkpoints.make(model)
    cells: list[Cell] = []
    progress(f"loading {model} twice")
    with both_sides(folder) as (baton, theirs):
        for length in PREFILL_LENGTHS:
            progress(f"{model}: prefill {length}")
            prompt = random_prompt(length, length)
            seconds = alternate(
                lambda p=prompt: baton.prefill_s(p),  # type: ignore[misc]
                lambda p=prompt: theirs.prefill_s(p),  # type: ignore[misc]
                ROUNDS,
            )
            cells.append(Cell(model, f"prefill {length}", *(length / s for s in seconds)))
        for batch in DECODE_BATCHES:
            progress(f"{model}: decode batch {batch}")
            prompts = [random_prompt(DECODE_CONTEXT, seed) for seed in range(batch)]
            seconds = alternate(
                lambda p=prompts: baton.decode_s(p),  # type: ignore[misc]
                lambda p=prompts: theirs.decode_s(p),  # type: ignore[misc]
                ROUNDS,
            )
            tokens = batch * DECODE_STEPS
            cells.append(Cell(model, f"decode batch {batch}", *(tokens / s for s in seconds)))
    return cells
