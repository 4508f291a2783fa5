"""A step's plan as rank 0 sends it: the difference from the plan before.

Block tables grow by one entry in many steps, but a whole one has an entry for each block of a
context. So both ends keep the tables of the last plan's sequences. A new sequence is sent whole.
One that the next plan lacks is forgotten, finished or not. The two ends stay equal only if every
plan arrives in order, so each has a number, and a gap is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.request import BlockPush, RequestId, ScheduledSeq, Scored, StepPlan

Int32s = npt.NDArray[np.int32]

_NO_ENTRIES: Int32s = np.zeros(0, np.int32)


class LostPlanError(Exception):
    """A plan is missing, came twice or in another order: block tables would be wrong."""


@dataclass(frozen=True)
class PlanDelta:
    """A plan, for a rank that has the one before.

    Fields are per sequence unless they say otherwise. A flat array holds the parts of all sequences
    in order, and within a sequence those of all layer groups.
    """

    number: int
    """The plan's number: 1, 2, 3, ..."""
    step: int
    num_tokens: int
    pushes: tuple[BlockPush, ...]
    sink_messages: tuple[bytes, ...]
    new_ids: tuple[RequestId, ...]
    """Ids of the sequences that the plan before did not have."""
    which: Int32s
    """Each sequence's position in the plan before; new ones are numbered from that plan's end."""
    starts: Int32s
    samples: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.bool_]
    token_counts: Int32s
    token_ids: npt.NDArray[np.uint32]
    """[sum of token_counts]."""
    table_lens: Int32s
    """[num_seqs, num_groups]."""
    changed_counts: Int32s
    """[num_seqs, num_groups]: entries that are new or differ from the table before."""
    changed_at: Int32s
    """[sum of changed_counts]: their positions in their tables."""
    changed_to: Int32s
    """[sum of changed_counts]: the block ids there now."""


@dataclass
class _Known:
    """A sequence of the last plan, as both ends remember it."""

    request_id: RequestId
    tables: list[Int32s] = field(default_factory=list)

    def resize(self, lengths: Sequence[int]) -> None:
        """Take tables of these lengths. Former entries stay."""
        self.tables += [_NO_ENTRIES] * (len(lengths) - len(self.tables))
        for group, length in enumerate(lengths):
            if length != len(self.tables[group]):
                fresh = np.zeros(length, np.int32)
                kept = self.tables[group][:length]
                fresh[: len(kept)] = kept
                self.tables[group] = fresh


class PlanEncoder:
    """Rank 0's end: makes deltas of plans."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[RequestId, tuple[int, _Known]] = {}  # with its position in the plan

    def encode(self, plan: StepPlan) -> PlanDelta:
        """Describe a plan to the other ranks. Send every delta, in order."""
        self._number += 1
        new_ids: list[RequestId] = []
        which, changed_at, changed_to, lengths, counts = [], [], [], [], []
        now: dict[RequestId, tuple[int, _Known]] = {}
        for position, seq in enumerate(plan.seqs):
            if seq.request_id in self._last:
                before, known = self._last[seq.request_id]
            else:
                before, known = len(self._last) + len(new_ids), _Known(seq.request_id)
                new_ids.append(seq.request_id)
            which.append(before)
            changed = _take_over(known, seq)
            lengths.append([len(table) for table in known.tables])
            counts.append([len(at) for at in changed])
            changed_at += changed
            changed_to += [table[at] for table, at in zip(known.tables, changed)]
            now[seq.request_id] = position, known
        assert len(now) == len(plan.seqs), [seq.request_id for seq in plan.seqs]
        self._last = now
        return PlanDelta(
            self._number,
            plan.step,
            plan.num_tokens,
            plan.pushes,
            plan.sink_messages,
            tuple(new_ids),
            np.array(which, np.int32),
            np.array([seq.start for seq in plan.seqs], np.int32),
            np.array([seq.samples for seq in plan.seqs], np.bool_),
            np.array([seq.scored is not None for seq in plan.seqs], np.bool_),
            np.array([len(seq.token_ids) for seq in plan.seqs], np.int32),
            _flat([seq.token_ids for seq in plan.seqs], np.uint32),
            np.array(lengths, np.int32),
            np.array(counts, np.int32),
            _flat(changed_at, np.int32),
            _flat(changed_to, np.int32),
        )


class PlanDecoder:
    """The end of a rank above 0: makes plans of deltas."""

    def __init__(self) -> None:
        self._number = 0
        self._last: list[_Known] = []

    def plan(self, delta: PlanDelta) -> StepPlan:
        """Restore the plan that was sent. Its block tables are valid until the next call.

        Raises LostPlanError when it is not the one after the last.
        """
        if delta.number != self._number + 1:
            raise LostPlanError(f"plan {delta.number} came after plan {self._number}")
        self._number = delta.number
        known = self._last + [_Known(request_id) for request_id in delta.new_ids]
        self._last = [known[i] for i in delta.which]
        ends = np.cumsum(delta.token_counts)
        tokens = np.split(delta.token_ids, ends[:-1]) if len(ends) else []
        seqs, entry = [], 0
        for i, each in enumerate(self._last):
            each.resize(delta.table_lens[i].tolist())
            for group, count in enumerate(delta.changed_counts[i]):
                part = slice(entry, entry := entry + int(count))
                each.tables[group][delta.changed_at[part]] = delta.changed_to[part]
            tables = tuple(each.tables)
            start, samples = int(delta.starts[i]), bool(delta.samples[i])
            scored = Scored(tokens[i][:0], 0) if delta.scores[i] else None  # rank 0 knows which
            seqs.append(ScheduledSeq(each.request_id, tokens[i], start, tables, samples, scored))
        return StepPlan(
            delta.step, tuple(seqs), delta.pushes, delta.sink_messages, delta.num_tokens
        )


def _take_over(known: _Known, seq: ScheduledSeq) -> list[Int32s]:
    """Store the sequence's tables, and note which entries changed or are new."""
    had = [len(table) for table in known.tables] or [0] * len(seq.block_tables)
    known.resize([len(table) for table in seq.block_tables])
    changed = []
    for table, now, length in zip(known.tables, seq.block_tables, had, strict=True):
        if length == len(now) and table.tobytes() == now.tobytes():  # most of them, in most steps
            changed.append(_NO_ENTRIES)
            continue
        differs = table != now
        differs[length:] = True  # a new entry is sent even if it is the null block
        at = np.flatnonzero(differs).astype(np.int32)
        if len(at):
            table[at] = now[at]
        changed.append(at)
    return changed


def _flat(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
