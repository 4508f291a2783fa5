"""How many blocks a request needs of every layer group's pool before it can start. It is computed
at every try and changes nothing.

Only the entries of a span of a group's table are needed. A window has left those before the span,
and acquires those behind it as it moves on.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from engine.block_pool import BlockPool
from kv_transfer.block_hash import BlockHash
from kv_transfer.layout import BlockId


@dataclass(frozen=True)
class BlockNeeds:
    """Of one request, per group: cached blocks to pin and fresh ones to acquire."""

    num_cached: int  # leading blocks, in every group; those that a window has left included
    starts: list[int]  # per group, where the entries that are needed start
    ends: list[int]
    cached: list[list[BlockHash]]  # per group, of the entries from `starts` to `num_cached`

    @property
    def num_fresh(self) -> list[int]:
        return [end - max(start, self.num_cached) for start, end in zip(self.starts, self.ends)]

    def fit(self, pools: Sequence[BlockPool], kept: Sequence[int]) -> bool:
        """Whether every pool has as many free blocks, and `kept` ones more."""
        return all(
            fresh + pool.num_unused(cached) + more <= pool.num_free
            for fresh, cached, more, pool in zip(self.num_fresh, self.cached, kept, pools)
        )

    def beside(self, other: BlockNeeds, pools: Sequence[BlockPool]) -> list[int]:
        """Per group, free blocks that this one takes once `other` has its own: a cached block that
        both hold, or that somebody holds already, is not taken twice."""
        lacked = []
        for fresh, cached, theirs, pool in zip(self.num_fresh, self.cached, other.cached, pools):
            shared = set(theirs)
            lacked.append(fresh + pool.num_unused([h for h in cached if h not in shared]))
        return lacked

    def fit_beside(self, pools: Sequence[BlockPool], held: Sequence[Set[BlockId]]) -> bool:
        """Whether every pool has as many blocks beside those that are `held`, all else being free:
        what is cached among them is not needed twice."""
        for fresh, cached, blocks, pool in zip(self.num_fresh, self.cached, held, pools):
            num_own = sum(pool.find(h) not in blocks for h in cached)
            if fresh + num_own + len(blocks) >= pool.num_blocks:  # one is the null block
                return False
        return True
