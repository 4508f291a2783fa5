"""The contracts: a format reads matrices of a checkpoint, a method holds one and multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from engine.kernels.native.packed_weights import Weight
from engine.kernels.protocol import Activation

Part = Any
"""Rows of a matrix as a format reads them: what the methods of that format take."""


@dataclass(frozen=True)
class Target:
    """What a product's activations are and where they lie."""

    dtype: torch.dtype
    device: torch.device


class Grouped(Protocol):
    """x @ weight.T with a different weight for each group of x's rows. Only the device knows the
    groups."""

    @property
    def host_waits(self) -> bool:
        """Whether `apply` makes the host wait for the device."""

    def apply(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]; `ends` int32 [num_groups]: where each group's rows end."""


class Linear(Protocol):
    """A weight [out, in] and a bias as one method holds them, and x @ weight.T + bias."""

    num_bytes: int
    """Bytes of memory that the weight takes."""

    @property
    def native(self) -> Weight | None:
        """The weight as the C++ kernels take it, alive as long as this is; None: they cannot."""
        return None

    @property
    def gates(self) -> bool:
        """Whether `apply` returns gate(first half) * second half of the product, [n, out / 2]."""
        return False

    def grouped(self, linears: Sequence[Self]) -> Grouped | None:
        """Join the products of these, this one first; None where each has to be alone."""
        return None

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[n, in] -> [n, out], in x's dtype, or in float32 if `out_dtype` says so."""


class Method(Protocol):
    """Makes a `Linear` of parts; usually its class."""

    def load(
        self,
        parts: Sequence[Part],
        bias: torch.Tensor | None,
        target: Target,
        gate: Activation | None,
    ) -> Linear | None:
        """Hold parts whose rows follow each other; None where this method does not serve them.

        `gate`: what is applied to the first half of the rows, which gates the second.
        """


class MatrixSource(Protocol):
    """Where a format reads from. Both raise CheckpointError, also for values that are not finite.

    `shape` is the whole tensor's; `parts` select rows and columns. On a CPU the result is mapped,
    else it is on the device.
    """

    def floats(self, name: str, shape: tuple[int, ...], *parts: slice) -> torch.Tensor:
        """Read floating-point numbers, in the type that the checkpoint has."""

    def integers(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *parts: slice
    ) -> torch.Tensor: ...


class WeightFormat(Protocol):
    """How matrices are kept. A frozen dataclass of plain values: fingerprints hold them."""

    @property
    def methods(self) -> tuple[Method, ...]:
        """What serves its parts, fastest first; the last one serves everywhere."""

    def of(self, module: str) -> WeightFormat:
        """The format of one module: this one, or another if this one leaves the module out."""

    def read(
        self,
        source: MatrixSource,
        module: str,
        shape: tuple[int, int],
        rows: slice,
        columns: slice,
    ) -> Part:
        """Read rows and columns of a module's weight of this whole shape, [out, in].

        Raises CheckpointError.
        """

    def num_bytes(self, outputs: int, inputs: int, item_bytes: int) -> int:
        """Count the bytes of a weight of this size that computes in numbers of `item_bytes`."""


def load_linear(
    kept: WeightFormat,
    parts: Sequence[Part],
    bias: torch.Tensor | None,
    target: Target,
    *,
    gate: Activation | None = None,
) -> Linear:
    """Hold these parts by the fastest method that serves them."""
    for method in kept.methods:
        linear = method.load(parts, bias, target, gate)
        if linear is not None:
            return linear
    raise AssertionError(f"no method of {kept} serves {target}")
