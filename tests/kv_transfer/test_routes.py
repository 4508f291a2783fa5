"""What goes where: a pure function of layouts, checked against a copy done head by head."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_sides import LAYOUT, ONE_HEAD

from kv_transfer.errors import LeaseError
from kv_transfer.layout import (
    KvLayout,
    LayerGroup,
    RegionLayout,
    TensorSpec,
    kv_fingerprint,
    model_fingerprint,
)
from kv_transfer.lease import Region
from kv_transfer.routes import RankPair, Route, pairs
from kv_transfer.transport import BlockAddresses, CopyPath, Runs

WIDTHS = [1, 2, 4]


def all_heads(layout: KvLayout, source_size: int, target_size: int, tensor: TensorSpec) -> list:
    return [
        (pair.target_rank, head)
        for pair in pairs(layout, source_size, target_size)
        for head in pair.heads(tensor)
    ]


@pytest.mark.parametrize("source_size", WIDTHS)
@pytest.mark.parametrize("target_size", WIDTHS)
@pytest.mark.parametrize("layout", [LAYOUT, ONE_HEAD])
def test_every_rank_gets_each_head_it_holds_exactly_once(
    layout: KvLayout, source_size: int, target_size: int
) -> None:
    for group in layout.groups:
        for tensor in group.tensors:
            held = [
                (rank, head)
                for rank in range(target_size)
                for head in tensor.heads_of_rank(rank, target_size)
            ]
            assert sorted(all_heads(layout, source_size, target_size, tensor)) == sorted(held)


@pytest.mark.parametrize("source_size", WIDTHS)
def test_the_lowest_rank_sends_a_replicated_head(source_size: int) -> None:
    assert {p.source_rank for p in pairs(ONE_HEAD, source_size, 2)} == {0}


def test_rank_0_always_feeds_rank_0() -> None:
    for source in WIDTHS:
        for target in WIDTHS:
            assert RankPair(0, source, 0, target) in pairs(ONE_HEAD, source, target)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 7), st.integers(0, 1), st.integers(0, 7)),
        min_size=1,
        max_size=20,
    )
)
def test_coalescing_keeps_every_byte_and_crosses_no_region(
    runs: list[tuple[int, int, int, int]],
) -> None:
    length = 10
    regions = array("Q", (0, 8 * length))  # side by side, of 8 blocks
    place = BlockAddresses(regions, 8, array("Q", (0,)), array("Q", (length,)))
    sources, targets = (
        array("Q", (region * 8 + row for region, row in side))
        for side in ([run[:2] for run in runs], [run[2:] for run in runs])
    )
    merged = list(
        Runs(CopyPath(place, place, array("Q", (length,)), ()), sources, targets).coalesced()
    )
    expanded = [(s + i, t + i, h, r) for s, t, n, h, r in merged for i in range(n)]
    assert expanded == [
        (s * length + i, t * length + i, s // 8, t // 8)
        for s, t in zip(sources, targets)
        for i in range(length)
    ]
    follow_on = [
        (s + 1, t + 1) == (s2, t2) and s2 % 8 > 0 and t2 % 8 > 0
        for (s, t), (s2, t2) in pairwise(zip(sources, targets))
    ]
    assert len(merged) == len(runs) - sum(follow_on)


def test_a_run_of_neighbouring_blocks_is_one_put_for_each_tensor() -> None:
    layout = RegionLayout(LAYOUT, 0, 1, 16)
    regions = [Region(0, 16, 1 << 20, layout.num_bytes(), b"")]
    route = Route(layout, regions, 0, 1, regions)
    runs = route.runs(0, [3, 4, 5, 6], [8, 9, 10, 11])  # type: ignore[list-item]
    assert runs is not None
    assert len(list(runs.coalesced())) == 2
    assert route.at_layer(runs, 0, 0).source_offset == 0
    assert route.at_layer(runs, 0, 1).source_offset == layout.tensor_offset(1, "k")


@pytest.mark.parametrize(
    "regions",
    [
        [],
        [Region(0, 16, 0, 10, b"")],
        [Region(0, 16, 0, 1 << 20, b""), Region(16, 8, 0, 1 << 20, b"")],
        [Region(0, 16, 0, 1 << 20, b""), Region(17, 16, 0, 1 << 20, b"")],
    ],
)
def test_regions_that_cannot_hold_the_blocks_are_refused(regions: list[Region]) -> None:
    layout = RegionLayout(LAYOUT, 0, 1, 16)
    with pytest.raises(LeaseError):
        Route(layout, [Region(0, 16, 0, 1 << 20, b"")], 0, 1, regions)


def test_heads_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 k heads do not fit 2 ranks"):
        TensorSpec("k", 3, 8, "float32").heads_of_rank(0, 2)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_tensors_of_a_region_fill_it_without_overlap(tp_size: int) -> None:
    layout = RegionLayout(LAYOUT, tp_size - 1, tp_size, 5)
    spans = []
    for group in LAYOUT.groups:
        for layer in range(group.first_layer, group.first_layer + group.num_layers):
            for tensor in group.tensors:
                start = layout.tensor_offset(layer, tensor.name)
                spans.append((start, start + 5 * layout.tensor_block_bytes(tensor)))
    spans.sort()
    assert spans[0][0] == 0
    assert spans[-1][1] == layout.num_bytes()
    assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_fingerprints_differ_for_other_weights_and_models_and_one_for_other_layouts() -> None:
    other = KvLayout(8, (LayerGroup(0, 2, LAYOUT.groups[0].tensors),))
    rope = {"theta": 1e4}
    prints = {
        *(kv_fingerprint(LAYOUT, "w"), kv_fingerprint(LAYOUT, "v"), kv_fingerprint(other, "w")),
        *(model_fingerprint("w"), model_fingerprint("v")),
        *(kv_fingerprint(LAYOUT, "w", rope=rope), model_fingerprint("w", rope=rope)),
    }
    assert len(prints) == 7
    assert kv_fingerprint(LAYOUT, "w", a=1, b=2) == kv_fingerprint(LAYOUT, "w", b=2, a=1)
    assert model_fingerprint("w", a=1, b=2) == model_fingerprint("w", b=2, a=1)
    with pytest.raises(TypeError):
        kv_fingerprint(LAYOUT, "w", rope={1, 2})
