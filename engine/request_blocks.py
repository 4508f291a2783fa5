"""Which blocks one request holds: its table in every layer group, and its prompt's hashes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer.block_hash import BlockHash
from kv_transfer.layout import BlockId


@dataclass(eq=False)
class RequestBlocks:
    """Written by `KvCache` alone."""

    seed: BlockHash
    hashes: list[BlockHash]  # of the full blocks whose tokens are known
    tables: list[npt.NDArray[np.int32]]  # per group, [most blocks the request can ever have]
    num_blocks: int = 0  # entries in use, the same in every group
    num_stored: int = 0  # leading blocks that are named, or were when a window left them
    first_live: list[int] = field(default_factory=list)  # per group
    filled: list[int] = field(default_factory=list)  # per group, entries up to here hold blocks
    views: tuple[npt.NDArray[np.int32], ...] = ()  # per group, tables[:num_blocks]
    pushed_from: list[int] | None = None  # per group, entries that a push may still read
    twins: list[tuple[int, BlockId]] = field(default_factory=list)  # (group, block), given way
    awaits: bool = False  # was once refused for want of blocks

    def blocks(self, group: int, start: int = 0) -> list[BlockId]:
        """Blocks held from the table's entry `start` on, without the null block."""
        return [BlockId(b) for b in self.tables[group][start : self.num_blocks].tolist() if b]
