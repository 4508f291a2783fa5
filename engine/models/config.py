"""A decoder's shape and arithmetic, as data. `families` reads it from a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from engine.kernels.protocol import Activation
from engine.models.linear.floats import FLOATS
from engine.models.linear.method import WeightFormat
from engine.models.rope import RopeConfig
from kv_transfer.layout import KvLayout, LayerGroup, TensorSpec


@dataclass(frozen=True)
class MoeConfig:
    """Sparse MLPs: which layers have them and how a token chooses its experts."""

    layers: tuple[int, ...]
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalise: bool
    """Whether the chosen experts' probabilities are scaled to sum to 1."""
    block_name: str
    """The layer's module in tensor names: mlp or block_sparse_moe."""
    projections: tuple[str, str, str]
    """An expert's gate, up and down projections in tensor names."""


@dataclass(frozen=True)
class WeightNames:
    """Tensors' names in a checkpoint. Norms of a layer follow its prefix; None: it has none."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention_out_norm: str | None = None
    """Over what attention adds to the residual."""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    """Over what the MLP adds to the residual."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the decoder's arithmetic; sizes are over all ranks."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    ropes: tuple[RopeConfig, ...]
    """Per layer."""
    windows: tuple[int | None, ...]
    """Per layer: tokens it looks back, itself included; None for all."""
    attention_scale: float
    """Multiplies queries' products with keys."""
    activation: Activation
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    weights: WeightFormat = FLOATS
    """How the matrices of products are kept."""
    names: WeightNames = WeightNames()

    @property
    def longest_context(self) -> int:
        """Tokens. YaRN reaches beyond the positions that the config states."""
        yarns = (rope for rope in self.ropes if rope.kind == "yarn")
        stretched = (int(rope.original_max_positions * rope.factor) for rope in yarns)
        return max(self.max_position_embeddings, *stretched, 0)

    @cached_property
    def distinct_ropes(self) -> tuple[RopeConfig, ...]:
        """Each rope once, in the order of the layers."""
        return tuple(dict.fromkeys(self.ropes))

    def kv_layout(self, block_size: int, dtype: str) -> KvLayout:
        """K and V of every layer; each run of layers with one window is a group."""
        tensors = tuple(
            TensorSpec(name, self.num_kv_heads, self.head_dim, dtype) for name in ("k", "v")
        )
        runs = _runs(self.windows)
        groups = (LayerGroup(first, count, tensors, window) for first, count, window in runs)
        return KvLayout(block_size, tuple(groups))


def _runs(windows: tuple[int | None, ...]) -> Iterator[tuple[int, int, int | None]]:
    first = 0
    for layer in range(1, len(windows) + 1):
        if layer == len(windows) or windows[layer] != windows[first]:
            yield first, layer - first, windows[first]
            first = layer
