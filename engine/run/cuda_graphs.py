"""Decodes replayed as CUDA graphs, so that the host launches a step and not its kernels.

1. A step of decodes alone is laid out on the host as ever, padded to a bucket of sequences, and
   copied to a buffer that stays, all at once.
2. The first step of a bucket runs the decoder over this buffer once, and once more to record it.
3. Each step replays its bucket's graph. The hidden states lie where they lay when it was recorded.

Rows that pad a bucket have no slot and nothing to attend to: they write no KV. Graphs share the
memory of what happens inside them, since only one runs at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.paged_kv import PagedKv
from engine.kernels.pieces import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    AttentionWork,
    Cutting,
    DevicePieces,
    cut,
)
from engine.kernels.step_batch import ArraySpec, GroupBatch, StepBatch, StepBuffer, lay_out
from engine.models.decoder import Decoder
from engine.request import ScheduledSeq, StepPlan
from kv_transfer.layout import KvLayout

log = logging.getLogger(__name__)

MOST_SEQS = 512
_MOST_BLOCKS = 1 << 20
"""Most blocks in all tables of a step: 4 MiB for each bucket."""
_LEAST_STEP = 8


def bucket_of(num_seqs: int) -> int:
    """Round up to a bucket: 1, 2, 4, then multiples of an eighth of the next power of two, at least
    of 8."""
    power: int = 1 << (num_seqs - 1).bit_length()
    if power <= _LEAST_STEP:
        return power
    step = max(_LEAST_STEP, power // 8)
    return -(-num_seqs // step) * step


class DecodeInputs:
    """The inputs of a bucket's steps, at a fixed place on the device."""

    def __init__(
        self,
        layout: KvLayout,
        cutting: Cutting,
        bucket: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._cutting = cutting
        num_groups = len(layout.groups)
        of_group: list[ArraySpec] = [
            ArraySpec((bucket,), np.int64, -1),  # slots
            ArraySpec((cutting.most_items(bucket), ITEM_FIELDS), np.int32),
            ArraySpec((bucket, MERGE_FIELDS), np.int32),
        ]
        most_blocks = num_groups * bucket * -(-max_model_len // layout.block_size)
        most_blocks = min(most_blocks, _MOST_BLOCKS)
        self._buffer = StepBuffer(
            [
                ArraySpec((bucket,), np.int64),  # token ids
                ArraySpec((bucket,), np.int64),  # positions
                *(num_groups * of_group),
                ArraySpec((most_blocks,), np.int32),  # all tables; last, as most is not in use
            ],
            device,
        )
        token_ids, positions, *rest, tables = self._buffer.tensors
        nothing = np.zeros(bucket + 1, np.int64)
        groups = [
            GroupBatch(
                *(slots, tables, nothing[:0].astype(np.int32), nothing),
                AttentionWork(DevicePieces(items, merges, cutting.most_parts), None),
            )
            for slots, items, merges in zip(rest[::3], rest[1::3], rest[2::3])
        ]
        self.batch = StepBatch(
            token_ids,
            positions,
            query_starts=np.arange(bucket + 1),
            context_lens=nothing[1:],
            groups=tuple(groups),
            sample_rows=token_ids[:0],
        )
        """What the decoder takes. Lengths and tables are on the device alone."""

    def fill(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Put in sequences with one new token each; at most as many as the bucket has, with at most
        `_MOST_BLOCKS`."""
        host = lay_out(seqs, self._layout.block_size)
        ones = np.ones(len(seqs), np.int64)
        arrays: list[npt.NDArray[Any]] = [host.token_ids, host.positions]
        tables_start = 0
        for group, described in zip(host.groups, self._layout.groups):
            table_starts = tables_start + group.table_starts[:-1]
            pieces = cut(
                *(host.query_starts[:-1], ones, host.context_lens, table_starts),
                described.window,
                self._cutting,
            )
            tables_start += len(group.tables)
            arrays += [group.slots, pieces.items, pieces.merges]
        self._buffer.fill([*arrays, np.concatenate([group.tables for group in host.groups])])


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: DecodeInputs
    hidden: torch.Tensor
    """[bucket, hidden]."""


class DecodeGraphs:
    """The graphs of one rank, recorded as their buckets are met."""

    def __init__(self, decoder: Decoder, kv: PagedKv, cutting: Cutting, max_model_len: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._cutting = cutting
        self._max_model_len = max_model_len
        self._recorded: dict[int, _Recorded] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None  # products have memory for each stream

    @classmethod
    def on(cls, decoder: Decoder, kv: PagedKv, max_model_len: int) -> DecodeGraphs | None:
        """Make graphs, or None where a step cannot be recorded: on a CPU, without Triton's kernels,
        with several ranks, or where the host must wait within a step."""
        if decoder.device.type != "cuda" or decoder.host_waits or decoder.kernels.name != "triton":
            return None
        from engine.kernels.triton.triton_kernels import decode_cutting

        cutting = decode_cutting(decoder.attention, kv.layers[0].keys)
        return None if cutting is None else cls(decoder, kv, cutting, max_model_len)

    def hidden(self, plan: StepPlan) -> torch.Tensor | None:
        """The hidden states [n, hidden] of a step of n decodes, valid until the next step. None,
        and nothing is done, for any other step."""
        seqs = plan.seqs
        if plan.pushes or len(seqs) > MOST_SEQS:
            return None
        if any(len(seq.token_ids) != 1 or not seq.samples for seq in seqs):
            return None
        if sum(len(table) for seq in seqs for table in seq.block_tables) > _MOST_BLOCKS:
            return None
        bucket = bucket_of(len(seqs))
        recorded = self._recorded.get(bucket)
        if recorded is None:
            recorded = self._recorded[bucket] = self._record(bucket, seqs)
        else:
            recorded.inputs.fill(seqs)
        recorded.graph.replay()
        return recorded.hidden[: len(seqs)]

    def _record(self, bucket: int, seqs: Sequence[ScheduledSeq]) -> _Recorded:
        started_at = time.monotonic()
        inputs = DecodeInputs(
            *(self._kv.layout, self._cutting, bucket, self._max_model_len), self._decoder.device
        )
        inputs.fill(seqs)
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        stream, current = self._stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Once as it is: what is compiled, loaded or set up at first use cannot be recorded.
            self._decoder.forward(inputs.batch, self._kv, lambda layer: None)
            # Other threads may ask the device for things meanwhile, such as transfers.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            hidden = self._decoder.forward(inputs.batch, self._kv, lambda layer: None)
            graph.capture_end()
        current.wait_stream(stream)
        log.info("recorded decodes of %d in %.2f s", bucket, time.monotonic() - started_at)
        return _Recorded(graph, inputs, hidden)
