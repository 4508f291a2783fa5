"""The blocks of one request: those it holds, its cached prefix, and those it still needs.

A windowed layer group needs only the blocks that the window of a later token looks at.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import BlockPool
from kv_transfer.block_hash import BlockHash, CacheScope
from kv_transfer.layout import BlockId


def first_live_block(window: int | None, position: int, block_size: int) -> int:
    """Index of the first block that a token at `position`, or any later one, still looks at."""
    if window is None:
        return 0
    return max(0, position - window + 1) // block_size


def first_kept_block(window: int | None, num_tokens: int, block_size: int) -> int:
    """Index of the first block that a worker needs of a prompt computed elsewhere.

    The next token looks at some blocks. The same prompt, when it comes again, is computed from its
    last whole block on and may look at one block more.
    """
    return first_live_block(window, (num_tokens - 1) // block_size * block_size, block_size)


def span_blocks(window: int, num_step_tokens: int, block_size: int) -> int:
    """Most blocks that `num_step_tokens` consecutive tokens and their windows span."""
    return (window + num_step_tokens - 2) // block_size + 2


@dataclass(eq=False)
class RequestBlocks:
    """The blocks of one request, written by `KvCache` alone."""

    scope: CacheScope
    hashes: list[BlockHash]  # of the full blocks whose tokens are known
    tables: list[npt.NDArray[np.int32]]  # per group, [most blocks the request can ever have]
    is_shared: bool  # by the prefix cache
    num_blocks: int = 0  # entries in use, the same in every group
    num_stored: int = 0  # leading blocks that are named, or were when a window left them
    first_live: list[int] = field(default_factory=list)  # per group
    filled: list[int] = field(default_factory=list)  # per group, entries up to here hold blocks
    views: tuple[npt.NDArray[np.int32], ...] = ()  # per group, tables[:num_blocks]
    pushed_from: list[int] | None = None  # per group, entries that a push may still read
    twins: list[tuple[int, BlockId]] = field(default_factory=list)  # (group, block), given way
    awaits: bool = False  # was once refused for want of blocks

    def blocks(self, group: int, start: int = 0) -> list[BlockId]:
        """Blocks held from entry `start` of the table on, without the null block."""
        return [BlockId(b) for b in self.tables[group][start : self.num_blocks].tolist() if b]


def longest_match(
    hashes: Sequence[BlockHash],
    pools: Sequence[BlockPool],
    windows: Sequence[int | None],
    block_size: int,
    live_position: int | None,
) -> int:
    """Number of leading blocks of a chain that are cached in every group (`pools`, `windows`).

    A windowed group needs only the blocks that a token at `live_position` looks at (None: the first
    token after the prefix). If every group is windowed, a prefix of which no block is needed counts
    as not cached: 0.
    """
    full = [pool for pool, window in zip(pools, windows) if window is None]
    length = min((pool.num_resident(hashes) for pool in full), default=len(hashes))
    windowed = [(pool, window) for pool, window in zip(pools, windows) if window is not None]
    resident_from = [length] * len(windowed)  # from there on, all up to `length` are
    while True:
        position = length * block_size if live_position is None else live_position
        for index, (pool, window) in enumerate(windowed):
            live = first_live_block(window, position, block_size)
            start = min(resident_from[index], length)
            while start > live and pool.find(hashes[start - 1]) is not None:
                start -= 1
            resident_from[index] = start
            if start > live:  # a shorter prefix with the block before `start` lacks it too
                length = start - 1
                while length > live and pool.find(hashes[length - 1]) is None:
                    length -= 1
                break
        else:
            needed = full or any(
                first_live_block(window, position, block_size) < length for _, window in windowed
            )
            return length if needed else 0


@dataclass(frozen=True)
class BlockNeeds:
    """What one request needs per group: cached blocks to pin and fresh ones to acquire."""

    num_cached: int  # leading blocks, in every group; those that a window has left included
    starts: list[int]  # per group, where the entries that are needed start
    ends: list[int]
    cached: list[list[BlockHash]]  # per group, of the entries from `starts` to `num_cached`

    @property
    def num_fresh(self) -> list[int]:
        return [end - max(start, self.num_cached) for start, end in zip(self.starts, self.ends)]

    def fit(self, pools: Sequence[BlockPool], kept: Sequence[int]) -> bool:
        """Whether every pool has that many free blocks and `kept` more."""
        return all(
            fresh + pool.num_unused(cached) + more <= pool.num_free
            for fresh, cached, more, pool in zip(self.num_fresh, self.cached, kept, pools)
        )

    def beside(self, other: BlockNeeds, pools: Sequence[BlockPool]) -> list[int]:
        """Per group, free blocks that this request takes once `other` has its own. A cached
        block that both need, or that is held already, is not counted twice."""
        lacked = []
        for fresh, cached, theirs, pool in zip(self.num_fresh, self.cached, other.cached, pools):
            shared = set(theirs)
            lacked.append(fresh + pool.num_unused([h for h in cached if h not in shared]))
        return lacked

    def fit_beside(self, pools: Sequence[BlockPool], held: Sequence[Set[BlockId]]) -> bool:
        """Whether every pool has enough blocks beside those in `held`, if all others were free.
        Cached blocks among `held` are not counted twice."""
        for fresh, cached, blocks, pool in zip(self.num_fresh, self.cached, held, pools):
            num_own = sum(pool.find(h) not in blocks for h in cached)
            if fresh + num_own + len(blocks) >= pool.num_blocks:  # one is the null block
                return False
        return True
