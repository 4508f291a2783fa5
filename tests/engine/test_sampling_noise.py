"""Noise: a function of seed, output index and token, of the right distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling_noise import gumbel_noise, noise_of_tokens, row_keys
from tests.engine.sampling import ids, keys_of, sample


def test_noise_does_not_repeat_over_positions_seeds_or_tokens() -> None:
    positions = [(seed, index) for seed in (0, 1, 2**63, 2**64 - 1) for index in range(40)]
    noise = gumbel_noise(keys_of(positions), 500).double()
    # In float32 about one of 700 of so many values equals another by chance.
    assert len(torch.unique(noise)) > 0.997 * noise.numel()
    # Standard Gumbel: mean 0.5772, variance pi^2 / 6.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.04)
    rows = torch.corrcoef(noise) - torch.eye(len(positions))
    assert rows.abs().max() < 0.25
    assert rows.abs().mean() < 0.05


def test_noise_is_that_of_plain_integer_arithmetic() -> None:
    """A twin in Python integers: what any other implementation has to give."""

    def twin(seed: int, index: int, token: int) -> float:
        mask = (1 << 32) - 1
        key1, key2 = (key & mask for key in row_keys(seed, index))
        h = (token * (-1640531527 & mask)) & mask ^ key1
        h = h * (-862048943 & mask) & mask
        h ^= h >> 16
        h = (h * (-2048144789 & mask) + key2) & mask
        h ^= h >> 13
        h = h * (-1028477387 & mask) & mask
        h ^= h >> 16
        uniform = min(((h & 0x7FFFFFFF) + 0.5) * 2.0**-31, 1 - 2.0**-24)
        return -math.log(-math.log1p(-uniform))

    noise = gumbel_noise(keys_of([(7, 0), (2**64 - 1, 5)]), 300)
    for row, (seed, index) in enumerate([(7, 0), (2**64 - 1, 5)]):
        expected = [twin(seed, index, token) for token in range(300)]
        assert noise[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_noise_depends_on_the_output_index_and_not_on_the_prompt() -> None:
    logits = torch.zeros(1, 1000)
    params = SamplingParams(seed=5)
    tokens = [ids(sample(logits, [params], [([1] * n, [2] * 3)]))[0] for n in (1, 9, 30)]
    assert len(set(tokens)) == 1
    by_index = [ids(sample(logits, [params], [([1], [2] * n)]))[0] for n in range(8)]
    assert len(set(by_index)) == 8


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 5000), count=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_noise_of_some_tokens_is_bit_for_bit_that_of_all(seed: int, index: int, count: int) -> None:
    positions = [(seed, index), (1, 2)]
    generator = torch.Generator().manual_seed(count)
    token_ids = torch.randint(0, 30_000, (2, count), generator=generator)
    every = gumbel_noise(keys_of(positions), 30_000)
    assert torch.equal(noise_of_tokens(keys_of(positions), token_ids), every.gather(1, token_ids))
