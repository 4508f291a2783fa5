"""8-bit weights: whole numbers, and a scale for each output and group of inputs.

Activations stay as they are (W8A16). A product reads half the bytes of bf16. 8 bits are exact in
bf16 and float32, so nothing is lost beyond the quantisation itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.native.packed_weights import PackedWeight, can_pack
from engine.kernels.protocol import Activation
from engine.kernels.triton import triton_available
from engine.models.linear.method import Linear, MatrixSource, Method, Target
from engine.models.linear.packed import PackedLinear

_MOST = 127  # symmetric: -128 would have no counterpart
_ROWS_AT_ONCE = 256  # while quantising: larger wide copies leave holes that are kept


@dataclass(frozen=True)
class Int8Rows:
    """Rows of a matrix: `values` int8 [n, in], `scales` [n, groups] in any floating-point type."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantised(self) -> torch.Tensor:
        """[n, in], rounded to the scales' type as compressed-tensors does."""
        groups = self.values.reshape(*self.scales.shape, -1).to(self.scales.dtype)
        return groups.mul_(self.scales[:, :, None]).flatten(1)


def quantise(weight: torch.Tensor, columns: slice = slice(None)) -> Int8Rows:
    """Columns of a weight, each row by its largest value: in all columns, so that the parts of
    tensor-parallel ranks are those of the whole."""
    part = weight[:, columns]
    values = torch.empty(part.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), 1)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        scale = weight[rows].float().abs().amax(dim=1, keepdim=True).div_(_MOST)
        scales[rows] = scale.masked_fill_(scale == 0, 1.0)  # a row of zeros
        values[rows] = (part[rows].float() / scales[rows]).round_()
    return Int8Rows(values, scales)


class PackedInt8:
    """In the order of the C++ products, which widen it in registers."""

    @staticmethod
    def load(
        parts: Sequence[Int8Rows],
        bias: torch.Tensor | None,
        target: Target,
        gate: Activation | None,
    ) -> Linear | None:
        values = [part.values for part in parts]
        scales = torch.cat([part.scales for part in parts])
        if target.device.type != "cpu" or not can_pack(
            values, target.dtype, is_gated=gate is not None, num_groups=scales.shape[1]
        ):
            return None
        packed = PackedWeight(values, bias, target.dtype, gate, scales)
        return PackedLinear(packed)


class Int8Linear(Linear):
    """On a GPU by Triton; elsewhere torch multiplies by a copy that each call makes, which is right
    everywhere and slow."""

    def __init__(self, rows: Int8Rows, bias: torch.Tensor | None) -> None:
        self._rows = rows
        self._bias = bias
        self.by_triton = triton_available.runs_on(rows.values.device.type)
        self.num_bytes = rows.values.nbytes + rows.scales.nbytes

    @classmethod
    def load(
        cls,
        parts: Sequence[Int8Rows],
        bias: torch.Tensor | None,
        target: Target,
        gate: Activation | None,
    ) -> Int8Linear | None:
        values = torch.cat([part.values for part in parts]).to(target.device)
        scales = torch.cat([part.scales for part in parts]).to(target.device, torch.float32)
        return cls(Int8Rows(values, scales), bias)

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self.by_triton:
            from engine.kernels.triton.int8_product import multiply

            return multiply(x, self._rows.values, self._rows.scales, self._bias, out_dtype)
        weight = self._rows.dequantised().to(x.dtype)
        return F.linear(x, weight, self._bias).to(out_dtype or x.dtype)


METHODS: tuple[Method, ...] = (PackedInt8, Int8Linear)


@dataclass(frozen=True)
class Int8AtLoad:
    """A checkpoint of floating-point numbers, quantised while it is read: `engine.quantization`."""

    name: str = "int8"

    @property
    def methods(self) -> tuple[Method, ...]:
        return METHODS

    def of(self, module: str) -> Int8AtLoad:
        return self

    def read(
        self,
        source: MatrixSource,
        module: str,
        shape: tuple[int, int],
        rows: slice,
        columns: slice,
    ) -> Int8Rows:
        return quantise(source.floats(f"{module}.weight", shape, rows), columns)

    def num_bytes(self, outputs: int, inputs: int, item_bytes: int) -> int:
        return num_bytes(outputs, inputs, inputs)


def num_bytes(outputs: int, inputs: int, group_size: int) -> int:
    """Of the numbers, and of float32 scales."""
    return outputs * (inputs + 4 * inputs // group_size)
