"""Muon (Jordan et al., 2024): momentum whose update is made nearly orthogonal, matrix by matrix.

`torch.optim.Muon` computes in bf16 whatever the CPU, one matrix after the other. Without bf16
instructions that takes longer than all the rest of a step; here the matrices of one shape go
together, in the dtype that is fast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """With Nesterov momentum, decoupled weight decay and Jordan's scale for tall matrices."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Every matrix of every group has a gradient."""
        assert closure is None, "not supported"
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for (rows, columns), weights in by_shape.items():
                momenta = [self._momentum_of(weight, group["momentum"]) for weight in weights]
                updates = orthogonalized(torch.stack(momenta).to(self._dtype)).float()
                scale = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for weight, update in zip(weights, updates):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-scale)

    def _momentum_of(self, weight: Tensor, momentum: float) -> Tensor:
        gradient = weight.grad
        assert gradient is not None
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def orthogonalized(matrices: Tensor) -> Tensor:
    """[n, rows, columns] with all singular values brought near 1, by Newton-Schulz steps."""
    rows, columns = matrices.shape[1:]
    if rows > columns:
        return orthogonalized(matrices.mT).mT
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices / norms.clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x
