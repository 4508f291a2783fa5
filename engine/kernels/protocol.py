"""What the decoder needs beyond matrix products: the protocol of all kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from engine.kernels.paged_kv import LayerKv
from engine.kernels.step_batch import GroupBatch, StepBatch


class Activation(StrEnum):
    """What is applied to the gate of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with tanh."""


@dataclass(frozen=True)
class AttentionShape:
    """One rank's attention; sizes are this rank's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of the norms over a head's query and key
    scale: float  # of queries' products with keys

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class HeadNorms:
    """Weights, float32 [head_dim], of the RMS norms over each head's query and key."""

    query: torch.Tensor
    key: torch.Tensor


@dataclass(frozen=True)
class Rotation:
    """A step's cosines and sines, float32 [num_tokens, head_dim / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Kernels(Protocol):
    """Every method takes and returns tensors of the model's dtype; sums are taken in float32, and
    norms' weights are float32."""

    @property
    def name(self) -> str: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise [n, width] over the width."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `x` to `residual` in place and return the sum's norm."""

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up: [n, 2 * width] -> [n, width]."""

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        norms: HeadNorms | None,
        rotation: Rotation,
        kv: LayerKv,
        group: GroupBatch,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys of [n, qkv_width], write keys and values to their slots.

        Returns the queries, [n, num_heads, head_dim].
        """

    def attend(
        self,
        queries: torch.Tensor,
        kv: LayerKv,
        batch: StepBatch,
        group: GroupBatch,
        shape: AttentionShape,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention over each sequence's blocks: [n, num_heads, head_dim] -> same shape."""
