"""How a step's attention is cut: every key of every token once, and never too many pieces."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.pieces import KEY_STEP, Cutting, cut


@settings(max_examples=200, deadline=None)
@given(
    seqs=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=20),
    window=st.sampled_from([None, 1, 17, 64, 1000]),
    tile=st.sampled_from([1, 4, 18, 32]),
    wanted=st.sampled_from([1, 7, 132]),
    least=st.sampled_from([64, 200, 512]),
)
def test_each_tile_has_all_of_its_keys_once(
    seqs: list[tuple[int, int]], window: int | None, tile: int, wanted: int, least: int
) -> None:
    contexts, counts = np.array(seqs, np.int64).T
    rows = np.cumsum(counts) - counts
    cutting = Cutting(tile, wanted, least)
    pieces = cut(rows, counts, contexts, 1000 * np.arange(len(seqs)), window, cutting)
    num_tiles = int((-(-counts // tile)).sum())
    assert len(pieces.items) <= cutting.most_items(num_tiles)
    assert pieces.num_parts <= cutting.most_parts

    keys: dict[int, list[tuple[int, int]]] = {}
    parts: dict[int, int] = {}  # part -> first row of its tile
    for row, count, position, table_start, begin, end, part, _ in pieces.items.tolist():
        seq = table_start // 1000
        assert position == contexts[seq] + row - rows[seq]
        assert row + count <= rows[seq] + counts[seq]
        assert end == position + count or (end - begin) % KEY_STEP == 0
        keys.setdefault(row, []).append((begin, end))
        if part >= 0:
            assert part not in parts
            parts[part] = row
    assert sorted(parts) == list(range(pieces.num_parts))
    covered = 0
    for row, spans in keys.items():
        seq = int(np.searchsorted(rows, row, side="right")) - 1
        position, last = contexts[seq] + row - rows[seq], min(row + tile, rows[seq] + counts[seq])
        spans.sort()
        assert spans[0][0] == (0 if window is None else max(0, position + 1 - window))
        assert spans[-1][1] == position + last - row
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert all(begin < end for begin, end in spans)
        covered += last - row
        of_tile = [m for m in pieces.merges.tolist() if row <= m[0] < last]
        if len(spans) == 1:
            assert not of_tile
            continue
        assert [(m[0], m[3]) for m in of_tile] == [(row + i, i) for i in range(last - row)]
        for _, first, num_parts, _ in of_tile:
            assert [parts[first + i] for i in range(num_parts)] == [row] * len(spans)
    assert covered == counts.sum()
