"""Matrix products with fixed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812


class Linear:
    """x @ weight.T + bias, for a weight [out, in].

    On a CPU with bf16 instructions the weight is kept in oneDNN's own order, made once: plain
    `linear` reorders it in every call, which small batches pay for two- to threefold.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return F.linear(x, self._weight, self._bias)


class GroupedLinear:
    """x @ weight.T with another weight for each group of x's rows, which only the device knows."""

    def __init__(self, weights: torch.Tensor) -> None:
        """Weights [num_groups, out, in]."""
        self._weights = weights.transpose(1, 2)  # as torch wants it: column-major

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> GroupedLinear | None:
        """The same products as one; None on a CPU, where each is faster alone, and where torch has
        none: before 2.10, with biases, of rows that are no multiple of 16 bytes."""
        first = linears[0]
        if first.device.type == "cpu" or first._bias is not None or not hasattr(F, "grouped_mm"):
            return None
        if any(width * first._weight.element_size() % 16 for width in first._weight.shape):
            return None
        return cls(torch.stack([linear._weight for linear in linears]))

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]; `ends` int32 [num_groups]: where each group's rows end.

        torch makes the host wait all the same in other dtypes than bfloat16, and on GPUs before
        compute capability 9.0.
        """
        return F.grouped_mm(x, self._weights, offs=ends)


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
