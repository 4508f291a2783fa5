"""Matrix products with fixed weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


class Linear:
    """x @ weight.T + bias, weight [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        return F.linear(x, self.weight, self.bias)
