"""Sampling noise as a function of (seed, output index, token id), and of nothing else.

There is no generator and no state: any worker, in any batch, draws the same noise for the same
token of the same request. Adding Gumbel noise to logits and taking the largest samples from their
softmax (the Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.mixing import mix

_INT32 = 1 << 32


def row_keys(seed: int, index: int) -> tuple[int, int]:
    """Two signed 32-bit keys of one output position."""
    state = mix(mix(seed) ^ mix(~index & (1 << 64) - 1))
    low, high = state % _INT32, state // _INT32
    return low - (low >> 31) * _INT32, high - (high >> 31) * _INT32


def position_keys(positions: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """`row_keys` of n positions (seed, output index): [n, 2]."""
    return np.array([row_keys(*position) for position in positions], np.int32).reshape(-1, 2)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 [n, vocab_size], for `position_keys` int32 [n, 2]."""
    return noise_of_tokens(keys, torch.arange(vocab_size, dtype=torch.int32, device=keys.device))


def noise_of_tokens(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`gumbel_noise` of these tokens alone, bit for bit: float32 [n, m].

    `token_ids`: [m] for all rows, or [n, m].
    """
    first, second = keys.unbind(1)
    # Rounds of xor-shift and multiply, as in MurmurHash3's finaliser; int32 products wrap around,
    # and masks make the arithmetic shifts logical ones. In place: the arrays are large.
    h = token_ids.to(torch.int32).mul(-1640531527)
    h = h ^ first[:, None]
    h.mul_(-862048943)
    h ^= (h >> 16) & 0xFFFF
    h.mul_(-2048144789).add_(second[:, None])
    h ^= (h >> 13) & 0x7FFFF
    h.mul_(-1028477387)
    h ^= (h >> 16) & 0xFFFF
    h &= 0x7FFFFFFF
    # Uniform in (0, 1), finest near 0, where -log1p(-u), an exponential variable, decides.
    uniform = h.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
