"""The prefix index against a naive model that knows every worker's blocks one by one."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.block_hash import BlockHash
from router.index.native_index import NativePrefixIndex, native_library
from router.index.prefix_index import PrefixIndex

NUM_WORKERS = 3


def chain(*path: int) -> list[BlockHash]:
    """Hashes of a prompt whose blocks are numbered; equal beginnings have equal hashes."""
    hashes, parent = [], b""
    for number in path:
        parent = hashlib.blake2b(parent + bytes([number]), digest_size=16).digest()
        hashes.append(BlockHash(parent))
    return hashes


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
WORKERS = st.integers(0, NUM_WORKERS - 1)


class IndexAgainstNaiveModel(RuleBasedStateMachine):
    """Stores, removals in any order, snapshots; and every prompt's answer after each."""

    def __init__(self) -> None:
        super().__init__()
        self.index = self.new_index()
        self.held: list[set[BlockHash]] = [set() for _ in range(NUM_WORKERS)]
        self.predicted: list[dict[BlockHash, float]] = [{} for _ in range(NUM_WORKERS)]
        self.now_s = 0.0

    def new_index(self) -> PrefixIndex:
        return PrefixIndex()

    @rule(worker=WORKERS, path=PATHS, start=st.integers(0, 5))
    def store(self, worker: int, path: list[int], start: int) -> None:
        hashes = chain(*path)
        start = min(start, len(hashes) - 1)
        self.index.store(worker, hashes[start - 1] if start else None, hashes[start:])
        self.held[worker].update(hashes[start:])

    @rule(worker=WORKERS, path=PATHS)
    def remove(self, worker: int, path: list[int]) -> None:
        self.index.remove(worker, chain(*path)[-1:])
        self.held[worker].discard(chain(*path)[-1])

    @rule(worker=WORKERS)
    def clear(self, worker: int) -> None:
        self.index.clear(worker)
        self.held[worker].clear()

    @rule(worker=WORKERS, path=PATHS, ttl_s=st.integers(1, 5))
    def predict(self, worker: int, path: list[int], ttl_s: int) -> None:
        expires_s = self.now_s + ttl_s
        self.index.predict((worker,), chain(*path), self.now_s, expires_s)
        for block in chain(*path):
            known_s = self.predicted[worker].get(block, 0.0)
            self.predicted[worker][block] = max(known_s, expires_s)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(worker=WORKERS)
    def forget_predictions(self, worker: int) -> None:
        self.index.forget_predictions(worker)
        self.predicted[worker].clear()

    @rule(path=PATHS)
    def look_up_predicted(self, path: list[int]) -> None:
        hashes = chain(*path)
        expected = self.index.lookup(hashes, NUM_WORKERS).tolist()
        for worker, predicted in enumerate(self.predicted):
            length = 0
            while length < len(hashes) and predicted.get(hashes[length], 0.0) > self.now_s:
                length += 1
            expected[worker] = max(expected[worker], length)
        found = self.index.lookup_predicted(hashes, NUM_WORKERS, self.now_s)
        assert found.tolist() == expected

    @rule(path=PATHS)
    def look_up(self, path: list[int]) -> None:
        hashes = chain(*path)
        expected = []
        for held in self.held:
            length = 0
            while length < len(hashes) and hashes[length] in held:
                length += 1
            expected.append(length)
        assert self.index.lookup(hashes, NUM_WORKERS).tolist() == expected

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        for worker, held in enumerate(self.held):
            assert self.index.num_blocks(worker) == len(held)


class NativeIndexAgainstNaiveModel(IndexAgainstNaiveModel):
    def new_index(self) -> PrefixIndex:
        return native_index()


TestIndexAgainstNaiveModel = IndexAgainstNaiveModel.TestCase
TestNativeIndexAgainstNaiveModel = NativeIndexAgainstNaiveModel.TestCase
TestIndexAgainstNaiveModel.settings = TestNativeIndexAgainstNaiveModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


def native_index(max_predictions: int = 200_000) -> PrefixIndex:
    library = native_library()
    if library is None:
        pytest.skip("no C++ compiler")
    return NativePrefixIndex(library, max_predictions)


