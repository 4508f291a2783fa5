"""Own every KV block of one layer group: who uses it, what it holds, when it may be reused.

A block is in exactly one state:

1. null: block 0, readable, never owned;
2. free: nobody uses it and it holds nothing;
3. in use: referenced by one or more requests, with or without a hash;
4. cached: referenced by nobody, its hash says what it holds; may be evicted;
5. quarantined: referenced by nobody, but a late writer could still touch it.

Eviction takes the least recently used cached block. In a leaf-first pool a block with a resident
child in the hash chain is not evictable, so what is resident is always closed under "parent of".
A request that uses a block uses its ancestors too, hence every cached block can be had in the end.
Pools of windowed groups are not leaf-first: their requests let go of ancestors first.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kv_transfer.block_hash import BlockHash
from kv_transfer.layout import NULL_BLOCK, BlockId


class BlockPool:
    """`num_blocks` includes the null block. `on_evicted` gets each hash that is forgotten."""

    def __init__(
        self,
        num_blocks: int,
        leaf_first: bool = True,
        on_evicted: Callable[[BlockHash], None] | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs a block beside the null block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._leaf_first = leaf_first
        self._on_evicted = on_evicted
        self._refs = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._parent_hash: list[BlockHash | None] = [None] * num_blocks
        self._num_children = [0] * num_blocks
        self._last_used = [0] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._free = [BlockId(block) for block in range(num_blocks - 1, 0, -1)]
        self._num_cached = 0
        self._evictable: list[tuple[int, BlockId]] = []  # heap; an entry may be out of date
        self._quarantined: set[BlockId] = set()
        self._clock = 0

    # --- counts ---------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that `acquire` can hand out, cached ones included."""
        return len(self._free) + self._num_cached

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        return self._by_hash.get(block_hash)

    def num_resident(self, chain: Sequence[BlockHash]) -> int:
        """Number of leading hashes of a chain that are resident, in a leaf-first pool."""
        assert self._leaf_first
        return bisect.bisect_left(chain, True, key=lambda h: h not in self._by_hash)

    def num_unused(self, chain: Sequence[BlockHash]) -> int:
        """Resident blocks of a chain that nobody uses. They count as free until pinned."""
        refs, by_hash = self._refs, self._by_hash
        if self._leaf_first:  # what is used comes first
            return len(chain) - bisect.bisect_left(chain, True, key=lambda h: not refs[by_hash[h]])
        return sum(not refs[by_hash[h]] for h in chain)

    # --- taking and giving back -----------------------------------------------------------------

    def acquire(self, count: int) -> list[BlockId] | None:
        """Take `count` blocks without known content. None, and nothing is taken, if too few are
        free.

        Cached blocks are evicted only when no free block is left.
        """
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each resident block, cached or in use."""
        for block in blocks:
            if self._refs[block] == 0:
                self._num_cached -= 1
            self._refs[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference of each. A block without references is cached, or free if it has no
        hash."""
        self._clock += 1
        for block in blocks:
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} is released more often than it was taken"
            self._refs[block] = refs
            if refs:
                continue
            if self._hash[block] is None:
                self._free.append(block)
            else:
                self._num_cached += 1
                self._last_used[block] = self._clock
                self._offer(block)

    def quarantine(self, blocks: Iterable[BlockId]) -> None:
        """Take blocks away from their one owner without making them free."""
        for block in blocks:
            assert self._hash[block] is None, f"block {block} is shared: nobody may write it"
            assert self._refs[block] == 1, f"block {block} has {self._refs[block]} owners"
            self._refs[block] = 0
            self._quarantined.add(block)

    def unquarantine(self, blocks: Iterable[BlockId]) -> None:
        """The writer has provably stopped: the blocks are free."""
        for block in blocks:
            self._quarantined.remove(block)
            self._free.append(block)

    # --- content --------------------------------------------------------------------------------

    def store(self, block: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> bool:
        """Make a full block in use shareable under its hash. False: another block has that hash."""
        if block_hash in self._by_hash:
            return self._by_hash[block_hash] == block
        assert self._refs[block] > 0, f"block {block} is named while nobody uses it"
        assert self._hash[block] is None, f"block {block} is named twice"
        self._hash[block] = block_hash
        self._parent_hash[block] = parent
        self._by_hash[block_hash] = block
        if self._leaf_first and parent is not None:
            self._num_children[self._by_hash[parent]] += 1
        return True

    # --- eviction -------------------------------------------------------------------------------

    def _is_evictable(self, block: BlockId) -> bool:
        return (
            self._hash[block] is not None
            and self._refs[block] == 0
            and self._num_children[block] == 0
        )

    def _offer(self, block: BlockId) -> None:
        if self._num_children[block]:
            return  # offered when its last child goes
        heapq.heappush(self._evictable, (self._last_used[block], block))
        if len(self._evictable) > 4 * self.num_blocks:
            self._evictable = [
                (self._last_used[b], b) for b in self._by_hash.values() if self._is_evictable(b)
            ]
            heapq.heapify(self._evictable)

    def _evict(self) -> BlockId:
        while True:
            last_used, block = heapq.heappop(self._evictable)
            if last_used == self._last_used[block] and self._is_evictable(block):
                break
        block_hash, parent = self._hash[block], self._parent_hash[block]
        assert block_hash is not None
        self._hash[block] = self._parent_hash[block] = None
        del self._by_hash[block_hash]
        self._num_cached -= 1
        if self._leaf_first and parent is not None:
            parent_block = self._by_hash[parent]
            self._num_children[parent_block] -= 1
            if self._is_evictable(parent_block):
                self._offer(parent_block)
        if self._on_evicted is not None:
            self._on_evicted(block_hash)
        return block

    # --- integrity ------------------------------------------------------------------------------

    def check_integrity(self, references: Mapping[BlockId, int], parked: Sequence[BlockId]) -> None:
        """Compare with what the owners say they hold: references of each block, and quarantined
        blocks.

        Raises AssertionError with the values when a block is leaked, owned twice or misfiled.
        """
        expected = {block: count for block, count in references.items() if count}
        actual = {BlockId(b): refs for b, refs in enumerate(self._refs) if refs}
        assert actual == expected, f"references {actual} differ from the owners' {expected}"
        assert NULL_BLOCK not in actual, "the null block is owned"
        assert sorted(parked) == sorted(self._quarantined), (
            f"quarantined {sorted(self._quarantined)}, owners say {sorted(parked)}"
        )
        cached = [b for b in self._by_hash.values() if self._refs[b] == 0]
        assert len(cached) == self._num_cached, f"{len(cached)} cached, counted {self._num_cached}"
        states = Counter([NULL_BLOCK, *self._free, *cached, *actual, *self._quarantined])
        assert states == Counter(range(self.num_blocks)), f"blocks misfiled: {states}"
        named = {h: BlockId(b) for b, h in enumerate(self._hash) if h is not None}
        assert named == self._by_hash, "hashes and blocks disagree"
        self._check_eviction()

    def _check_eviction(self) -> None:
        children: Counter[BlockId] = Counter()
        for block in self._by_hash.values() if self._leaf_first else ():
            parent = self._parent_hash[block]
            if parent is None:
                continue
            assert parent in self._by_hash, f"block {block} is resident without its parent"
            children[self._by_hash[parent]] += 1
            assert self._refs[self._by_hash[parent]] or not self._refs[block], (
                f"block {block} is in use and its parent is not"
            )
        counted = {b: count for b, count in enumerate(self._num_children) if count}
        assert counted == dict(children), f"children {counted} differ from {dict(children)}"
        offered = {block for used, block in self._evictable if used == self._last_used[block]}
        missing = [b for b in self._by_hash.values() if self._is_evictable(b) and b not in offered]
        assert not missing, f"blocks {missing} can never be evicted"
