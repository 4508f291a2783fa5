"""Rows for a sampler, and what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.api import Masks
from engine.request import RequestId, RequestSpec, SampledToken, SamplingParams, ScheduledSeq
from engine.sampling.noise import position_keys
from engine.sampling.sampler import Sampler

EOS = 3
GREEDY = SamplingParams(temperature=0.0)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[tuple[list[int], list[int]]] | None = None,
    masks: Masks | None = None,
) -> list[SampledToken]:
    """`histories`: (prompt, output) of each row."""
    histories = histories or [([0], [])] * len(params)
    seqs, specs = [], {}
    for row, (sampling, (given_ids, output)) in enumerate(zip(params, histories)):
        request_id = RequestId(str(row))
        ids = np.array([*given_ids, *output], np.uint32)
        seqs.append(ScheduledSeq(request_id, ids[-1:], len(ids) - 1, (), True))
        specs[request_id] = RequestSpec(request_id, ids, len(given_ids), sampling)
    return Sampler(frozenset({EOS})).sample(
        logits, seqs, specs, None if masks is None else lambda: masks
    )


def keys_of(positions: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.from_numpy(position_keys(positions))


def ids(sampled: list[SampledToken]) -> list[int]:
    return [token.token_id for token in sampled]


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """Relative frequency of each token over output positions 0 to `count` - 1."""
    seeds = [replace(params, seed=seed) for seed in range(count)]
    sampled = ids(sample(logits.expand(count, -1), seeds))
    return torch.bincount(torch.tensor(sampled), minlength=logits.shape[-1]) / count
