"""Which worker holds which leading blocks of a prompt.

Every worker has a bit. Per block the index keeps two masks: who *holds* it and for whom it is
*reachable*, that is, held with all its ancestors. A reachable block's parent is reachable too: so
the number of leading blocks a worker holds is found by binary search, for all workers at once.

Predictions (blocks that a placed prompt is about to leave) are kept apart: they expire, and never
mix with what workers have reported. A chain is predicted from its start, so no block is believed
longer than its ancestors, and the same search finds where a worker's prediction ends.

`PrefixIndex` is plain Python, and serves where nothing can be compiled. `native_index` has the same
in C++.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.block_hash import BlockHash, split_hashes

IntArray = npt.NDArray[np.int64]


Hashes = bytes | Sequence[BlockHash]
"""A chain's hashes, parents first; concatenated if bytes."""


def split(hashes: Hashes) -> Sequence[BlockHash]:
    return split_hashes(hashes) if isinstance(hashes, bytes) else hashes


@dataclass(slots=True)
class _Node:
    parent: BlockHash | None
    held: int = 0
    reachable: int = 0


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _leading_blocks(
    hashes: Sequence[BlockHash], num_slots: int, holders: Callable[[BlockHash], int]
) -> IntArray:
    """How far each worker holds the chain. A worker that holds a block holds its ancestors.

    Binary search for all workers at once: a range splits where its workers part.
    """
    found = np.zeros(num_slots, dtype=np.int64)
    ranges = [(0, len(hashes), (1 << num_slots) - 1)]  # they hold at least low, at most high
    while ranges:
        low, high, mask = ranges.pop()
        if low == high:
            if low:
                for slot in _bits(mask):
                    found[slot] = low
            continue
        middle = (low + high + 1) // 2
        there = mask & holders(hashes[middle - 1])
        if there:
            ranges.append((middle, high, there))
        if mask & ~there:
            ranges.append((low, middle - 1, mask & ~there))
    return found


