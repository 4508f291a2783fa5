"""Weights in the order that the C++ products read them, and the products."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p

import torch

from engine.kernels.native import huge_pages
from engine.kernels.native.native_kernels import GATES, native_library
from engine.kernels.protocol import Activation

_TILE_INPUTS = 32
TILE_ROWS = 16  # of activations, at most
_STRIP_OUTPUTS = 32
_DTYPES = (torch.float32, torch.bfloat16)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class Weight(Structure):
    """As `Weight` in native/products.h."""

    _fields_ = (
        ("strips", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("kind", c_int64),
        ("scales", c_void_p),
        ("group", c_int64),
    )


class _Rows(Structure):
    _fields_ = (("data", c_void_p), ("count", c_int64), ("stride_bytes", c_int64))


class PackedWeight:
    """A weight [outputs, inputs] for activations of `dtype`, and a bias.

    A bf16 weight of float32 activations stays in bf16, which is exact, and is widened in registers:
    half the bytes to read. So is an int8 one, whose scales are applied to sums. A gated one has
    gates in the first half of its outputs, values in the second, and its product is
    gate(first) * second.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        gate: Activation | None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """`parts`: rows of the weight, one after the other, for which `can_pack` is true.
        `scales`: [outputs, groups], of int8 parts."""
        if scales is None:
            if any(part.dtype != parts[0].dtype or part.dtype not in _DTYPES for part in parts):
                parts = [part.to(dtype) for part in parts]
            if dtype == torch.bfloat16:
                parts = [part.bfloat16() for part in parts]
        kind = _KINDS[parts[0].dtype]
        self.dtype = dtype
        self.gate = gate
        self.inputs = parts[0].shape[1]
        self.outputs = sum(len(part) for part in parts)
        rows = (_Rows * len(parts))()
        for row, part in zip(rows, parts):
            row.data, row.count = part.data_ptr(), len(part)
            row.stride_bytes = part.stride(0) * part.element_size()
        native = library()
        assert native is not None
        size = native.baton_packed_bytes(self.inputs, self.outputs, kind)
        self._memory = huge_pages.take(size)
        native.baton_pack(
            rows, len(parts), gate is not None, self.inputs, self.outputs, kind,
            self._memory.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        self._bias = None if bias is None else _by_strips(bias.to(dtype), gate is not None)
        self._scales, group = None, self.inputs
        if scales is not None:
            group //= scales.shape[1]
            by_strips = _by_strips(scales.float(), gate is not None)
            self._scales = by_strips.view(-1, _STRIP_OUTPUTS, scales.shape[1]).mT.contiguous()
        self.native = Weight(
            self._memory.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.inputs,
            self.outputs,
            kind,
            None if self._scales is None else self._scales.data_ptr(),
            group,
        )
        self.num_bytes = size + (0 if self._scales is None else self._scales.nbytes)
        self._product = native.baton_product

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[n, inputs] -> [n, outputs], or [n, outputs / 2] if gated; in x's dtype, or float32 if
        `out_dtype` says so."""
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        x = x.contiguous()
        width = self.outputs if self.gate is None else self.outputs // 2
        out = x.new_empty(len(x), width, dtype=out_dtype)
        tiles = x.new_empty((len(x) + TILE_ROWS) * self.inputs)
        self._product(
            x.data_ptr(), len(x), byref(self.native), GATES[self.gate], tiles.data_ptr(),
            out.data_ptr(), x.dtype == torch.bfloat16, out.dtype == torch.float32,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def can_pack(
    parts: Sequence[torch.Tensor], dtype: torch.dtype, *, is_gated: bool, num_groups: int = 1
) -> bool:
    """Whether `PackedWeight` serves these rows, [n, inputs] each, on this machine. `num_groups`: of
    the inputs of int8 rows."""
    if dtype not in _DTYPES or any(part.device.type != "cpu" for part in parts):
        return False
    if any(part.shape[1] % (_TILE_INPUTS * num_groups) or part.stride(1) != 1 for part in parts):
        return False
    outputs = sum(len(part) for part in parts)
    if is_gated and outputs % _STRIP_OUTPUTS:
        return False
    return library() is not None


def _by_strips(of_outputs: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """[outputs, ...] in the order of the strips, with zeros up to the last strip's end."""
    if is_gated:
        halves = of_outputs.reshape(2, -1, _STRIP_OUTPUTS // 2, *of_outputs.shape[1:])
        of_outputs = halves.transpose(0, 1).flatten(0, 2)
    padding = of_outputs.new_zeros(-len(of_outputs) % _STRIP_OUTPUTS, *of_outputs.shape[1:])
    return torch.cat([of_outputs, padding])


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the library with the types of the functions used here; None if it cannot be built."""
    found = native_library()
    if found is not None:
        found.baton_packed_bytes.argtypes = (c_int64, c_int64, c_int64)
        found.baton_packed_bytes.restype = c_int64
        found.baton_pack.argtypes = (
            POINTER(_Rows), c_int64, c_int, c_int64, c_int64, c_int64, c_void_p, c_int,
        )  # fmt: skip
        found.baton_product.argtypes = (
            c_void_p, c_int64, POINTER(Weight), c_int, c_void_p, c_void_p, c_int, c_int, c_int,
        )  # fmt: skip
        found.baton_pack.restype = found.baton_product.restype = None
    return found
