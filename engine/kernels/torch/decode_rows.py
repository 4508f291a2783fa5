"""Where a step's decodes find their keys: padded tables, made once a step on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.step_batch import GroupBatch, StepBatch, to_device

_Ints = npt.NDArray[np.int64]
MOST_BLOCKS = 1 << 14
"""Blocks that are gathered at once. This bounds the memory of a step whose sequences share blocks.
"""


@dataclass(frozen=True)
class DecodeRows:
    """Decodes that look at similarly many blocks. A slot is a position in a row's blocks."""

    rows: torch.Tensor
    """int64 [n]: which tokens of the step."""
    blocks: torch.Tensor
    """int64 [n, width]; a shorter row is padded with one of its own blocks."""
    visible: torch.Tensor
    """bool [n, 1, 1, width * block_size]: slots that the row's token looks at."""
    junk_rows: torch.Tensor
    junk_slots: torch.Tensor
    """int64 [number of junk slots] each: slots with arbitrary content, NaN included."""


def decode_rows(
    batch: StepBatch,
    group: GroupBatch,
    window: int | None,
    block_size: int,
    device: torch.device,
) -> list[DecodeRows]:
    """Put the sequences with one new token into buckets. No bucket is half padding or, unless it
    holds a single sequence, larger than `MOST_BLOCKS`."""
    seqs = np.flatnonzero(np.diff(batch.query_starts) == 1)
    ends = batch.context_lens[seqs] + 1
    begins = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
    firsts = begins // block_size
    counts = (ends - 1) // block_size - firsts + 1
    tables = group.host_tables
    found = []
    for where in _buckets(counts):
        first, count = firsts[where], counts[where]
        width = int(count.max())
        entry = np.arange(width)
        padding = entry >= count[:, None]
        # A row of three blocks or more has a whole one behind its first.
        spare = np.where(count >= 3, 1, count - 1)
        entries = np.where(padding, spare[:, None], entry) + first[:, None]
        blocks = tables[group.table_starts[seqs[where], None] + entries].astype(np.int64)
        position = (first[:, None] + entry)[..., None] * block_size + np.arange(block_size)
        visible = (position >= begins[where, None, None]) & (position < ends[where, None, None])
        junk = ~visible & ~(padding & (count >= 3)[:, None])[..., None]
        junk_rows, junk_slots = np.nonzero(junk.reshape(len(where), -1))
        found.append(
            DecodeRows(
                to_device(batch.query_starts[seqs[where]], device),
                to_device(blocks, device),
                to_device(visible.reshape(len(where), 1, 1, -1), device),
                to_device(junk_rows, device),
                to_device(junk_slots, device),
            )
        )
    return found


def _buckets(counts: _Ints) -> Iterator[_Ints]:
    """Positions in `counts`, grouped by power of two, as long as a group is not too large."""
    powers = np.frexp(counts - 0.5)[1]  # 1 -> 0, 2 -> 1, 3 and 4 -> 2, 5 to 8 -> 3
    for power in np.unique(powers):
        places = np.flatnonzero(powers == power)
        at_once = max(1, MOST_BLOCKS // int(counts[places].max()))
        for start in range(0, len(places), at_once):
            yield places[start : start + at_once]
