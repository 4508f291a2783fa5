"""Block tables over one `BlockPool` per layer group, and the prefix cache that all groups share.

Life of a request's blocks:

1. `open` hashes the prompt's full blocks; nothing is held yet.
2. `place` pins the longest cached prefix and acquires the rest, in all groups or in none. In a
   windowed group that is its span only: the blocks that a step's tokens and their windows lie in.
   `place_lease` does so for KV that another worker computes, and leaves who waits first its room.
3. `grow` adds blocks as the output gets longer.
4. `computed` makes full blocks shareable once their KV exists. It releases blocks that have left
   every window: their table entries become null blocks, and as many later prompt blocks are
   acquired.
5. `free` gives everything back, or `quarantine` what a late writer could still touch.

A block whose content is cached already under another id gives way to that twin, so that a request
always holds a cached block together with the cached blocks before it.

A block that leaves one request's window is free only when no other request holds it. A prompt may
wait for that (`num_ready_tokens`). The wait ends: the other request still needs the block, so it
cannot be waiting for this prompt.

`KvEventLog` has what became and ceased to be shareable, in order: a router's index follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from engine.kv.block_pool import BlockPool
from engine.kv.request_blocks import (
    BlockNeeds,
    RequestBlocks,
    first_kept_block,
    first_live_block,
    longest_match,
    span_blocks,
)
from engine.request import BlocksRemovedEvent, BlocksStoredEvent
from kv_transfer.block_hash import (
    BlockHash,
    CacheScope,
    TokenIds,
    chain_hashes,
    chain_root,
    native_chain,
    split_hashes,
)
from kv_transfer.layout import NULL_BLOCK, BlockId, KvLayout

KvEvent = BlocksStoredEvent | BlocksRemovedEvent


class KvEventLog:
    """Own the events since the last `take`. Blocks removed in a row are one event."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._removed: list[BlockHash] = []

    def __bool__(self) -> bool:
        return bool(self._events or self._removed)

    def take(self) -> list[KvEvent]:
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def removed(self, block_hash: BlockHash) -> None:
        self._removed.append(block_hash)

    def stored(self, hashes: Sequence[BlockHash], start: int, is_new: Sequence[bool]) -> None:
        """Add the new blocks of the chain `hashes` from `start` on; `is_new` has a flag for
        each."""
        self._flush_removed()
        for begin, end in _runs(is_new):
            parent = hashes[start + begin - 1] if start + begin else None
            self._events.append(
                BlocksStoredEvent(parent, tuple(hashes[start + begin : start + end]))
            )

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(BlocksRemovedEvent(tuple(self._removed)))
            self._removed = []


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of consecutive true flags."""
    begin = None
    for index, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = index
        elif not flag and begin is not None:
            yield begin, index
            begin = None


class KvCache:
    """All KV blocks of one engine.

    `num_blocks` is per group and includes the null block. `max_step_tokens` is the most tokens of
    one request that a step computes.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        kv_fingerprint: bytes,
        *,
        max_step_tokens: int,
        prefix_cache: bool = True,
    ) -> None:
        self.block_size = layout.block_size
        self.num_blocks = num_blocks
        self.windows = [group.window for group in layout.groups]
        self.block_bytes = [layout.rank_block_bytes(g, 0, 1) for g in range(len(layout.groups))]
        self.events = KvEventLog()
        """Events of the first group that sees everything, else of the first group. What a window
        leaves is evicted before its descendants, and a router follows a chain from its start."""
        announced = self.windows.index(None) if None in self.windows else 0
        self.pools = [
            BlockPool(
                num_blocks,
                leaf_first=group.window is None,
                on_evicted=self.events.removed if index == announced else None,
            )
            for index, group in enumerate(layout.groups)
        ]
        self._announced = announced
        self._windowed = [g for g, window in enumerate(self.windows) if window is not None]
        step = max(max_step_tokens, self.block_size)  # a receiver needs a whole block's window
        self._spans = [
            num_blocks if w is None else span_blocks(w, step, self.block_size) for w in self.windows
        ]
        native_chain()  # compiled now, if ever: not while requests wait
        self._root = chain_root(kv_fingerprint)
        self._prefix_cache = prefix_cache
        self._held: set[RequestBlocks] = set()
        self._parked: dict[RequestBlocks, list[list[BlockId]]] = {}

    # --- a request's blocks ---------------------------------------------------------------------

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(
        self, tokens: TokenIds, scope: CacheScope, max_tokens: int, *, is_shared: bool = True
    ) -> RequestBlocks:
        """`max_tokens`: the most that the request can ever hold, prompt and output. `is_shared`
        False: its blocks have no part in the prefix cache."""
        is_shared &= self._prefix_cache
        hashes: list[BlockHash] = []
        if is_shared:
            hashes = split_hashes(chain_hashes(self._root, scope, tokens, self.block_size))
        capacity = self.num_blocks_of(max_tokens)
        tables = [np.zeros(capacity, np.int32) for _ in self.pools]
        return RequestBlocks(scope, hashes, tables, is_shared)

    def will_push(self, blocks: RequestBlocks, num_receiver_blocks: int, num_tokens: int) -> None:
        """Pushes read the prompt's blocks behind the receiver's: keep those until `free`."""
        kept = [first_kept_block(w, num_tokens, self.block_size) for w in self.windows]
        blocks.pushed_from = [max(first, num_receiver_blocks) for first in kept]

    def place(self, blocks: RequestBlocks, num_tokens: int, headroom: int = 0) -> int | None:
        """Hold blocks for `num_tokens` tokens; returns the number of leading tokens that are
        cached.

        At least one token is left to compute. None, and nothing is held, when a group would keep
        fewer than `headroom` free blocks.
        """
        needs = self._needs_of(blocks, num_tokens)
        return self._hold(blocks, num_tokens, needs, [headroom] * len(self.pools))

    def place_lease(
        self,
        blocks: RequestBlocks,
        num_tokens: int,
        headroom: int = 0,
        first: tuple[RequestBlocks, int] | None = None,
    ) -> int | None:
        """`place` blocks that another worker fills. Blocks that a window has left by the
        prompt's end are not needed. `first` (its blocks, tokens) waits to be placed, and must
        still fit beside these."""
        needs = self._needs_of(blocks, num_tokens, computed_here=False)
        kept = [headroom] * len(self.pools)
        if first is not None:
            theirs = self._needs_of(*first)
            kept = [headroom + count for count in theirs.beside(needs, self.pools)]
            if needs.fit(self.pools, kept):
                self._evict_last(theirs.cached)  # or a block of it could go for one of these
        return self._hold(blocks, num_tokens, needs, kept)

    def _hold(
        self, blocks: RequestBlocks, num_tokens: int, needs: BlockNeeds, kept: list[int]
    ) -> int | None:
        assert not blocks.num_blocks, "blocks are held already"
        if not needs.fit(self.pools, kept):
            self._keep_cached(blocks, needs.cached)
            return None
        total = self.num_blocks_of(num_tokens)
        pinned = self._pin_cached(needs.cached)
        for g, (pool, count, end) in enumerate(zip(self.pools, needs.num_fresh, needs.ends)):
            taken = pool.acquire(count)
            assert taken is not None
            entries = pinned[g] + taken
            blocks.tables[g][:total] = NULL_BLOCK
            blocks.tables[g][end - len(entries) : end] = entries
        blocks.first_live, blocks.filled = needs.starts, needs.ends
        blocks.num_stored = needs.num_cached
        self._held.add(blocks)
        self._set_length(blocks, total)
        return needs.num_cached * self.block_size

    def _needs_of(
        self, blocks: RequestBlocks, num_tokens: int, computed_here: bool = True
    ) -> BlockNeeds:
        bound = (num_tokens - 1) // self.block_size
        live = None if computed_here else bound * self.block_size
        num_cached = longest_match(
            blocks.hashes[:bound], self.pools, self.windows, self.block_size, live
        )
        # Tokens from `position` on will be computed here, and look no further back than that.
        position = num_cached * self.block_size if live is None else live
        starts = [first_live_block(w, position, self.block_size) for w in self.windows]
        total = self.num_blocks_of(num_tokens)
        ends = [self._span_end(g, start, total) for g, start in enumerate(starts)]
        cached = [blocks.hashes[start:num_cached] for start in starts]
        return BlockNeeds(num_cached, starts, ends, cached)

    def _keep_cached(self, blocks: RequestBlocks, cached: list[list[BlockHash]]) -> None:
        """Make the cached prefix of a waiting request the last to be evicted. Done once, because
        it may wait long."""
        if not blocks.awaits:
            blocks.awaits = True
            self._evict_last(cached)

    def _evict_last(self, cached: list[list[BlockHash]]) -> None:
        for pool, prefix in zip(self.pools, self._pin_cached(cached)):
            pool.release(prefix)

    def _pin_cached(self, cached: list[list[BlockHash]]) -> list[list[BlockId]]:
        pinned = []
        for pool, hashes in zip(self.pools, cached):
            found = [pool.find(h) for h in hashes]
            prefix = [block for block in found if block is not None]
            assert len(prefix) == len(found), "a matched block is not resident"
            pool.pin(prefix)
            pinned.append(prefix)
        return pinned

    def _span_end(self, group: int, first_live: int, total: int) -> int:
        """Index behind the last entry that a table of `total` entries holds at once."""
        return min(total, first_live + min(self._spans[group], self.num_blocks - 1))

    def num_ready_tokens(self, blocks: RequestBlocks) -> int:
        """Number of leading tokens that could be computed now: the tables have blocks for them."""
        ready = blocks.num_blocks
        for g in self._windowed:
            if blocks.filled[g] < blocks.num_blocks:
                self._fill(blocks, g)
                ready = min(ready, blocks.filled[g])
        return ready * self.block_size

    def grow(self, blocks: RequestBlocks, num_tokens: int) -> bool:
        """Hold blocks for `num_tokens` tokens. False, and nothing changes, when too few are
        free."""
        total = self.num_blocks_of(num_tokens)
        count = total - blocks.num_blocks
        if count <= 0:
            return True
        if any(pool.num_free < count for pool in self.pools):
            return False
        assert min(blocks.filled) == blocks.num_blocks, "the prompt is not computed yet"
        for pool, table in zip(self.pools, blocks.tables):
            taken = pool.acquire(count)
            assert taken is not None
            table[blocks.num_blocks : total] = taken
        blocks.filled = [total] * len(self.pools)
        self._set_length(blocks, total)
        return True

    def computed(self, blocks: RequestBlocks, tokens: TokenIds, num_computed: int) -> None:
        """The KV of the leading `num_computed` of `tokens` exists: share it, and release what
        windows left."""
        num_full = num_computed // self.block_size
        if blocks.is_shared and num_full > blocks.num_stored:
            self._extend_hashes(blocks, tokens, num_full)
            self._store(blocks, num_full)
        for g in self._windowed:
            self._leave_window(blocks, g, num_computed)

    def free(self, blocks: RequestBlocks) -> None:
        """Release all blocks; shareable ones stay cached. Idempotent."""
        if blocks not in self._held:
            return
        self._held.remove(blocks)
        for g, pool in enumerate(self.pools):
            pool.release(blocks.blocks(g))
        for g, block in blocks.twins:
            self.pools[g].release([block])
        blocks.twins.clear()
        self._set_length(blocks, 0)

    def quarantine(self, blocks: RequestBlocks) -> None:
        """Release the cached prefix and set aside the blocks that were to be written."""
        self._held.remove(blocks)
        parked = []
        for g, pool in enumerate(self.pools):
            fresh = blocks.blocks(g, blocks.num_stored)
            pool.quarantine(fresh)
            parked.append(fresh)
            cached = blocks.blocks(g)
            pool.release(cached[: len(cached) - len(fresh)])
        self._parked[blocks] = parked
        self._set_length(blocks, 0)

    def unquarantine(self, blocks: RequestBlocks) -> None:
        for pool, parked in zip(self.pools, self._parked.pop(blocks)):
            pool.unquarantine(parked)

    def _set_length(self, blocks: RequestBlocks, num_blocks: int) -> None:
        blocks.num_blocks = num_blocks
        blocks.views = tuple(table[:num_blocks] for table in blocks.tables)

    # --- prefix cache ---------------------------------------------------------------------------

    def _extend_hashes(self, blocks: RequestBlocks, tokens: TokenIds, num_full: int) -> None:
        known, size = len(blocks.hashes), self.block_size
        if num_full > known:
            parent = blocks.hashes[-1] if known else self._root
            new = tokens[known * size : num_full * size]
            blocks.hashes += split_hashes(chain_hashes(parent, blocks.scope, new, size, known))

    def _store(self, blocks: RequestBlocks, num_full: int) -> None:
        start, blocks.num_stored = blocks.num_stored, num_full
        new: list[bool] = []
        for g, pool in enumerate(self.pools):
            table = blocks.tables[g]
            for index in range(start, num_full):
                block = BlockId(int(table[index]))
                if block == NULL_BLOCK:
                    stored = False
                else:
                    parent = blocks.hashes[index - 1] if index else None
                    stored = pool.store(block, blocks.hashes[index], parent)
                    if not stored:
                        self._give_way(blocks, g, index)
                if g == self._announced:
                    new.append(stored)
        self.events.stored(blocks.hashes, start, new)

    def _give_way(self, blocks: RequestBlocks, group: int, index: int) -> None:
        """Replace the request's own block by the cached block with the same content."""
        pool = self.pools[group]
        own = BlockId(int(blocks.tables[group][index]))
        twin = pool.find(blocks.hashes[index])
        assert twin is not None, f"block {own} has no twin"
        pool.pin([twin])
        blocks.tables[group][index] = twin
        if blocks.pushed_from is not None and index >= blocks.pushed_from[group]:
            blocks.twins.append((group, own))
        else:
            pool.release([own])

    def _leave_window(self, blocks: RequestBlocks, group: int, num_computed: int) -> None:
        live = first_live_block(self.windows[group], num_computed, self.block_size)
        if blocks.pushed_from is not None:
            live = min(live, blocks.pushed_from[group])
        start = blocks.first_live[group]
        if live <= start:
            return
        left = [BlockId(b) for b in blocks.tables[group][start:live].tolist() if b]
        blocks.tables[group][start:live] = NULL_BLOCK
        blocks.first_live[group] = live
        self.pools[group].release(left)
        self._fill(blocks, group)

    def _fill(self, blocks: RequestBlocks, group: int) -> None:
        """Hold more of a prompt's later blocks, as far as its span and the free blocks allow."""
        filled, pool = blocks.filled[group], self.pools[group]
        end = self._span_end(group, blocks.first_live[group], blocks.num_blocks)
        count = min(end - filled, pool.num_free)
        if count <= 0:
            return
        taken = pool.acquire(count)
        assert taken is not None
        blocks.tables[group][filled : filled + count] = taken
        blocks.filled[group] = filled + count

    # --- counts and integrity -------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return min(pool.num_free for pool in self.pools)

    @property
    def has_windows(self) -> bool:
        return bool(self._windowed)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens that one request can hold; None if every window leaves blocks as it moves."""
        usable = self.num_blocks - 1
        windows = [w for w in self.windows if w is not None]
        if len(windows) == len(self.windows) and all(
            span_blocks(w, self.block_size, self.block_size) <= usable for w in windows
        ):
            return None
        return usable * self.block_size

    @property
    def max_held_tokens(self) -> int | None:
        """Most tokens whose blocks one request holds at once; None: its whole length."""
        if len(self._windowed) < len(self.windows):
            return None
        return min(max(self._spans), self.num_blocks - 1) * self.block_size

    def set_aside(self, pinned: Sequence[RequestBlocks]) -> list[set[BlockId]]:
        """Per group: blocks in quarantine, and blocks that `pinned` hold."""
        of_group = []
        for g in range(len(self.pools)):
            held = {block for blocks in pinned for block in blocks.blocks(g)}
            held.update(block for blocks in pinned for group, block in blocks.twins if group == g)
            held.update(block for parked in self._parked.values() for block in parked[g])
            of_group.append(held)
        return of_group

    def has_room_beside(
        self, set_aside: list[set[BlockId]], blocks: RequestBlocks, num_tokens: int
    ) -> bool:
        """Whether `place` would succeed for these tokens if only `set_aside` was held. Blocks
        that the prompt shares with it are counted once."""
        return self._needs_of(blocks, num_tokens).fit_beside(self.pools, set_aside)

    def check_integrity(self, owners: Iterable[RequestBlocks]) -> None:
        """`owners` are the requests that hold blocks now. Raises AssertionError with the values."""
        assert set(owners) == self._held, "blocks are held for a request that is not there"
        for g, pool in enumerate(self.pools):
            references: Counter[BlockId] = Counter()
            for blocks in self._held:
                references.update(blocks.blocks(g))
                references.update(block for group, block in blocks.twins if group == g)
            parked = [block for groups in self._parked.values() for block in groups[g]]
            pool.check_integrity(references, parked)
