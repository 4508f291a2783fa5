"""From a checkpoint's tensors to the decoder's weights: names, fused projections, shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import CheckpointError
from engine.kernels.protocol import Activation, HeadNorms
from engine.models.config import ModelConfig, MoeConfig
from engine.models.mlp import DenseMlp, Linear, Mlp, MoeMlp, experts_of
from engine.models.sharding import Shard, part


@dataclass(frozen=True)
class LayerWeights:
    input_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    attention_out: Linear
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    embedding: torch.Tensor  # [this rank's vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
    dtype: torch.dtype  # of activations; norms are float32


class TensorSource(Protocol):
    """Where weights come from: a `Checkpoint`, or what stands in for one."""

    def read(self, name: str, shape: tuple[int, ...], *parts: slice) -> torch.Tensor:
        """A tensor of this shape, or the part that `parts` select along its leading dimensions.
        Raises CheckpointError."""

    def source_of(self, name: str) -> str:
        """What holds the tensor, for errors."""

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""

    def check_all_read(self) -> None:
        """Raise CheckpointError naming tensors that nothing asked for."""


def _is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are, in `dtype`. NaN spreads to both ends. One pass, and no copy."""
    ends = torch.stack(torch.aminmax(tensor)).to(dtype)
    return bool(ends.isfinite().all())


