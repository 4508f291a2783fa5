"""The two kinds of MLP: dense, and sparse over experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels.protocol import Activation, Kernels
from engine.models.config import MoeConfig
from engine.models.linear.method import Grouped, Linear


class Mlp(Protocol):
    @property
    def host_waits(self) -> bool:
        """Whether a call makes the host wait for the device, so that no CUDA graph can hold it."""

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """[n, hidden] -> this rank's part of [n, hidden]: the ranks' parts add up."""


@dataclass(frozen=True)
class DenseMlp:
    gate_up: Linear
    down: Linear
    activation: Activation

    @property
    def host_waits(self) -> bool:
        return False

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        inner = self.gate_up.apply(x)
        inner = inner if self.gate_up.gates else kernels.gate(inner, self.activation)
        return self.down.apply(inner)


class Experts(Protocol):
    @property
    def host_waits(self) -> bool:
        """Whether a call makes the host wait for the device, as an `Mlp`'s."""

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """[n, hidden], sorted by expert -> this rank's part of [n, hidden].

        `ends` int32 [num_experts], on x's device: where each expert's rows end.
        """


@dataclass(frozen=True)
class ExpertLoop:
    """One expert after the other. The host has to know how many rows each has."""

    experts: Sequence[DenseMlp]

    @property
    def host_waits(self) -> bool:
        return True

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        outputs = torch.empty_like(x)
        start = 0
        for expert, end in zip(self.experts, ends.tolist(), strict=True):
            if end > start:
                outputs[start:end] = expert(x[start:end], kernels)
                start = end
        return outputs


@dataclass(frozen=True)
class GroupedExperts:
    """All experts in one product. Row counts stay on the device, so the host never waits."""

    gate_up: Grouped
    down: Grouped
    activation: Activation

    @property
    def host_waits(self) -> bool:
        return self.gate_up.host_waits or self.down.host_waits

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self.down.apply(kernels.gate(self.gate_up.apply(x, ends), self.activation), ends)


def experts_of(experts: Sequence[DenseMlp]) -> Experts:
    """Choose the faster computation for the device of the weights. On a CPU waiting for counts
    costs nothing."""
    gate_up = experts[0].gate_up.grouped([expert.gate_up for expert in experts])
    down = experts[0].down.grouped([expert.down for expert in experts])
    if gate_up is None or down is None:
        return ExpertLoop(experts)
    return GroupedExperts(gate_up, down, experts[0].activation)


@dataclass(frozen=True)
class MoeMlp:
    """Each token goes to its likeliest experts; tokens of one expert are computed together."""

    config: MoeConfig
    router: torch.Tensor  # [num_experts, hidden]
    experts: Experts

    @property
    def host_waits(self) -> bool:
        return self.experts.host_waits

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        chosen, weights = self._route(x)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, grouped by expert
        every_expert = torch.arange(self.config.num_experts, device=x.device)
        ends = torch.searchsorted(chosen.flatten()[order], every_expert, right=True, out_int32=True)
        outputs = self.experts(x[order // chosen.shape[1]], ends, kernels)
        of_pairs = torch.empty_like(outputs)
        of_pairs[order] = outputs  # no two rows to one place: the sum has one order everywhere
        return of_pairs.view(*chosen.shape, -1).mul_(weights[..., None]).sum(dim=1)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts int64 and weights, [n, num_experts_per_token] each."""
        logits = torch.nn.functional.linear(x, self.router)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.config.num_experts_per_token, dim=-1)
        if self.config.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights.to(x.dtype)
