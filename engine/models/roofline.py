"""What a decoder's step costs one rank, by its config alone, and how fast a device is at best.

A step reads its bytes and computes, each at the device's peak; the longer counts (Williams et al.
2009, "Roofline"). Launches, sums over ranks, norms and biases are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from engine.models.config import ModelConfig
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
        return self._bytes(math.inf, 1 if self.config.tie_word_embeddings else 2)

    @cached_property
    def kv_token_bytes(self) -> int:
        return self.config.kv_layout(1, self.dtype).rank_bytes(0, self.tp_size)

    def held_tokens(self, context: int) -> int:
        """Tokens whose KV a sequence holds: the widest window's, as groups have equal pools."""
        return max(min(context, window or context) for window in self.config.windows)

    def product_flops(self, num_tokens: int, num_sampled: int) -> float:
        """Of the layers' products for all tokens, and the head's for those that are sampled."""
        parameters = self._bytes(1, num_sampled / num_tokens) / DTYPE_BYTES[self.dtype]
        return 2 * num_tokens * parameters

    def prefill(self, num_tokens: int) -> Work:
        """One prompt whose KV is not cached, as if in one step."""
        held = self.held_tokens(num_tokens)
        attention = self._pair_flops * held * (num_tokens - held / 2)
        return self._bytes(num_tokens, 1), self.product_flops(num_tokens, 1) + attention

    def decode(self, batch: int, context: int) -> Work:
        """A token for each of `batch` sequences that hold `context` tokens."""
        held = batch * self.held_tokens(context)
        flops = self.product_flops(batch, batch) + self._pair_flops * held
        return self._bytes(batch, 1) + held * self.kv_token_bytes, flops

    @property
    def _pair_flops(self) -> float:
        """For one token that looks at one other: a product with K and one with V."""
        config = self.config
        return 4 * config.num_layers * config.num_heads * config.head_dim / self.tp_size

    def _bytes(self, num_tokens: float, tables: float) -> float:
        """Of the matrices of all layers that `num_tokens` use, if they choose all experts equally
        often, and of `tables` of the vocabulary. A step uses the head, next to no embedding."""
        config, moe, tp = self.config, self.config.moe, self.tp_size
        shard = shard_of(config, 0, tp)
        num_sparse = len(moe.layers) if moe else 0
        rows = 2.0 * config.num_layers * config.head_dim * (len(shard.heads) + len(shard.kv_heads))
        rows += (config.num_layers - num_sparse) * 3 * config.intermediate_size / tp
        if moe:
            used = 1 - (1 - moe.num_experts_per_token / moe.num_experts) ** num_tokens
            rows += num_sparse * moe.num_experts * (used * 3 * moe.intermediate_size / tp + 1)
        parameters = config.hidden_size * (rows + tables * len(shard.vocab))
        return parameters * DTYPE_BYTES[self.dtype]
