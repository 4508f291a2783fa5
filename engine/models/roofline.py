"""What a decoder's step costs one rank, by its config alone, and how fast a device is at best.

A step reads its bytes and computes, each at the device's peak; the longer counts (Williams et al.
2009, "Roofline"). Launches, sums over ranks, norms and biases are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from engine.models.config import ModelConfig
from engine.models.linear.floats import FLOATS
from engine.models.linear.method import WeightFormat
from engine.models.sharding import shard_of
from kv_transfer.layout import DTYPE_BYTES

Work = tuple[float, float]  # one rank's in one step: bytes of weights and KV that it reads, FLOP


@dataclass(frozen=True)
class Device:
    """A device's peaks. `flops_per_s`: dense products of 16-bit numbers."""

    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: Work) -> float:
        return max(work[0] / self.bytes_per_s, work[1] / self.flops_per_s)


# As published for the SXM or OAM board where there are several; a GB is 1e9 bytes, FLOP/s are dense
# bfloat16 (half of what a data sheet gives "with sparsity"). Sources: NVIDIA's data sheets "A100
# Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU", "HGX B200" (1/8 of a board),
# "L40S", "L4"; AMD's "Instinct MI300X Accelerator".
GPUS = {
    "A100-40GB": Device(40e9, 1555e9, 312e12),
    "A100-80GB": Device(80e9, 2039e9, 312e12),
    "H100": Device(80e9, 3350e9, 989e12),
    "H200": Device(141e9, 4800e9, 989e12),
    "B200": Device(180e9, 7700e9, 2250e12),
    "L40S": Device(48e9, 864e9, 362e12),
    "L4": Device(24e9, 300e9, 121e12),
    "MI300X": Device(192e9, 5300e9, 1307e12),
}


@dataclass(frozen=True)
class RankCost:
    """What the first of `tp_size` ranks holds and does; no rank has more. Its members raise
    ShardingError where the model cannot be split."""

    config: ModelConfig
    dtype: str
    tp_size: int = 1

    @property
    def weight_bytes(self) -> float:
        return self._used(math.inf, 1)[0] + self._own_embedding * DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> float:
        return self._used(math.inf, 1)[1] + self._own_embedding

    @cached_property
    def kv_token_bytes(self) -> int:
        return self.config.kv_layout(1, self.dtype).rank_bytes(0, self.tp_size)

    def held_tokens(self, context: int) -> int:
        """Tokens whose KV a sequence holds: the widest window's, as groups have equal pools."""
        return max(min(context, window or context) for window in self.config.windows)

    def product_flops(self, num_tokens: int, num_sampled: int) -> float:
        """FLOP of the layers' products for all tokens, and the head's for those that are
        sampled."""
        return 2 * num_tokens * self._used(1, num_sampled / num_tokens)[1]

    def prefill(self, num_tokens: int) -> Work:
        """Work of one prompt whose KV is not cached, as if in one step."""
        held = self.held_tokens(num_tokens)
        attention = self._pair_flops * held * (num_tokens - held / 2)
        return self._used(num_tokens, 1)[0], self.product_flops(num_tokens, 1) + attention

    def decode(self, batch: int, context: int) -> Work:
        """Work of a token for each of `batch` sequences that hold `context` tokens."""
        held = batch * self.held_tokens(context)
        flops = self.product_flops(batch, batch) + self._pair_flops * held
        return self._used(batch, 1)[0] + held * self.kv_token_bytes, flops

    @property
    def _pair_flops(self) -> float:
        """FLOP of one token that looks at one other: a product with K and one with V."""
        config = self.config
        return 4 * config.num_layers * config.num_heads * config.head_dim / self.tp_size

    @property
    def _own_embedding(self) -> int:
        """Numbers of the embedding, unless a head of such numbers shares them."""
        if self.config.tie_word_embeddings and self._kept("model.embed_tokens") == FLOATS:
            return 0
        return len(shard_of(self.config, 0, self.tp_size).vocab) * self.config.hidden_size

    def _kept(self, module: str) -> WeightFormat:
        return self.config.weights.of(module)

    def _used(self, num_tokens: float, heads: float) -> tuple[float, float]:
        """Bytes and parameters of the matrices of all layers that `num_tokens` use, if they choose
        all experts equally often, and of so much of the head. A step uses next to no embedding."""
        config, moe, tp = self.config, self.config.moe, self.tp_size
        hidden, shard = config.hidden_size, shard_of(config, 0, tp)
        layers, sparse = config.num_layers, len(moe.layers) if moe else 0
        queries, keys = (len(each) * config.head_dim for each in (shard.heads, shard.kv_heads))
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        attention, mlp, width = "self_attn.", "mlp.", config.intermediate_size // tp
        matrices = [  # how many, what one is called, outputs and inputs
            (layers, f"{attention}q_proj", queries, hidden),
            (2.0 * layers, f"{attention}k_proj", keys, hidden),
            (layers, f"{attention}o_proj", hidden, queries),
            (2.0 * (layers - sparse), f"{mlp}up_proj", width, hidden),
            (layers - sparse, f"{mlp}down_proj", hidden, width),
        ]
        if moe:
            experts = sparse * moe.num_experts
            experts *= 1 - (1 - moe.num_experts_per_token / moe.num_experts) ** num_tokens
            mlp, width = f"{moe.block_name}.experts.0.", moe.intermediate_size // tp
            _, up, down = moe.projections
            matrices += [
                (2 * experts, f"{mlp}{up}", width, hidden),
                (experts, f"{mlp}{down}", hidden, width),
            ]
        sizes = [
            (count, self._kept(f"model.layers.0.{name}"), outputs, inputs)
            for count, name, outputs, inputs in matrices
        ]
        sizes.append((heads, self._kept(head), len(shard.vocab), hidden))
        sizes.append((sparse, FLOATS, moe.num_experts if moe else 0, hidden))  # of routers
        item = DTYPE_BYTES[self.dtype]
        num_bytes = sum(n * kept.num_bytes(rows, columns, item) for n, kept, rows, columns in sizes)
        return num_bytes, sum(n * rows * columns for n, _, rows, columns in sizes)
