"""Weights packed once for a CPU, while they are read: for our C++ products, else for oneDNN's.

Plain `linear` reorders a bf16 weight in every call, which makes small batches two to three times
slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.native.packed_weights import PackedWeight, Weight, can_pack
from engine.kernels.protocol import Activation
from engine.models.linear.dense import whole
from engine.models.linear.method import Linear, Target


class PackedLinear(Linear):
    """In the order of the C++ products."""

    def __init__(self, packed: PackedWeight) -> None:
        self._packed = packed
        self.num_bytes = packed.num_bytes

    @classmethod
    def load(
        cls,
        parts: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        target: Target,
        gate: Activation | None,
    ) -> PackedLinear | None:
        on_cpu = target.device.type == "cpu"
        if not on_cpu or not can_pack(parts, target.dtype, is_gated=gate is not None):
            return None
        return cls(PackedWeight(parts, bias, target.dtype, gate))

    @property
    def gates(self) -> bool:
        return self._packed.gate is not None

    @property
    def native(self) -> Weight | None:
        return self._packed.native

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._packed.apply(x, out_dtype)


class ReorderedLinear(Linear):
    """bf16 in oneDNN's order, where the CPU has bf16 instructions and no compiler made ours."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self.num_bytes = weight.nbytes

    @classmethod
    def load(
        cls,
        parts: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        target: Target,
        gate: Activation | None,
    ) -> ReorderedLinear | None:
        on_cpu = target.device.type == "cpu"
        if not on_cpu or target.dtype != torch.bfloat16 or not _has_onednn_bf16():
            return None
        return cls(whole(parts, target), bias)

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out.to(out_dtype or x.dtype)


def _has_onednn_bf16() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
