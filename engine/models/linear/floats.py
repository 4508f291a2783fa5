"""Matrices of floating-point numbers, as most checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.linear.dense import DenseLinear
from engine.models.linear.method import MatrixSource, Method
from engine.models.linear.packed import PackedLinear


@dataclass(frozen=True)
class Floats:
    name: str = "floats"

    @property
    def methods(self) -> tuple[Method, ...]:
        return PackedLinear, DenseLinear

    def of(self, module: str) -> Floats:
        return self

    def read(
        self,
        source: MatrixSource,
        module: str,
        shape: tuple[int, int],
        rows: slice,
        columns: slice,
    ) -> torch.Tensor:
        return source.floats(f"{module}.weight", shape, rows, columns)

    def num_bytes(self, outputs: int, inputs: int, item_bytes: int) -> int:
        return outputs * inputs * item_bytes


FLOATS = Floats()