class PrefixIndex:
    """Own the map from block hash to the workers that hold it. Workers are slots 0, 1, ..."""

    def __init__(self, max_predictions: int = 200_000) -> None:
        self._nodes: dict[BlockHash, _Node] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}
        self._held_by: dict[int, set[BlockHash]] = {}
        self._predicted: dict[BlockHash, dict[int, float]] = {}
        self._expiries: deque[tuple[float, BlockHash, int]] = deque()
        self._max_predictions = max_predictions

    def __len__(self) -> int:
        return len(self._nodes)

    def num_blocks(self, slot: int) -> int:
        """Blocks the worker holds, reachable or not."""
        return len(self._held_by.get(slot, ()))

    # --- what workers report -------------------------------------------------------------------

    def store(self, slot: int, parent: BlockHash | None, hashes: Hashes) -> None:
        """The worker holds a chain of blocks, each the child of the one before; parents first."""
        held_by = self._held_by.setdefault(slot, set())
        bit = 1 << slot
        for block in split(hashes):
            node = self._nodes.get(block)
            if node is None:
                node = self._nodes[block] = _Node(parent)
                if parent is not None:
                    self._children.setdefault(parent, set()).add(block)
            if not node.held & bit:
                node.held |= bit
                held_by.add(block)
                self._reach(block, node, bit)
            parent = block

    def _reach(self, block: BlockHash, node: _Node, bit: int) -> None:
        """Mark a newly held block reachable if its parent is, and what it makes reachable."""
        if node.parent is not None:
            parent = self._nodes.get(node.parent)
            if parent is None or not parent.reachable & bit:
                return
        stack = [(block, node)]
        while stack:
            block, node = stack.pop()
            node.reachable |= bit
            for child in self._children.get(block, ()):
                below = self._nodes[child]
                if below.held & bit and not below.reachable & bit:
                    stack.append((child, below))

    def remove(self, slot: int, hashes: Hashes) -> None:
        """The worker no longer holds these blocks; their descendants are out of its reach."""
        held_by = self._held_by.get(slot)
        if held_by is None:
            return
        for block in split(hashes):
            if block in held_by:
                held_by.discard(block)
                self._drop(block, 1 << slot)

    def _drop(self, block: BlockHash, bit: int) -> None:
        node = self._nodes[block]
        node.held &= ~bit
        stack = [(block, node)] if node.reachable & bit else []
        while stack:
            below, below_node = stack.pop()
            below_node.reachable &= ~bit
            for child in self._children.get(below, ()):
                child_node = self._nodes[child]
                if child_node.reachable & bit:
                    stack.append((child, child_node))
        if not node.held:
            self._forget(block, node)

    def _forget(self, block: BlockHash, node: _Node) -> None:
        del self._nodes[block]
        if node.parent is not None:
            siblings = self._children[node.parent]
            siblings.discard(block)
            if not siblings:
                del self._children[node.parent]

    def clear(self, slot: int) -> None:
        """Forget everything about a worker: it is gone, or a snapshot replaces what was known."""
        for block in self._held_by.pop(slot, set()):
            node = self._nodes[block]
            bit = 1 << slot
            node.held &= ~bit
            node.reachable &= ~bit
            if not node.held:
                self._forget(block, node)

    def forget_predictions(self, slot: int) -> None:
        for expiries in self._predicted.values():
            expiries.pop(slot, None)

    def follow(self, slot: int, removed: bytes, stored: Iterable[tuple[bytes, bytes]]) -> None:
        """Take in one message of a worker: blocks removed, then chains stored, each with its parent
        (empty: none). Hashes are concatenated."""
        self.remove(slot, removed)
        for parent, hashes in stored:
            self.store(slot, BlockHash(parent) if parent else None, hashes)

    # --- predictions ---------------------------------------------------------------------------

    def predict(
        self, slots: Collection[int], hashes: Hashes, now_s: float, expires_s: float
    ) -> None:
        """Each of these workers will soon hold this chain from a prompt's start; believed until
        expiry."""
        hashes = split(hashes)
        self._purge(now_s)
        room = (self._max_predictions - len(self._expiries)) // max(1, len(slots))
        for block in hashes[: max(0, room)]:
            expiries = self._predicted.setdefault(block, {})
            for slot in slots:
                if expiries.get(slot, 0.0) < expires_s:
                    expiries[slot] = expires_s
                    self._expiries.append((expires_s, block, slot))

    def _purge(self, now_s: float) -> None:
        while self._expiries and self._expiries[0][0] <= now_s:
            _, block, slot = self._expiries.popleft()
            expiries = self._predicted.get(block)
            if expiries is None:
                continue
            if expiries.get(slot, now_s + 1) <= now_s:
                del expiries[slot]
            if not expiries:
                del self._predicted[block]

    # --- lookup --------------------------------------------------------------------------------

    def lookup(self, hashes: Hashes, num_slots: int) -> IntArray:
        """Leading blocks of the chain that each worker holds, int64 [num_slots]; exact."""
        nodes = self._nodes

        def holders(block: BlockHash) -> int:
            node = nodes.get(block)
            return node.reachable if node is not None else 0

        return _leading_blocks(split(hashes), num_slots, holders)

    def lookup_predicted(self, hashes: Hashes, num_slots: int, now_s: float) -> IntArray:
        """Leading blocks that each worker holds or is predicted to hold, int64 [num_slots]."""
        hashes = split(hashes)
        found, predicted = self.lookup(hashes, num_slots), self._predicted

        def believed(block: BlockHash) -> int:
            expiries = predicted.get(block, {})
            return sum(1 << slot for slot, expires_s in expiries.items() if expires_s > now_s)

        if predicted:
            np.maximum(found, _leading_blocks(hashes, num_slots, believed), out=found)
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError when masks, sets and links disagree."""
        for block, node in self._nodes.items():
            assert node.held, f"block {block.hex()} is held by nobody"
            assert node.reachable & ~node.held == 0, f"block {block.hex()} reachable, not held"
            for slot in _bits(node.held):
                assert block in self._held_by[slot], f"slot {slot} lacks block {block.hex()}"
            if node.parent is not None:
                assert block in self._children[node.parent], f"{block.hex()} is no child"
                parent = self._nodes.get(node.parent)
                above = parent.reachable if parent is not None else 0
                assert node.reachable == node.held & above, f"{block.hex()}: wrong reachability"
            else:
                assert node.reachable == node.held, f"{block.hex()}: a root is always reachable"
        assert sum(map(len, self._held_by.values())) == sum(
            node.held.bit_count() for node in self._nodes.values()
        )
