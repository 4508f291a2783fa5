"""Top-k, top-p and min-p, against a naive reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling_noise import gumbel_noise
from tests.engine.sampling import frequencies, ids, keys_of, random_logits, sample


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def naive_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """Straight from the definitions; logits all different."""
    order = sorted(range(len(logits)), key=lambda t: -logits[t])
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(logits[t] / params.temperature) for t in order]
    total, seen, kept = sum(weights), 0.0, []
    for token, weight in zip(order, weights):
        if params.top_p < 1 and seen >= params.top_p:
            break
        kept.append(token)
        seen += weight / total
    return {t for t, w in zip(kept, weights) if w >= params.min_p * weights[0]}


def naive_draws(logits: list[float], params: SamplingParams) -> set[int]:
    """What noise makes the largest of those kept; a boundary may fall either way by one token
    where rounding decides, and then there is more than one right answer."""
    kept = naive_kept(logits, params)
    order = sorted(range(len(logits)), key=lambda t: -logits[t])
    sizes = {len(kept)}
    if params.top_p < 1 or params.min_p:
        sizes |= {max(1, len(kept) - 1), min(len(kept) + 1, len(logits))}
    noise = gumbel_noise(keys_of([(params.seed, 0)]), len(logits))[0].tolist()
    scaled = (torch.tensor(logits) / params.temperature).tolist()
    return {max(order[:size], key=lambda t: scaled[t] + noise[t]) for size in sizes}


@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.3, 1.0, 2.0]),
    vocab_size=st.sampled_from([2, 40, 1500]),
    top_k=st.sampled_from([0, 1, 2, 30, 256, 1200, 4000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
@settings(max_examples=200, deadline=None)
def test_the_token_is_the_best_of_those_that_the_filters_definitions_keep(
    seed: int, scale: float, vocab_size: int, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = random_logits(3, vocab_size, seed) * scale
    crowd = [SamplingParams(top_p=0.2), params, SamplingParams(min_p=0.3, seed=1)]
    drawn = ids(sample(logits, crowd))[1]
    assert drawn in naive_draws(logits[1].tolist(), params)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_equally_likely_tokens_stay_or_go_together(top_p: float) -> None:
    logits = torch.zeros(1, 400)
    logits[0, 100:110] = 3.0  # the k-th is one of ten alike
    logits[0, 7] = 4.0
    params = SamplingParams(top_k=5, top_p=top_p)
    drawn = torch.nonzero(frequencies(logits, params, 2000))[:, 0].tolist()
    assert drawn == [7, *range(100, 110)]


def test_tokens_outside_the_filters_are_never_drawn() -> None:
    logits = random_logits(1, 50, seed=2) / 3
    for params in (
        SamplingParams(temperature=5.0, top_k=4),
        SamplingParams(temperature=2.0, top_p=0.4),
        SamplingParams(temperature=2.0, min_p=0.3),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.6, min_p=0.05),
    ):
        scaled = (logits[0] / params.temperature).tolist()
        kept = naive_kept(scaled, replace(params, temperature=1.0))
        found = frequencies(logits, params, 3000)
        drawn = set(torch.nonzero(found)[:, 0].tolist())
        assert drawn == kept
        assert 1 < len(kept) < 50
