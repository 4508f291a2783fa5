"""How much of a prompt is cached: read at every try to place it, so it looks at few blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_pool import BlockPool
from engine.windows import first_live_block
from kv_transfer.block_hash import BlockHash


def longest_match(
    hashes: Sequence[BlockHash],
    pools: Sequence[BlockPool],
    windows: Sequence[int | None],
    block_size: int,
    live_position: int | None,
) -> int:
    """Most leading blocks of a chain that are cached in every group (`pools`, `windows`).

    A windowed group needs those alone that a token at `live_position` looks at (None: the first
    token after the prefix). Blocks that no group needs count only with one behind them that was
    found: where every group is windowed, a prefix of which nothing is needed is not cached, 0.
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