class WeightLoader:
    """Reads one rank's weights in the dtype and on the device they are used in."""

    def __init__(
        self,
        checkpoint: TensorSource,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._shard = shard
        self._dtype = dtype
        self._device = device

    def load(self) -> DecoderWeights:
        """All weights. Raises CheckpointError for a missing, misshapen or unknown tensor, and for
        one with NaN or infinite values."""
        config, names = self._config, self._config.names
        stored = self._vocabulary(f"{names.embedding}.weight")
        embedding = stored
        if self._device.type == "cpu":
            embedding = stored.to(self._embedding_dtype(stored), copy=True).contiguous()
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        norm = self._norm(names.norm, config.hidden_size)
        if config.tie_word_embeddings:
            self._checkpoint.ignore(f"{names.head}.weight")
            head = stored  # on a CPU packed, elsewhere shared
        else:
            head = self._vocabulary(f"{names.head}.weight")
        self._checkpoint.check_all_read()
        return DecoderWeights(embedding, layers, norm, self._linear([head], None), self._dtype)

    def _linear(
        self,
        parts: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        gate: Activation | None = None,
    ) -> Linear:
        return Linear(parts, bias, dtype=self._dtype, device=self._device, gate=gate)

    def _embedding_dtype(self, stored: torch.Tensor) -> torch.dtype:
        """bf16 is widened when it is looked up, which is exact."""
        narrow = self._dtype == torch.float32 and stored.dtype == torch.bfloat16
        return stored.dtype if narrow else self._dtype

    def _norm(self, name: str, width: int) -> torch.Tensor:
        """In float32: 1 + weight in bf16 would lose what the weight says."""
        return (
            self._read(f"{name}.weight", (width,), dtype=torch.float32) + self._config.norm_offset
        )

    def _norm_of(self, prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._norm(prefix + name, self._config.hidden_size)

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        *parts: slice,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`dtype`: None is that of activations."""
        tensor = self._checkpoint.read(name, shape, *parts)
        # clone: a part of a mapped file must not keep the file's pages in use
        tensor = tensor.to(self._device, dtype or self._dtype, copy=True).contiguous()
        self._check_finite(name, tensor)
        return tensor

    def _matrix(self, name: str, shape: tuple[int, ...], *parts: slice) -> torch.Tensor:
        """For a product or an embedding. On a CPU as the checkpoint has it, mapped: it is packed
        from there."""
        if self._device.type != "cpu":
            return self._read(name, shape, *parts)
        tensor = self._checkpoint.read(name, shape, *parts)
        self._check_finite(name, tensor)
        return tensor

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if self._device.type != "meta" and not _is_finite(tensor, self._dtype):
            raise CheckpointError(
                f"{self._checkpoint.source_of(name)}: tensor {name} has values that are not finite"
                f" in {self._dtype}: the file is damaged, or needs another engine.dtype"
            )

    def _vocabulary(self, name: str) -> torch.Tensor:
        rows = slice(self._shard.vocab.start, self._shard.vocab.stop)
        return self._matrix(name, (self._config.vocab_size, self._config.hidden_size), rows)

    def _layer(self, index: int) -> LayerWeights:
        config = self._config
        prefix, names = f"{config.names.layers}.{index}.", config.names
        attention = f"{prefix}self_attn."
        norms = None
        if config.qk_norm:
            norms = HeadNorms(
                self._norm(f"{attention}q_norm", config.head_dim),
                self._norm(f"{attention}k_norm", config.head_dim),
            )
        moe = config.moe
        return LayerWeights(
            input_norm=self._norm(prefix + names.input_norm, config.hidden_size),
            qkv=self._qkv(attention),
            head_norms=norms,
            attention_out=self._columns(
                f"{attention}o_proj", config.num_heads * config.head_dim, config.o_bias
            ),
            attention_out_norm=self._norm_of(prefix, names.attention_out_norm),
            mlp_norm=self._norm(prefix + names.mlp_norm, config.hidden_size),
            mlp_out_norm=self._norm_of(prefix, names.mlp_out_norm),
            mlp=self._moe(prefix, moe)
            if moe is not None and index in moe.layers
            else self._dense(f"{prefix}mlp.", config.intermediate_size),
        )

    def _qkv(self, prefix: str) -> Linear:
        """Query, key and value projections of this rank's heads, as one."""
        config, shard = self._config, self._shard
        weights, biases = [], []
        for name, all_heads, heads in (
            ("q_proj", config.num_heads, shard.heads),
            ("k_proj", config.num_kv_heads, shard.kv_heads),
            ("v_proj", config.num_kv_heads, shard.kv_heads),
        ):
            rows = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
            shape = (all_heads * config.head_dim, config.hidden_size)
            weights.append(self._matrix(f"{prefix}{name}.weight", shape, rows))
            if config.qkv_bias:
                biases.append(self._read(f"{prefix}{name}.bias", shape[:1], rows))
        return self._linear(weights, torch.cat(biases) if biases else None)

    def _columns(self, name: str, width: int, has_bias: bool) -> Linear:
        """A projection back to the hidden size, split by columns; its bias is added once."""
        hidden = self._config.hidden_size
        weight = self._matrix(
            f"{name}.weight", (hidden, width), slice(None), part(width, self._shard)
        )
        bias = self._read(f"{name}.bias", (hidden,)) if has_bias else None
        return self._linear([weight], bias if self._shard.rank == 0 else None)

    def _dense(self, prefix: str, width: int) -> DenseMlp:
        return self._gated(prefix, ("gate_proj", "up_proj", "down_proj"), width)

    def _gated(self, prefix: str, names: tuple[str, str, str], width: int) -> DenseMlp:
        gate, up, down = names
        hidden, bias = self._config.hidden_size, self._config.mlp_bias
        rows = part(width, self._shard)
        weights = [
            self._matrix(f"{prefix}{name}.weight", (width, hidden), rows) for name in (gate, up)
        ]
        biases = [self._read(f"{prefix}{name}.bias", (width,), rows) for name in (gate, up) if bias]
        return DenseMlp(
            self._linear(weights, torch.cat(biases) if biases else None, self._config.activation),
            self._columns(f"{prefix}{down}", width, bias),
            self._config.activation,
        )

    def _moe(self, prefix: str, moe: MoeConfig) -> MoeMlp:
        block = f"{prefix}{moe.block_name}."
        experts = [
            self._gated(f"{block}experts.{expert}.", moe.projections, moe.intermediate_size)
            for expert in range(moe.num_experts)
        ]
        router = self._read(f"{block}gate.weight", (moe.num_experts, self._config.hidden_size))
        return MoeMlp(moe, router, experts_of(experts))
