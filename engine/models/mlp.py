"""The two kinds of MLP: dense, and sparse over experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.kernels import Kernels
from engine.models.config import MoeConfig
from engine.models.linear import Linear


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """[n, hidden] -> this rank's part of [n, hidden]: the ranks' parts add up."""


@dataclass(frozen=True)
class DenseMlp:
    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self.down(kernels.swiglu(self.gate_up(x)))


@dataclass(frozen=True)
class MoeMlp:
    """Each token goes to its likeliest experts; tokens of one expert are computed together."""

    config: MoeConfig
    router: torch.Tensor  # [num_experts, hidden]
    experts: Sequence[DenseMlp]

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        experts, weights = self._route(x)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)  # (token, choice) pairs, grouped by expert
        tokens = order // experts.shape[1]
        counts = chosen.bincount(minlength=self.config.num_experts).tolist()
        outputs = torch.empty_like(x[tokens])
        start = 0
        for expert, count in zip(self.experts, counts):
            if count:
                rows = slice(start, start + count)
                outputs[rows] = expert(x[tokens[rows]], kernels)
                start += count
        outputs *= weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, tokens, outputs)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 and weights, [n, num_experts_per_token] each."""
        logits = torch.nn.functional.linear(x, self.router)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.config.num_experts_per_token, dim=-1)
        if self.config.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights.to(x.dtype)
