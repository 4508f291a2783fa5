"""Prefill and decode speed of the engine beside transformers, on the same weights in the same run.

Rounds alternate between the two, medians are compared. Prefill is tokens a second of one prompt,
to its first token; decode is tokens a second of a batch whose prompts are computed already, once
for all rounds, so that its context grows from round to round on both sides alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from baton.config.engine import EngineConfig
from bench import random_model
from bench.report import markdown, progress
from engine.api import Engine
from engine.build import load_lone_engine
from engine.request import RequestId, RequestSpec, SamplingParams, TokenEvent

PREFILL_LENGTHS = (512, 2048)
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT = 256
LARGEST_TOKEN_ID = 30000
DECODE_STEPS = 16
ROUNDS = 5
LONG_ROUND_S = 12.0
MOST_TOKENS = DECODE_STEPS * (ROUNDS + 1) + 32  # of a request in a batch, over all rounds
LONG_ROUNDS = 3  # of cells whose round takes longer


@dataclass(frozen=True)
class Cell:
    """One row of the table; tokens a second, medians."""

    model: str
    what: str
    baton: float
    transformers: float
    rounds: int


def random_prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, LARGEST_TOKEN_ID, length, dtype=np.uint32)


class BatonSide:
    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            dtype="bfloat16",  # as the other side
            device="cpu",
            max_num_batched_tokens=max(PREFILL_LENGTHS),
            max_num_seqs=max(DECODE_BATCHES),
            max_model_len=4096,
            num_blocks=max(DECODE_BATCHES) * (DECODE_CONTEXT + 64 + MOST_TOKENS) // 16 + 256,
            num_regions=1,
            prefix_cache=False,
            num_threads=torch.get_num_threads(),
        )
        self.engine: Engine = load_lone_engine(str(folder), config)
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

    @contextmanager
    def decoding(self, prompts: list[np.ndarray]) -> Iterator[Callable[[], float]]:
        """Computes the prompts. Each call then takes DECODE_STEPS steps and returns the seconds."""
        waiting = {self._add(prompt, MOST_TOKENS) for prompt in prompts}
        while waiting:  # until each has its first token
            waiting -= {e.request_id for e in self.engine.step() if isinstance(e, TokenEvent)}
        self._steps()
        yield self._steps
        self._drain()

    def _steps(self) -> float:
        start = time.perf_counter()
        for _ in range(DECODE_STEPS):
            self.engine.step()
        return time.perf_counter() - start


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

    @contextmanager
    def decoding(self, prompts: list[np.ndarray]) -> Iterator[Callable[[], float]]:
        """As Baton's."""
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
        with torch.inference_mode():
            self._out = self.model(ids, use_cache=True, logits_to_keep=1)
        self._steps()
        yield self._steps
        del self._out

    @torch.inference_mode()
    def _steps(self) -> float:
        start = time.perf_counter()
        for _ in range(DECODE_STEPS):
            token = self._out.logits[:, -1].argmax(-1, keepdim=True)
            cache = self._out.past_key_values
            self._out = self.model(token, past_key_values=cache, use_cache=True)
        return time.perf_counter() - start


def alternate(ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float, int]:
    """Median seconds of both, measured turn by turn after a first round, and how many rounds."""
    first_s = ours() + theirs()
    rounds = ROUNDS if first_s < LONG_ROUND_S else LONG_ROUNDS
    samples = [(ours(), theirs()) for _ in range(rounds)]
    columns = list(zip(*samples, strict=True))
    return statistics.median(columns[0]), statistics.median(columns[1]), rounds


def measure(model: str) -> list[Cell]:
    """All cells of one model."""
    progress(f"making the random {model} checkpoint (once)")
    folder = random_model.saved(model)
    cells: list[Cell] = []
    progress(f"loading {model} twice")
    baton, theirs = BatonSide(folder), TransformersSide(folder)
    for length in PREFILL_LENGTHS:
        progress(f"{model}: prefill {length}")
        prompt = random_prompt(length, length)
        ours_s, theirs_s, rounds = alternate(
            partial(baton.prefill_s, prompt), partial(theirs.prefill_s, prompt)
        )
        name = f"prefill {length}"
        cells.append(Cell(model, name, length / ours_s, length / theirs_s, rounds))
    for batch in DECODE_BATCHES:
        progress(f"{model}: decode batch {batch}")
        prompts = [random_prompt(DECODE_CONTEXT, seed) for seed in range(batch)]
        with baton.decoding(prompts) as ours, theirs.decoding(prompts) as other:
            ours_s, theirs_s, rounds = alternate(ours, other)
        tokens = batch * DECODE_STEPS
        name = f"decode batch {batch}"
        cells.append(Cell(model, name, tokens / ours_s, tokens / theirs_s, rounds))
    del baton, theirs
    gc.collect()
    return cells


def main() -> None:
    header = ("random Qwen3, bf16", "Baton tokens/s", "transformers tokens/s", "ratio", "rounds")
    rows = [
        [
            f"{cell.model} {cell.what}",
            f"{cell.baton:.0f}",
            f"{cell.transformers:.0f}",
            f"{cell.baton / cell.transformers:.2f}",
            f"{cell.rounds}",
        ]
        for model in random_model.ON_DISK
        for cell in measure(model)
    ]
    print(f"{__doc__}\n{markdown(header, rows)}")


if __name__ == "__main__":
    main()
