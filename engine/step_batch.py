"""A step's sequences, packed into flat arrays for the decoder and its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.request import ScheduledSeq

_ALIGNED_BYTES = 8  # the largest of the dtypes below
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True)
class GroupBatch:
    """Block tables of one layer group, sequence after sequence."""

    slots: torch.Tensor
    """int64 [num_tokens]: where each token's KV goes, block_id * block_size + offset."""
    tables: torch.Tensor
    """int32 [sum of table lengths]."""
    host_tables: npt.NDArray[np.int32]
    """The same in host memory."""
    table_starts: npt.NDArray[np.int64]
    """[num_seqs + 1]: a sequence's table is tables[table_starts[i] : table_starts[i + 1]]."""


@dataclass(frozen=True)
class StepBatch:
    """The tokens of a step, sequence after sequence."""

    token_ids: torch.Tensor
    """int64 [num_tokens]."""
    positions: torch.Tensor
    """int64 [num_tokens]."""
    query_starts: npt.NDArray[np.int64]
    """[num_seqs + 1]: a sequence's tokens are query_starts[i] : query_starts[i + 1]."""
    context_lens: npt.NDArray[np.int64]
    """[num_seqs]: tokens of each sequence that are in the KV cache before the step."""
    groups: tuple[GroupBatch, ...]
    sample_rows: torch.Tensor
    """int64 [num_samples]: the last token of each sequence that samples."""

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)


def pack(seqs: Sequence[ScheduledSeq], block_size: int, device: torch.device) -> StepBatch:
    """Lay out a plan's sequences. There must be at least one, each with a token and its blocks."""
    counts = np.array([len(seq.token_ids) for seq in seqs], dtype=np.int64)
    context_lens = np.array([seq.start for seq in seqs], dtype=np.int64)
    query_starts = _starts(counts)
    # Position of token t of sequence i: start_i + (t - query_start_i).
    positions = np.arange(query_starts[-1]) + np.repeat(context_lens - query_starts[:-1], counts)
    token_ids = np.concatenate([seq.token_ids for seq in seqs]).astype(np.int64)
    samples = np.array([seq.samples for seq in seqs], dtype=bool)

    groups = []
    for group in range(len(seqs[0].block_tables)):
        tables = [np.asarray(seq.block_tables[group], dtype=np.int32) for seq in seqs]
        table_starts = _starts(np.array([len(table) for table in tables], dtype=np.int64))
        flat = np.concatenate(tables)
        entry = np.repeat(table_starts[:-1], counts) + positions // block_size
        slots = flat[entry].astype(np.int64) * block_size + positions % block_size
        on_device = to_device(slots, device), to_device(flat, device)
        groups.append(GroupBatch(*on_device, flat, table_starts))
    return StepBatch(
        token_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        query_starts=query_starts,
        context_lens=context_lens,
        groups=tuple(groups),
        sample_rows=to_device(query_starts[1:][samples] - 1, device),
    )


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of the array, which must not change: on a CPU they share memory. A copy to a CUDA
    device does not make the host wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device_together(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device
) -> list[torch.Tensor]:
    """Tensors of the arrays, moved as one. Nothing is moved if all are empty."""
    if not any(array.size for array in arrays):
        return [
            torch.empty(array.shape, dtype=_TORCH_DTYPES[array.dtype], device=device)
            for array in arrays
        ]
    ends = np.cumsum([-(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for array in arrays])
    content = np.empty(ends[-1], np.uint8)
    starts = [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays):
        content[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    moved = to_device(content, device)
    return [
        moved[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays)
    ]


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
