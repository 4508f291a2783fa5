"""From a checkpoint's tensors to the decoder's weights: names, fused projections, shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import CheckpointError
from engine.kernels.protocol import Activation, HeadNorms
from engine.models.config import ModelConfig, MoeConfig
from engine.models.linear.method import Linear, Target, load_linear
from engine.models.mlp import DenseMlp, Mlp, MoeMlp, experts_of
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

    def read(
        self, name: str, shape: tuple[int, ...], *parts: slice, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read a tensor of this shape, or the part that `parts` select along its leading
        dimensions. `dtype`: None is any floating-point type. Raises CheckpointError."""

    def source_of(self, name: str) -> str:
        """Name what holds the tensor, for errors."""

    def ignore(self, name: str) -> None:
        """Accept a tensor that may be there and is not needed."""

    def check_all_read(self) -> None:
        """Raise CheckpointError naming tensors that nothing asked for."""


_ALL = slice(None)
_Matrix = tuple[str, tuple[int, int], slice, slice]  # module, whole shape, rows and columns of it


def _is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are finite in `dtype`. NaN spreads to both ends. One pass, and no copy."""
    ends = torch.stack(torch.aminmax(tensor)).to(dtype)
    return bool(ends.isfinite().all())


class WeightLoader:
    """Reads one rank's weights in the dtype and on the device they are used in. It is what formats
    read matrices from (`linear.method.MatrixSource`)."""

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
        self._target = Target(dtype, device)
        # The embedding, where the head can be a view of it.
        self._shared: torch.Tensor | None = None

    def load(self) -> DecoderWeights:
        """Read all weights. Raises CheckpointError for a missing, misshapen or unknown tensor, and
        for one with NaN or infinite values."""
        config, on_cpu = self._config, self._target.device.type == "cpu"
        names = config.names
        shape, rows = (config.vocab_size, config.hidden_size), _slice(self._shard.vocab)
        stored = self.floats(f"{names.embedding}.weight", shape, rows)
        embedding = stored.to(self._embedding_dtype(stored), copy=on_cpu).contiguous()
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        norm = self._norm(names.norm, config.hidden_size)
        head = names.head
        if config.tie_word_embeddings:
            self._checkpoint.ignore(f"{names.head}.weight")
            head, self._shared = names.embedding, None if on_cpu else embedding
        linear = self._linear([(head, shape, rows, _ALL)], None)
        self._checkpoint.check_all_read()
        return DecoderWeights(embedding, layers, norm, linear, self._target.dtype)

    def floats(self, name: str, shape: tuple[int, ...], *parts: slice) -> torch.Tensor:
        if self._shared is not None:
            return self._shared
        tensor = self._checkpoint.read(name, shape, *parts).to(self._target.device)
        self._check_finite(name, tensor)
        return tensor

    def integers(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *parts: slice
    ) -> torch.Tensor:
        tensor = self._checkpoint.read(name, shape, *parts, dtype=dtype)
        return tensor.to(self._target.device)

    def _linear(
        self,
        matrices: Sequence[_Matrix],
        bias: torch.Tensor | None,
        gate: Activation | None = None,
    ) -> Linear:
        """Load the product of matrices whose rows follow each other."""
        kept, *others = (self._config.weights.of(module) for module, *_ in matrices)
        if any(other != kept for other in others):
            modules = ", ".join(module for module, *_ in matrices)
            raise CheckpointError(f"{modules} are one product and must be quantised alike")
        parts = [kept.read(self, *matrix) for matrix in matrices]
        return load_linear(kept, parts, bias, self._target, gate=gate)

    def _embedding_dtype(self, stored: torch.Tensor) -> torch.dtype:
        """On a CPU bf16 is widened when it is looked up, which is exact."""
        narrow = self._target.dtype == torch.float32 and stored.dtype == torch.bfloat16
        return stored.dtype if narrow and stored.device.type == "cpu" else self._target.dtype

    def _norm(self, name: str, width: int) -> torch.Tensor:
        """Read a norm, in float32: 1 + weight in bf16 would lose what the weight says."""
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
        """Read a tensor that is no product's. `dtype`: None is that of activations."""
        tensor = self._checkpoint.read(name, shape, *parts)
        # clone: a part of a mapped file must not keep the file's pages in use
        tensor = tensor.to(self._target.device, dtype or self._target.dtype, copy=True).contiguous()
        self._check_finite(name, tensor)
        return tensor

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if self._target.device.type != "meta" and not _is_finite(tensor, self._target.dtype):
            raise CheckpointError(
                f"{self._checkpoint.source_of(name)}: tensor {name} has values that are not finite"
                f" in {self._target.dtype}: the file is damaged, or needs another engine.dtype"
            )

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
        """Load the query, key and value projections of this rank's heads, as one."""
        config, shard = self._config, self._shard
        matrices: list[_Matrix] = []
        biases = []
        for name, all_heads, heads in (
            ("q_proj", config.num_heads, shard.heads),
            ("k_proj", config.num_kv_heads, shard.kv_heads),
            ("v_proj", config.num_kv_heads, shard.kv_heads),
        ):
            rows = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
            shape = (all_heads * config.head_dim, config.hidden_size)
            matrices.append((f"{prefix}{name}", shape, rows, _ALL))
            if config.qkv_bias:
                biases.append(self._read(f"{prefix}{name}.bias", shape[:1], rows))
        return self._linear(matrices, torch.cat(biases) if biases else None)

    def _columns(self, name: str, width: int, has_bias: bool) -> Linear:
        """Load a projection back to the hidden size, split by columns; its bias is added once."""
        hidden = self._config.hidden_size
        bias = self._read(f"{name}.bias", (hidden,)) if has_bias else None
        matrix = name, (hidden, width), _ALL, part(width, self._shard)
        return self._linear([matrix], bias if self._shard.rank == 0 else None)

    def _dense(self, prefix: str, width: int) -> DenseMlp:
        return self._gated(prefix, ("gate_proj", "up_proj", "down_proj"), width)

    def _gated(self, prefix: str, names: tuple[str, str, str], width: int) -> DenseMlp:
        gate, up, down = (f"{prefix}{name}" for name in names)
        hidden, bias = self._config.hidden_size, self._config.mlp_bias
        rows = part(width, self._shard)
        biases = [self._read(f"{name}.bias", (width,), rows) for name in (gate, up) if bias]
        return DenseMlp(
            self._linear(
                [(name, (width, hidden), rows, _ALL) for name in (gate, up)],
                torch.cat(biases) if biases else None,
                self._config.activation,
            ),
            self._columns(down, width, bias),
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


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)
