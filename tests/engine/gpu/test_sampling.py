"""A seed gives the same tokens on every device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.api import Masks
from engine.request import RequestId, RequestSpec, SampledToken, SamplingParams, ScheduledSeq
from engine.sampling.sampler import Sampler

VOCAB = 5000
SETTINGS = {
    "plain": SamplingParams(),
    "filters": SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.5),
    "least": SamplingParams(min_tokens=4, stop_token_ids=frozenset({1, 2, 3})),
    "logprobs": SamplingParams(temperature=1.5, logprobs=5),
    "greedy": SamplingParams(temperature=0.0, logprobs=1),
}


def sampled(logits: torch.Tensor, params: list[SamplingParams], masks: Masks) -> list[SampledToken]:
    seqs, specs = [], {}
    for row, sampling in enumerate(params):
        name, ids = RequestId(str(row)), np.arange(row, row + 20, dtype=np.uint32)
        seqs.append(ScheduledSeq(name, ids[-1:], len(ids) - 1, (), True))
        specs[name] = RequestSpec(name, ids, len(ids) - 2, sampling)
    return Sampler(frozenset({0})).sample(logits.clone(), seqs, specs, lambda: masks)


def _allowed(top: Sequence[tuple[int, float]]) -> list[int]:
    return [token_id for token_id, logprob in top if logprob > -np.inf]


@pytest.mark.gpu
@pytest.mark.parametrize("names", [*([name] for name in SETTINGS), list(SETTINGS)], ids="+".join)
def test_tokens_are_those_of_the_cpu(names: list[str], device: torch.device) -> None:
    logits = 3 * torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(3))
    params = [SETTINGS[names[row % len(names)]] for row in range(len(logits))]
    # Every third row may sample some tokens only.
    rows = range(0, len(logits), 3)
    bits = np.random.default_rng(5).integers(0, 256, (len(rows), VOCAB // 8 + 1), np.uint8)
    bits[::2] = 0  # most constraints leave two or three tokens
    bits[::2, 7], bits[::4, 9] = 0b101, 1
    masks = Masks(tuple(rows), bits, {})
    found, expected = sampled(logits.to(device), params, masks), sampled(logits, params, masks)
    drawn = np.array([found[row].token_id for row in rows])
    assert ((bits[np.arange(len(rows)), drawn // 8] >> (drawn % 8)) & 1).all()
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    for one, other in zip(found, expected):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            assert _allowed(one.logprobs.top) == _allowed(other.logprobs.top)
