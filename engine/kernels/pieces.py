"""A step's attention, cut on the host into pieces of similar work.

A tile is a few neighbouring tokens of one sequence, with all heads that share a KV head. Its keys
are split over several pieces where there would be too few tiles for the device (flash-decoding), so
one long sequence takes as many processors as many short ones. What the pieces of a tile found is
merged afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

_Ints = npt.NDArray[np.int64]

ITEM_FIELDS = 8
"""Of a piece: first row of its tokens, how many they are, position of the first, start of the
sequence's table, first key and end of its keys, its part (-1: it has all keys of its tile), 0."""
MERGE_FIELDS = 4
"""Of a token whose keys are split: its row, first part, number of parts, its place in the tile."""
KEY_STEP = 64
"""Pieces hold a multiple of as many keys, but for a tile's last."""


@dataclass(frozen=True)
class Cutting:
    """How the tokens of a step are cut."""

    tile: int
    """Tokens of a tile."""
    wanted: int
    """Pieces that keep the device busy."""
    least: int
    """Keys below which a piece is not worth its merge."""

    def most_items(self, num_tiles: int) -> int:
        return self.wanted + num_tiles

    @property
    def most_parts(self) -> int:
        """A split tile has at least two pieces, and more keys than a piece should have."""
        return 2 * self.wanted


Table = TypeVar("Table")
"""int32 numbers in rows: an array on the host, or a tensor on the device."""


@dataclass(frozen=True)
class Pieces(Generic[Table]):
    items: Table
    """[num_pieces, ITEM_FIELDS], the largest first. One without keys is skipped."""
    merges: Table
    """[num_split_tokens, MERGE_FIELDS]. One without parts is skipped."""
    num_parts: int


DevicePieces = Pieces[torch.Tensor]


@dataclass(frozen=True)
class AttentionWork:
    """What one launch each attends to: tokens that fit a small tile (decodes), and the others."""

    small: DevicePieces | None
    large: DevicePieces | None


def cut(
    first_rows: _Ints,
    counts: _Ints,
    context_lens: _Ints,
    table_starts: _Ints,
    window: int | None,
    cutting: Cutting,
) -> Pieces[npt.NDArray[np.int32]]:
    """Cut sequences, arrays [num_seqs] each: row of the first token, tokens, tokens before them,
    start of the table."""
    tiles = -(-counts // cutting.tile)
    seq = np.repeat(np.arange(len(counts)), tiles)
    behind = (np.arange(len(seq)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * cutting.tile
    count = np.minimum(cutting.tile, counts[seq] - behind)
    position = context_lens[seq] + behind
    end = position + count
    begin = np.zeros_like(end) if window is None else np.maximum(0, position + 1 - window)
    length = end - begin
    per_piece = _whole_steps(np.maximum(cutting.least, -(-length.sum() // cutting.wanted)))
    size = _whole_steps(-(-length // -(-length // per_piece)))
    pieces = -(-length // size)

    tile = np.repeat(np.arange(len(seq)), pieces)
    number = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    is_split = pieces > 1
    first_part = np.cumsum(np.where(is_split, pieces, 0)) - np.where(is_split, pieces, 0)
    item_begin = begin[tile] + number * size[tile]
    items = np.zeros((len(tile), ITEM_FIELDS), np.int32)
    items[:, 0] = (first_rows[seq] + behind)[tile]
    items[:, 1] = count[tile]
    items[:, 2] = position[tile]
    items[:, 3] = table_starts[seq][tile]
    items[:, 4] = item_begin
    items[:, 5] = np.minimum(item_begin + size[tile], end[tile])
    items[:, 6] = np.where(is_split[tile], first_part[tile] + number, -1)
    if len(items) > cutting.wanted:
        items = items[np.argsort(items[:, 4] - items[:, 5], kind="stable")]

    split = np.flatnonzero(is_split)
    merged = np.repeat(split, count[split])
    place = np.arange(len(merged)) - np.repeat(np.cumsum(count[split]) - count[split], count[split])
    merges = np.empty((len(merged), MERGE_FIELDS), np.int32)
    merges[:, 0] = (first_rows[seq] + behind)[merged] + place
    merges[:, 1] = first_part[merged]
    merges[:, 2] = pieces[merged]
    merges[:, 3] = place
    return Pieces(items, merges, int(pieces[split].sum()))


def _whole_steps(num_keys: _Ints) -> _Ints:
    return -(-num_keys // KEY_STEP) * KEY_STEP
