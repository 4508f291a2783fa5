"""The prefix index against a naive one that knows every worker's blocks one by one."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.block_hash import BlockHash
from router.index.prefix_index import PrefixIndex

NUM_WORKERS = 3


class Index(PrefixIndex):
    """The index, fed with lists of hashes."""

    def store(self, slot: int, hashes: Sequence[bytes], parent: bytes = b"") -> None:
        self.follow(slot, b"", [(parent, b"".join(hashes))])

    def remove(self, slot: int, hashes: Sequence[bytes]) -> None:
        self.follow(slot, b"".join(hashes), ())

    def leading(
        self, hashes: Sequence[bytes], num_slots: int, now_s: float = math.inf
    ) -> list[int]:
        found: list[int] = self.lookup(b"".join(hashes), num_slots, now_s).tolist()
        return found


def chain(*path: int) -> list[BlockHash]:
    """Hashes of a prompt whose blocks are numbered; equal beginnings have equal hashes."""
    hashes, parent = [], b""
    for number in path:
        parent = hashlib.blake2b(parent + bytes([number]), digest_size=16).digest()
        hashes.append(BlockHash(parent))
    return hashes


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
WORKERS = st.integers(0, NUM_WORKERS - 1)


class NaiveIndex:
    """The oracle: every worker's blocks one by one."""

    def __init__(self, num_slots: int, max_predictions: int = 200_000) -> None:
        self.held: list[set[BlockHash]] = [set() for _ in range(num_slots)]
        self.predicted: list[dict[BlockHash, float]] = [{} for _ in range(num_slots)]
        self._expiries: deque[float] = deque()
        self._max_predictions = max_predictions

    def __len__(self) -> int:
        return len(set[BlockHash]().union(*self.held))

    def store(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        self.held[slot].update(hashes)

    def remove(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        self.held[slot].difference_update(hashes)

    def clear(self, slot: int) -> None:
        self.held[slot].clear()

    def predict(
        self, slots: Sequence[int], hashes: Sequence[BlockHash], now_s: float, expires_s: float
    ) -> None:
        while self._expiries and self._expiries[0] <= now_s:
            self._expiries.popleft()
        room = (self._max_predictions - len(self._expiries)) // len(slots)
        for block, slot in itertools.product(hashes[: max(0, room)], slots):
            if self.predicted[slot].get(block, 0.0) < expires_s:
                self.predicted[slot][block] = expires_s
                self._expiries.append(expires_s)

    def forget_predictions(self, slot: int) -> None:
        self.predicted[slot].clear()

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [leading(hashes, held.__contains__) for held in self.held]

    def lookup_predicted(self, hashes: Sequence[BlockHash], now_s: float) -> list[int]:
        expected = [
            leading(hashes, lambda block: until_s.get(block, 0.0) > now_s)  # noqa: B023
            for until_s in self.predicted
        ]
        return list(map(max, self.lookup(hashes), expected))


def leading(hashes: Sequence[BlockHash], holds: Callable[[BlockHash], bool]) -> int:
    return len(list(itertools.takewhile(holds, hashes)))


class IndexAgainstNaiveModel(RuleBasedStateMachine):
    """Stores, removals in any order, snapshots; and every prompt's answer after each."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.naive, self.now_s = Index(), NaiveIndex(NUM_WORKERS), 0.0

    @rule(worker=WORKERS, path=PATHS, start=st.integers(0, 5))
    def store(self, worker: int, path: list[int], start: int) -> None:
        hashes = chain(*path)
        start = min(start, len(hashes) - 1)
        self.index.store(worker, hashes[start:], hashes[start - 1] if start else b"")
        self.naive.store(worker, hashes[start:])

    @rule(worker=WORKERS, path=PATHS)
    def remove(self, worker: int, path: list[int]) -> None:
        self.index.remove(worker, chain(*path)[-1:])
        self.naive.remove(worker, chain(*path)[-1:])

    @rule(worker=WORKERS)
    def clear(self, worker: int) -> None:
        self.index.clear(worker)
        self.naive.clear(worker)

    @rule(worker=WORKERS, path=PATHS, ttl_s=st.integers(1, 5))
    def predict(self, worker: int, path: list[int], ttl_s: int) -> None:
        self.index.predict((worker,), b"".join(chain(*path)), self.now_s, self.now_s + ttl_s)
        self.naive.predict((worker,), chain(*path), self.now_s, self.now_s + ttl_s)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(worker=WORKERS)
    def forget_predictions(self, worker: int) -> None:
        self.index.forget_predictions(worker)
        self.naive.forget_predictions(worker)

    @rule(path=PATHS)
    def look_up(self, path: list[int]) -> None:
        hashes = chain(*path)
        assert self.index.leading(hashes, NUM_WORKERS) == self.naive.lookup(hashes)
        found = self.index.leading(hashes, NUM_WORKERS, self.now_s)
        assert found == self.naive.lookup_predicted(hashes, self.now_s)

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        held = [self.index.num_blocks(worker) for worker in range(NUM_WORKERS)]
        assert held == list(map(len, self.naive.held))


TestIndexAgainstNaiveModel = IndexAgainstNaiveModel.TestCase
TestIndexAgainstNaiveModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("seed", range(6))
def test_more_workers_than_a_word_has_bits_and_blocks_that_come_and_go_in_any_order(
    seed: int,
) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice([3, 64, 65, 200])
    index, naive = Index(500), NaiveIndex(num_slots, 500)
    chains = [chain(*(rng.randrange(2) for _ in range(rng.randrange(1, 40)))) for _ in range(60)]
    for step in range(600):
        slot, hashes = rng.randrange(num_slots), rng.choice(chains)
        begin = rng.randrange(len(hashes))
        some = hashes[begin : rng.randrange(begin, len(hashes)) + 1]
        action = rng.random()
        if action < 0.6:
            removed = rng.sample(hashes, min(len(hashes), 3)) if step % 3 == 0 else []
            parents = hashes[begin - 1] if begin else b"", b"?" * 16
            stored = zip(parents, (b"".join(some), b"!" * 16))
            index.follow(slot, b"".join(removed), stored)
            naive.remove(slot, removed)
            naive.store(slot, [*some, BlockHash(b"!" * 16)])
        elif action < 0.75:
            index.remove(slot, some)
            naive.remove(slot, some)
        elif action < 0.77:
            index.clear(slot)
            naive.clear(slot)
        elif action < 0.8:
            index.forget_predictions(slot)
            naive.forget_predictions(slot)
        else:
            slots = rng.sample(range(num_slots), rng.randrange(1, 3))
            expires_s = step + 40.0 + step % 7
            index.predict(slots, b"".join(hashes), float(step), expires_s)
            naive.predict(slots, hashes, float(step), expires_s)
        assert len(index) == len(naive)
        assert index.num_blocks(slot) == len(naive.held[slot])
        for wanted in rng.sample(chains, 3):
            assert index.leading(wanted, num_slots) == naive.lookup(wanted)
            found = index.leading(wanted, num_slots, step + 1.0)
            assert found == naive.lookup_predicted(wanted, step + 1.0)
        if step % 20 == 0:
            index.check_integrity()


def test_a_removed_block_that_others_follow_is_found_again_and_nothing_of_it_stays() -> None:
    index, hashes = Index(), chain(1, 2, 3)
    for slot in (0, 100):
        index.store(slot, hashes)
    for slot in (0, 100):
        index.remove(slot, hashes[:2])
    index.check_integrity()
    assert len(index) == 1
    for slot in (0, 100):
        index.clear(slot)
        index.check_integrity()
    assert len(index) == 0


def test_a_block_whose_parent_was_removed_is_out_of_reach_until_the_parent_returns() -> None:
    index, hashes = Index(), chain(1, 2, 3, 4)
    index.store(0, hashes)
    index.remove(0, hashes[1:2])
    assert index.leading(hashes, 1) == [1]
    index.store(0, hashes[1:2], hashes[0])
    assert index.leading(hashes, 1) == [4]
    index.check_integrity()


def test_predictions_expire_and_never_mix_with_what_workers_report() -> None:
    index, hashes = Index(), chain(1, 2, 3, 4)
    index.store(1, hashes[:2])
    index.predict((0,), b"".join(hashes[:3]), now_s=0.0, expires_s=5.0)
    assert index.leading(hashes, 2) == [0, 2]
    assert index.leading(hashes, 2, 1.0) == [3, 2]
    assert index.leading(hashes, 2, 5.0) == [0, 2]
    index.predict((1,), b"".join(chain(9)), now_s=6.0, expires_s=11.0)  # purges what has expired
    index.forget_predictions(1)
    assert index.leading(chain(9), 2, 7.0) == [0, 0]
    index.check_integrity()


def test_a_long_prompt_is_held_or_predicted_to_many_different_lengths() -> None:
    index, expected = Index(), Index()
    hashes = chain(*([1] * 4000))
    lengths = np.random.default_rng(0).integers(0, 4001, size=64)
    for slot, length in enumerate(lengths):
        index.store(slot, hashes[:length])
        expected.predict((slot,), b"".join(hashes[:length]), now_s=0.0, expires_s=5.0)
    assert index.leading(hashes, 64) == lengths.tolist()
    assert expected.leading(hashes, 64, 1.0) == lengths.tolist()
