"""A weight as it is, multiplied by torch. It serves every floating-point weight on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.protocol import Activation
from engine.models.linear.method import Grouped, Linear, Target


class DenseLinear(Linear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.num_bytes = weight.nbytes

    @classmethod
    def load(
        cls,
        parts: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        target: Target,
        gate: Activation | None,
    ) -> DenseLinear | None:
        return cls(whole(parts, target), bias)

    def grouped(self, linears: Sequence[DenseLinear]) -> Grouped | None:
        """Join the weights. None if torch has no such product (before 2.10, with biases, or with
        rows that are no multiple of 16 bytes) and on a CPU, where each product is faster alone."""
        weight = self._weight
        if weight.device.type == "cpu" or self._bias is not None or not hasattr(F, "grouped_mm"):
            return None
        if any(width * weight.element_size() % 16 for width in weight.shape):
            return None
        return GroupedLinear(torch.stack([linear._weight for linear in linears]))

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)


class GroupedLinear:
    """The weights of all groups, in one product of torch's."""

    def __init__(self, weights: torch.Tensor) -> None:
        """Weights [num_groups, out, in]."""
        self._weights = weights.transpose(1, 2)  # as torch wants it: column-major

    @property
    def host_waits(self) -> bool:
        """torch makes the host wait all the same in other dtypes than bfloat16, and on GPUs before
        compute capability 9.0."""
        device = self._weights.device
        return self._weights.dtype != torch.bfloat16 or (
            torch.cuda.get_device_capability(device) < (9, 0)
        )

    def apply(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, self._weights, offs=ends)


def whole(parts: Sequence[torch.Tensor], target: Target) -> torch.Tensor:
    """Join all rows as one tensor where and as the target wants it."""
    # A copy: a part of a mapped file must not keep the file's pages in use.
    moved = [part.to(target.device, target.dtype, copy=part.device.type == "cpu") for part in parts]
    return (moved[0] if len(moved) == 1 else torch.cat(moved)).contiguous()
