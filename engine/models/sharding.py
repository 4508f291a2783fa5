"""Which part of every weight a tensor-parallel rank holds.

Projections into heads and into the MLP are split by output rows, projections back by input columns,
so that one sum over the ranks ends each half of a layer. Key-value heads are replicated when there
are fewer than ranks. Embedding and head are split by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ShardingError
from engine.models.config import ModelConfig


@dataclass(frozen=True)
class Shard:
    """One rank's ranges of rows or columns."""

    rank: int
    size: int
    heads: range
    kv_heads: range
    vocab: range


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """Divide the model among the ranks. Raises ShardingError when it does not divide."""
    widths = {"attention heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.moe is not None:
        widths["moe_intermediate_size"] = config.moe.intermediate_size
    for name, width in widths.items():
        if width % size:
            raise ShardingError(f"{width} {name} cannot be split over {size} ranks")
    larger, smaller = max(config.num_kv_heads, size), min(config.num_kv_heads, size)
    if larger % smaller:
        raise ShardingError(
            f"{config.num_kv_heads} key-value heads cannot be split or replicated over {size} ranks"
        )
    heads = config.num_heads // size
    per_group = config.num_heads // config.num_kv_heads
    first, last = rank * heads, (rank + 1) * heads
    rows = -(-config.vocab_size // size)
    return Shard(
        rank=rank,
        size=size,
        heads=range(first, last),
        kv_heads=range(first // per_group, (last - 1) // per_group + 1),
        vocab=range(min(rank * rows, config.vocab_size), min((rank + 1) * rows, config.vocab_size)),
    )


def part(width: int, shard: Shard) -> slice:
    """A rank's equal part of a dimension."""
    each = width // shard.size
    return slice(shard.rank * each, (shard.rank + 1) * each)
