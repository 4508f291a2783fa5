"""Block tables over several layer groups: all or nothing, windows, twins, matches."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from engine.kv.kv_cache import KvCache
from engine.kv.request_blocks import RequestBlocks, first_live_block, span_blocks
from engine.request import BlocksStoredEvent
from kv_transfer.block_hash import SHARED_BY_ALL
from kv_transfer.layout import KvLayout, LayerGroup, TensorSpec

TENSORS = (TensorSpec("k", 1, 1, "int64"),)
BLOCK_SIZE = 4


def cache(
    num_blocks: int = 32,
    *windows: int | None,
    prefix_cache: bool = True,
    max_step_tokens: int = 100,
) -> KvCache:
    groups = tuple(LayerGroup(i, 1, TENSORS, w) for i, w in enumerate(windows or (None,)))
    return KvCache(
        KvLayout(BLOCK_SIZE, groups),
        num_blocks,
        b"fingerprint",
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
    )


def tokens(length: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.uint32)


def placed(kv: KvCache, ids: np.ndarray, computed: bool = True) -> RequestBlocks:
    blocks = kv.open(ids, SHARED_BY_ALL, 100)
    assert kv.place(blocks, len(ids)) is not None
    if computed:
        kv.computed(blocks, ids, len(ids))
    return blocks


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [(None, 1000, 0), (8, 0, 0), (8, 7, 0), (8, 10, 0), (8, 11, 1), (8, 14, 1), (8, 15, 2)],
)
def test_a_block_lives_while_a_later_token_looks_at_one_of_its_slots(
    window: int | None, position: int, first: int
) -> None:
    assert first_live_block(window, position, BLOCK_SIZE) == first
    if window is not None:
        seen = range(max(0, position - window + 1), position + 1)
        assert seen[0] // BLOCK_SIZE == first


def test_a_prefix_is_found_in_whole_blocks_and_never_the_whole_prompt() -> None:
    kv = cache()
    kv.free(placed(kv, tokens(12)))
    for length, cached in ((12, 8), (13, 12), (20, 12), (4, 0), (5, 4), (3, 0)):
        again = kv.open(tokens(length), SHARED_BY_ALL, 100)
        assert kv.place(again, length) == cached
        kv.free(again)
    other = kv.open(tokens(12, start=1), SHARED_BY_ALL, 100)
    assert kv.place(other, 12) == 0
    kv.free(other)
    kv.check_integrity([])


def test_without_a_prefix_cache_nothing_is_shared_or_announced() -> None:
    kv = cache(prefix_cache=False)
    kv.free(placed(kv, tokens(12)))
    again = kv.open(tokens(12), SHARED_BY_ALL, 100)
    assert kv.place(again, 12) == 0
    assert not kv.events


def test_a_group_that_is_short_of_blocks_leaves_the_others_untouched() -> None:
    kv = cache(8, None, 8)
    held = kv.pools[1].acquire(5)
    assert held is not None
    blocks = kv.open(tokens(12), SHARED_BY_ALL, 100)
    assert kv.place(blocks, 12) is None
    assert (kv.pools[0].num_free, kv.pools[1].num_free) == (7, 2)
    kv.pools[1].release(held)
    assert kv.place(blocks, 12, headroom=5) is None
    assert kv.place(blocks, 12, headroom=4) == 0
    assert not kv.grow(blocks, 33)
    assert kv.grow(blocks, 28)
    kv.check_integrity([blocks])


def num_calls(function: Callable[[], object]) -> int:
    """Calls, of Python and of C, that a function makes."""
    count = 0

    def called(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("window", [None, 8])
def test_a_prompt_that_waits_for_blocks_is_tried_as_fast_however_long_its_cached_prefix(
    window: int | None,
) -> None:
    kv = cache(1000, None, window)
    ids = tokens(2400)
    first = kv.open(ids[:2000], SHARED_BY_ALL, 2000)
    assert kv.place(first, 2000) == 0
    for end in range(100, 2001, 100):
        kv.computed(first, ids, end)
    kv.free(first)
    held = kv.pools[0].acquire(450)
    assert held is not None
    waits = kv.open(ids, SHARED_BY_ALL, 2400)
    assert kv.place(waits, 2400) is None
    assert num_calls(lambda: kv.place(waits, 2400)) < 300  # of 500 blocks
    kv.pools[0].release(held)
    assert kv.place(waits, 2400) == 2000
    kv.check_integrity([waits])


def test_the_cached_prefix_of_a_prompt_that_waits_is_evicted_last() -> None:
    kv = cache(20)
    kv.free(placed(kv, tokens(32)))
    kv.free(placed(kv, tokens(32, start=100)))
    waits = kv.open(tokens(72), SHARED_BY_ALL, 100)
    assert kv.place(waits, 72, headroom=2) is None
    assert kv.pools[0].acquire(3 + 8) is not None
    assert kv.pools[0].num_resident(waits.hashes) == 8


def test_a_window_leaves_the_null_block_behind_and_frees_what_it_left() -> None:
    kv = cache(32, None, 8)
    blocks = placed(kv, tokens(16), computed=False)
    for num_computed, gone in ((4, 0), (8, 0), (12, 1), (16, 2)):
        kv.computed(blocks, tokens(16), num_computed)
        assert (blocks.tables[1][:4] == 0).tolist() == [i < gone for i in range(4)]
        assert blocks.tables[0][:4].all()
        assert kv.pools[1].num_free - kv.pools[0].num_free == gone
        kv.check_integrity([blocks])


def test_a_windowed_group_matches_on_the_blocks_that_the_next_token_sees() -> None:
    kv = cache(32, None, 8)
    first = placed(kv, tokens(24), computed=False)
    kv.computed(first, tokens(24), 24)
    kv.free(first)
    again = kv.open(tokens(24), SHARED_BY_ALL, 100)
    assert kv.place(again, 24) == 20
    assert (again.tables[1][:6] == 0).tolist() == [True, True, True, False, False, False]
    kv.free(again)
    # Without block 4 of the window, the longest prefix ends before it.
    victim = kv.pools[1].find(first.hashes[4])
    assert victim is not None
    while kv.pools[1].find(first.hashes[4]) is not None:
        kv.pools[1].acquire(1)
    rest = kv.open(tokens(24), SHARED_BY_ALL, 100)
    assert (kv.place(rest, 24) or 0) < 20


def test_blocks_filled_elsewhere_are_asked_for_only_where_a_later_token_looks() -> None:
    kv = cache(32, None, 8)
    blocks = kv.open(tokens(22), SHARED_BY_ALL, 100)
    assert kv.place_lease(blocks, 22) == 0
    assert (blocks.tables[1][:6] == 0).tolist() == [True] * 3 + [False] * 3
    assert blocks.tables[0][:6].all()
    kv.computed(blocks, tokens(22), 22)
    kv.check_integrity([blocks])


@pytest.mark.parametrize("windows", [(8,), (1,), (8, 2)])
def test_where_no_layer_sees_everything_what_a_receiver_does_not_need_is_not_cached(
    windows: tuple[int, ...],
) -> None:
    kv = cache(64, *windows)
    for first in (0, 200):  # an empty cache, and one that is not
        ids = tokens(30, first)
        blocks = kv.open(ids, SHARED_BY_ALL, 100)
        assert kv.place_lease(blocks, 30) == 0
        kv.computed(blocks, ids, 30)
        kv.free(blocks)
    again = kv.open(tokens(30), SHARED_BY_ALL, 100)
    assert kv.place_lease(again, 30) == (28 if windows != (1,) else 0)  # it looks at its own block
    kv.free(again)
    longer = kv.open(tokens(34), SHARED_BY_ALL, 100)  # looks at what is there and at a block more
    assert kv.place_lease(longer, 34) == (28 if 8 in windows else 0)
    kv.check_integrity([longer])


def test_a_lease_evicts_nothing_that_a_prompt_counts_on_which_goes_first() -> None:
    kv = cache(32, None, 8)
    runs = np.concatenate([tokens(16), tokens(8, 500)])
    held = placed(kv, runs, computed=False)
    for end in (16, 20, 24):
        kv.computed(held, runs, end)  # its window has left the first 4 blocks, oldest of all now
    kv.free(placed(kv, tokens(8, 600)))
    waits, comes = np.concatenate([tokens(16), tokens(4, 700)]), tokens(12, 800)
    others = [
        pool.acquire(pool.num_free - left) for pool, left in zip(kv.pools, (1 + 3, 1 + 3 + 2))
    ]
    first, lease = kv.open(waits, SHARED_BY_ALL, 100), kv.open(comes, SHARED_BY_ALL, 100)
    assert kv.place_lease(lease, 12, 1, (first, 20)) is None
    assert kv.place_lease(lease, 12, 0, (first, 20)) == 0
    assert kv.place(first, 20) == 16
    for pool, blocks in zip(kv.pools, others):
        assert blocks is not None
        pool.release(blocks)
    kv.check_integrity([held, lease, first])


@pytest.mark.parametrize("windows", [(8, None), (None, 8)])
def test_cache_events_are_those_of_a_group_that_sees_everything(
    windows: tuple[int | None, ...],
) -> None:
    kv = cache(32, *windows)
    ids = tokens(24)
    blocks = kv.open(ids, SHARED_BY_ALL, 100)
    assert kv.place_lease(blocks, 24) == 0
    kv.computed(blocks, ids, 24)
    kv.free(blocks)
    whole = [(None, tuple(blocks.hashes))]
    assert kv.events.take() == [BlocksStoredEvent(*chain) for chain in whole]
    kv.pools[windows.index(8)].acquire(31)  # evicts what the windows could use
    assert not kv.events


@pytest.mark.parametrize("length", range(1, 40))
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9])
def test_a_prompt_filled_elsewhere_is_found_again_as_far_as_one_computed_here(
    length: int, window: int
) -> None:
    kv = cache(32, None, window)
    blocks = kv.open(tokens(length), SHARED_BY_ALL, 100)
    assert kv.place_lease(blocks, length) == 0
    kv.computed(blocks, tokens(length), length)
    kv.free(blocks)
    again = kv.open(tokens(length), SHARED_BY_ALL, 100)
    assert kv.place(again, length) == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    kv.check_integrity([again])


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("window", [2, 5, 8, 9])
def test_a_windowed_group_holds_a_window_and_a_step_of_a_prompt_as_long_as_may_be(
    window: int, chunk: int
) -> None:
    kv = cache(64, window, max_step_tokens=chunk)
    length = 90
    most = span_blocks(window, max(chunk, BLOCK_SIZE), BLOCK_SIZE)
    assert most < 8
    blocks = kv.open(tokens(length), SHARED_BY_ALL, 100)
    assert kv.place(blocks, length) == 0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        assert kv.num_ready_tokens(blocks) >= end
        looked_at = range(first_live_block(window, start, BLOCK_SIZE), -(-end // BLOCK_SIZE))
        assert blocks.tables[0][looked_at.start : looked_at.stop].all(), (start, end)
        assert len(blocks.blocks(0)) <= most
        kv.computed(blocks, tokens(length), end)
        kv.check_integrity([blocks])
    assert kv.grow(blocks, length + 8)
    kv.free(blocks)
    assert kv.num_free_blocks == 63


def test_a_block_still_held_by_another_makes_a_prompt_wait_until_that_one_leaves_it() -> None:
    kv = cache(8, 4, max_step_tokens=4)  # 7 usable blocks, a span is 3
    kv.free(placed(kv, tokens(4)))
    ahead, behind = (kv.open(tokens(40), SHARED_BY_ALL, 100) for _ in range(2))
    assert [kv.place(blocks, 40) for blocks in (ahead, behind)] == [4, 4]
    others = kv.pools[0].acquire(kv.num_free_blocks)
    assert others is not None
    kv.computed(ahead, tokens(40), 8)
    assert kv.num_ready_tokens(ahead) == 12  # none came for the block that the other holds still
    kv.computed(behind, tokens(40), 8)
    assert kv.num_ready_tokens(behind) == 16
    kv.pools[0].release(others)
    kv.check_integrity([ahead, behind])
    for blocks in (behind, ahead):
        end = 8
        while end < 40:
            end = min(kv.num_ready_tokens(blocks), 40)
            kv.computed(blocks, tokens(40), end)
        kv.free(blocks)
    kv.check_integrity([])


def test_of_two_equal_blocks_one_gives_way_and_a_pushed_one_only_after_its_release() -> None:
    kv = cache()
    first, second = placed(kv, tokens(8), False), placed(kv, tokens(8), False)
    third = kv.open(tokens(8), SHARED_BY_ALL, 100)
    kv.will_push(third, 0, 8)
    kv.place(third, 8)
    own = third.blocks(0)
    for blocks in (first, second, third):
        kv.computed(blocks, tokens(8), 8)
        kv.check_integrity([first, second, third])
    assert first.blocks(0) == second.blocks(0) == third.blocks(0)
    assert sorted(block for _, block in third.twins) == sorted(own)
    assert kv.num_free_blocks == 31 - 2 - 2
    for blocks in (first, second, third):
        kv.free(blocks)
    assert kv.num_free_blocks == 31
    kv.check_integrity([])


def test_quarantine_parks_what_was_to_be_written_and_gives_back_what_was_cached() -> None:
    kv = cache(32, None, 8)
    kv.free(placed(kv, tokens(8)))
    blocks = kv.open(tokens(23), SHARED_BY_ALL, 100)
    assert kv.place_lease(blocks, 23) == 8
    kv.quarantine(blocks)
    assert [pool.num_quarantined for pool in kv.pools] == [4, 3]
    kv.check_integrity([])
    kv.unquarantine(blocks)
    assert [pool.num_free for pool in kv.pools] == [31, 31]
    kv.check_integrity([])
