"""Weights packed once for a CPU, while they are read, for our C++ products.

Plain `linear` reorders a bf16 weight in every call, which makes small batches two to three times
slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.native.packed_weights import PackedWeight, Weight, can_pack
from engine.kernels.protocol import Activation
from engine.models.linear.method import Linear, Target


class PackedLinear(Linear):
    """A weight in the order of the C++ products."""

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