@pytest.mark.parametrize("seed", range(6))
def test_the_index_in_cpp_does_what_the_one_in_python_does(seed: int) -> None:
    """Over more workers than a word has bits, with blocks that come and go in any order."""
    rng = random.Random(seed)
    num_slots = rng.choice([3, 64, 65, 200])
    both = PrefixIndex(500), native_index(500)
    chains = [chain(*(rng.randrange(2) for _ in range(rng.randrange(1, 40)))) for _ in range(60)]

    for step in range(600):
        slot, hashes = rng.randrange(num_slots), rng.choice(chains)
        begin = rng.randrange(len(hashes))
        end = rng.randrange(begin, len(hashes)) + 1
        some = list(
            zip(
                [hashes[begin - 1] if begin else b"", b"?" * 16],
                [b"".join(hashes[begin:end]), b"!" * 16],
            )
        )
        slots = rng.sample(range(num_slots), rng.randrange(1, 3))
        action = rng.random()
        for index in both:
            if action < 0.6:
                index.follow(slot, b"".join(rng_hashes(step, hashes)), some)
            elif action < 0.75:
                index.remove(slot, hashes[begin:end])
            elif action < 0.77:
                index.clear(slot)
            elif action < 0.8:
                index.forget_predictions(slot)
            else:
                index.predict(slots, hashes, float(step), step + 40.0 + step % 7)
        python, native = both
        assert len(python) == len(native)
        assert python.num_blocks(slot) == native.num_blocks(slot)
        for wanted in rng.sample(chains, 3):
            found = python.lookup(wanted, num_slots).tolist()
            assert native.lookup(b"".join(wanted), num_slots).tolist() == found
            found = python.lookup_predicted(wanted, num_slots, step + 1.0).tolist()
            assert native.lookup_predicted(wanted, num_slots, step + 1.0).tolist() == found
        if step % 20 == 0:
            python.check_integrity()
            native.check_integrity()


def rng_hashes(step: int, hashes: list[BlockHash]) -> list[BlockHash]:
    """Some blocks of a chain, not always."""
    return random.Random(step).sample(hashes, min(len(hashes), 3)) if step % 3 == 0 else []


def test_a_removed_block_that_others_follow_is_found_again_and_nothing_of_it_stays() -> None:
    index, hashes = native_index(), chain(1, 2, 3)
    for slot in (0, 100):
        index.store(slot, None, hashes)
    for slot in (0, 100):
        index.remove(slot, hashes[:2])
    index.check_integrity()
    assert len(index) == 1
    for slot in (0, 100):
        index.clear(slot)
        index.check_integrity()
    assert len(index) == 0


def test_a_block_whose_parent_was_removed_is_out_of_reach_until_the_parent_returns() -> None:
    index, hashes = PrefixIndex(), chain(1, 2, 3, 4)
    index.store(0, None, hashes)
    index.remove(0, hashes[1:2])
    assert index.lookup(hashes, 1).tolist() == [1]
    index.store(0, hashes[0], hashes[1:2])
    assert index.lookup(hashes, 1).tolist() == [4]
    index.check_integrity()


def test_predictions_expire_and_never_mix_with_what_workers_report() -> None:
    index, hashes = PrefixIndex(), chain(1, 2, 3, 4)
    index.store(1, None, hashes[:2])
    index.predict((0,), hashes[:3], now_s=0.0, expires_s=5.0)
    assert index.lookup(hashes, 2).tolist() == [0, 2]
    assert index.lookup_predicted(hashes, 2, 1.0).tolist() == [3, 2]
    assert index.lookup_predicted(hashes, 2, 5.0).tolist() == [0, 2]
    index.predict((1,), chain(9), now_s=6.0, expires_s=11.0)  # purges what has expired
    index.forget_predictions(1)
    assert index.lookup_predicted(chain(9), 2, 7.0).tolist() == [0, 0]
    index.check_integrity()


def test_a_long_prompt_over_many_workers_needs_few_probes() -> None:
    index = PrefixIndex()
    hashes = chain(*([1] * 4000))
    lengths = np.random.default_rng(0).integers(0, 4001, size=64)
    for slot, length in enumerate(lengths):
        index.store(slot, None, hashes[:length])
    assert index.lookup(hashes, 64).tolist() == lengths.tolist()


class CountedHash(bytes):
    """A block's hash that counts how often it is looked up."""

    num_lookups = 0

    def __hash__(self) -> int:
        CountedHash.num_lookups += 1
        return super().__hash__()


def test_the_end_of_a_long_prediction_takes_few_probes_too() -> None:
    index, num_slots = PrefixIndex(), 16
    hashes = chain(*([1] * 4000))
    lengths = np.random.default_rng(0).integers(0, 4001, size=num_slots)
    for slot, length in enumerate(lengths):
        index.predict((slot,), hashes[:length], now_s=0.0, expires_s=5.0)
    counted = [BlockHash(CountedHash(each)) for each in hashes]
    assert index.lookup_predicted(counted, num_slots, 1.0).tolist() == lengths.tolist()
    assert CountedHash.num_lookups <= num_slots * 13  # 2 ** 12 > 4000
