"""Matrix products, and the two kinds of MLP made of them: dense, and sparse over experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.native.packed_weights import PackedWeight, can_pack
from engine.kernels.protocol import Activation, Kernels
from engine.models.config import MoeConfig


class Linear:
    """x @ weight.T + bias, for a weight [out, in].

    On a CPU the weight is packed once: in the order of our C++ products, else in oneDNN's if that
    has bf16 instructions. Plain `linear` reorders it in every call, which makes small batches two
    to three times slower.
    """

    def __init__(
        self,
        weight: torch.Tensor | Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        gate: Activation | None = None,
    ) -> None:
        """`weight`: whole, or as parts whose rows follow each other, in any floating-point type.
        `dtype` and `device`: of x; None: the weight's. `gate`: see `gates`."""
        parts = [weight] if isinstance(weight, torch.Tensor) else list(weight)
        dtype, self.device = dtype or parts[0].dtype, device or parts[0].device
        self.packed: PackedWeight | None = None
        self._is_reordered = False
        if self.device.type == "cpu" and can_pack(parts, dtype, is_gated=gate is not None):
            self.packed = PackedWeight(parts, bias, dtype, gate)
            return
        # A copy: a part of a mapped file must not keep the file's pages in use.
        moved = [part.to(self.device, dtype, copy=part.device.type == "cpu") for part in parts]
        self._weight = (moved[0] if len(moved) == 1 else torch.cat(moved)).contiguous()
        self._bias = bias
        if _can_reorder(self._weight):
            self._is_reordered = True
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight)

    @property
    def gates(self) -> bool:
        """Whether a call returns gate(first half) * second half of the product, [n, out / 2]."""
        return self.packed is not None and self.packed.gate is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        if self.packed is not None:
            return self.packed(x)
        if self._is_reordered:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return F.linear(x, self._weight, self._bias)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As a call, but float32."""
        return self(x).float() if self.packed is None else self.packed(x, torch.float32)


class GroupedLinear:
    """x @ weight.T with a different weight for each group of x's rows. Only the device knows the
    groups."""

    def __init__(self, weights: torch.Tensor) -> None:
        """Weights [num_groups, out, in]."""
        self._weights = weights.transpose(1, 2)  # as torch wants it: column-major

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> GroupedLinear | None:
        """The same products as one. None if torch has no such product (before 2.10, with biases,
        or with rows that are no multiple of 16 bytes) and on a CPU, where each product is faster
        alone."""
        first = linears[0]
        if first.device.type == "cpu" or first._bias is not None or not hasattr(F, "grouped_mm"):
            return None
        if any(width * first._weight.element_size() % 16 for width in first._weight.shape):
            return None
        return cls(torch.stack([linear._weight for linear in linears]))

    @property
    def host_waits(self) -> bool:
        """torch makes the host wait all the same in other dtypes than bfloat16, and on GPUs before
        compute capability 9.0."""
        device = self._weights.device
        return self._weights.dtype != torch.bfloat16 or (
            torch.cuda.get_device_capability(device) < (9, 0)
        )

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]; `ends` int32 [num_groups]: where each group's rows end."""
        return F.grouped_mm(x, self._weights, offs=ends)


def _can_reorder(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


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
        inner = self.gate_up(x)
        return self.down(inner if self.gate_up.gates else kernels.gate(inner, self.activation))


class Experts(Protocol):
    @property
    def host_waits(self) -> bool:
        """As an `Mlp`'s."""

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

    gate_up: GroupedLinear
    down: GroupedLinear
    activation: Activation

    @property
    def host_waits(self) -> bool:
        return self.gate_up.host_waits or self.down.host_waits

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self.down(kernels.gate(self.gate_up(x, ends), self.activation), ends)


def experts_of(experts: Sequence[DenseMlp]) -> Experts:
    """The faster computation for the device of the weights. On a CPU waiting for counts costs
    nothing."""
    gate_up = GroupedLinear.of([expert.gate_up for expert in experts])
    down = GroupedLinear.of([expert.down for expert in experts])
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
        """Experts int64 and weights, [n, num_experts_per_token] each."""
        logits = torch.nn.functional.linear(x, self.router)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.config.num_experts_per_token, dim=-1)
        if self.config.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights.to(x.dtype)
