"""Blocks have one owner each, and the least recently used leaf goes first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.block_pool import BlockPool
from kv_transfer.block_hash import BlockHash
from kv_transfer.layout import NULL_BLOCK, BlockId


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def chain(pool: BlockPool, *names: str) -> list[BlockId]:
    """Take and name a chain of blocks; they stay in use."""
    blocks = pool.acquire(len(names))
    assert blocks is not None
    parent = None
    for block, text in zip(blocks, names):
        assert pool.store(block, name(text), parent)
        parent = name(text)
    return blocks


def test_the_leaf_goes_first_and_its_parent_only_after_it() -> None:
    evicted: list[BlockHash] = []
    pool = BlockPool(4, on_evicted=evicted.append)
    blocks = chain(pool, "a", "ab", "abc")
    pool.release(blocks)
    for count, gone in ((1, ["abc"]), (1, ["abc", "ab"]), (1, ["abc", "ab", "a"])):
        assert pool.acquire(count) is not None
        assert evicted == [name(text) for text in gone]


def test_the_least_recently_used_leaf_goes_first() -> None:
    evicted: list[BlockHash] = []
    pool = BlockPool(6, on_evicted=evicted.append)
    old, new = chain(pool, "a", "ab"), chain(pool, "x", "xy")
    pool.release(old)
    pool.release(new)
    pool.pin(old)  # used again
    pool.release(old)
    pool.acquire(3)
    assert evicted == [name("xy"), name("x")]


def test_free_blocks_are_taken_before_anything_is_evicted() -> None:
    pool = BlockPool(6)
    pool.release(chain(pool, "a", "ab"))
    pool.acquire(3)
    assert pool.find(name("a")) is not None
    assert pool.find(name("ab")) is not None


def test_a_parent_whose_child_is_in_use_outlives_every_request_for_blocks() -> None:
    pool = BlockPool(5)
    blocks = chain(pool, "a", "ab")
    pool.release(blocks)
    pool.pin(blocks)
    assert pool.acquire(3) is None
    assert pool.acquire(2) is not None
    assert pool.find(name("a")) == blocks[0]


def test_a_window_pool_evicts_parents_before_children_by_age_alone() -> None:
    evicted: list[BlockHash] = []
    pool = BlockPool(4, leaf_first=False, on_evicted=evicted.append)
    blocks = chain(pool, "a", "ab", "abc")
    pool.release(blocks[:1])
    pool.release(blocks[1:])
    pool.acquire(1)
    assert evicted == [name("a")]
    assert [pool.find(name(each)) is not None for each in ("a", "ab", "abc")] == [False, True, True]


def test_quarantined_blocks_are_neither_free_nor_used_until_their_writer_has_stopped() -> None:
    pool = BlockPool(4)
    blocks = pool.acquire(2)
    assert blocks is not None
    pool.quarantine(blocks)
    assert (pool.num_free, pool.num_quarantined) == (1, 2)
    assert pool.acquire(2) is None
    pool.check_integrity({}, blocks)
    pool.unquarantine(blocks)
    assert (pool.num_free, pool.num_quarantined) == (3, 0)
    pool.check_integrity({}, [])


def test_a_block_that_someone_else_reads_cannot_be_quarantined() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError):
        pool.quarantine(chain(pool, "a"))


def test_content_that_is_cached_already_is_not_stored_twice() -> None:
    pool = BlockPool(4)
    (first,) = chain(pool, "a")
    (second,) = pool.acquire(1) or []
    assert not pool.store(second, name("a"), None)
    assert pool.find(name("a")) == first


def test_integrity_notices_a_leak_and_a_double_owner() -> None:
    pool = BlockPool(4)
    blocks = pool.acquire(2)
    assert blocks is not None
    pool.check_integrity({blocks[0]: 1, blocks[1]: 1}, [])
    for wrong in ({blocks[0]: 1}, {blocks[0]: 1, blocks[1]: 2}):
        with pytest.raises(AssertionError):
            pool.check_integrity(wrong, [])
    with pytest.raises(AssertionError):
        pool.check_integrity({blocks[0]: 1, blocks[1]: 1}, blocks)


class Blocks(RuleBasedStateMachine):
    """Holders that walk down one tree of hashes, as requests with common prefixes do."""

    @initialize(num_blocks=st.integers(2, 14))
    def begin(self, num_blocks: int) -> None:
        self.evicted: list[BlockHash] = []
        self.pool = BlockPool(num_blocks, on_evicted=self.evicted.append)
        self.holders: list[tuple[str, list[BlockId]]] = []
        self.parked: list[list[BlockId]] = []
        self.resident: dict[BlockHash, BlockHash | None] = {}

    @rule(path=st.text("ab", min_size=1, max_size=5))
    def hold(self, path: str) -> None:
        """Pin what is cached of a path and store the rest."""
        prefixes = [path[: i + 1] for i in range(len(path))]
        cached = [b for p in prefixes if (b := self.pool.find(name(p))) is not None]
        self.pool.pin(cached)
        fresh = self.pool.acquire(len(path) - len(cached))
        if fresh is None:
            self.pool.release(cached)
            return
        self.forget_evicted()
        for prefix, block in zip(prefixes[len(cached) :], fresh):
            parent = name(prefix[:-1]) if len(prefix) > 1 else None
            assert self.pool.store(block, name(prefix), parent)
            self.resident[name(prefix)] = parent
        self.holders.append((path, [*cached, *fresh]))

    @rule(count=st.integers(1, 4))
    def hold_unnamed(self, count: int) -> None:
        before = self.pool.num_free
        blocks = self.pool.acquire(count)
        assert (blocks is None) == (before < count)
        assert blocks is None or NULL_BLOCK not in blocks
        self.forget_evicted()
        if blocks is not None:
            self.holders.append(("", blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        _, blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)

    @precondition(lambda self: any(not path for path, _ in self.holders))
    @rule()
    def park(self) -> None:
        index = next(i for i, (path, _) in enumerate(self.holders) if not path)
        _, blocks = self.holders.pop(index)
        self.pool.quarantine(blocks)
        self.parked.append(blocks)

    @precondition(lambda self: self.parked)
    @rule()
    def unpark(self) -> None:
        self.pool.unquarantine(self.parked.pop())

    def forget_evicted(self) -> None:
        for block_hash in self.evicted:
            del self.resident[block_hash]
            assert block_hash not in self.resident.values(), "a parent went before its child"
        self.evicted.clear()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        references = Counter(block for _, blocks in self.holders for block in blocks)
        self.pool.check_integrity(references, [b for blocks in self.parked for b in blocks])
        named = {h: self.pool._parent_hash[block] for h, block in self.pool._by_hash.items()}
        assert named == self.resident


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
