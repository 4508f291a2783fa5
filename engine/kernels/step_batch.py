"""A step's sequences, packed into flat arrays for the decoder and its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.request import ScheduledSeq

if TYPE_CHECKING:
    from engine.kernels.pieces import AttentionWork

_ALIGNED_BYTES = 16  # what a GPU's program may rely on, once compiled for such an address
_TORCH_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
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
    work: AttentionWork | None = None
    """How attention is cut; None: the kernels cut it themselves."""


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


@dataclass(frozen=True)
class HostGroup:
    """One layer group's part of a `HostBatch`; see `GroupBatch`."""

    slots: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    table_starts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostBatch:
    """A `StepBatch` before it travels."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_starts: npt.NDArray[np.int64]
    context_lens: npt.NDArray[np.int64]
    groups: tuple[HostGroup, ...]


def lay_out(seqs: Sequence[ScheduledSeq], block_size: int) -> HostBatch:
    """Lay out a plan's sequences. There must be at least one, each with a token and its blocks."""
    counts = np.array([len(seq.token_ids) for seq in seqs], dtype=np.int64)
    context_lens = np.array([seq.start for seq in seqs], dtype=np.int64)
    query_starts = _starts(counts)
    # Position of token t of sequence i: start_i + (t - query_start_i).
    positions = np.arange(query_starts[-1]) + np.repeat(context_lens - query_starts[:-1], counts)
    token_ids = np.concatenate([seq.token_ids for seq in seqs]).astype(np.int64)

    groups = []
    for group in range(len(seqs[0].block_tables)):
        tables = [seq.block_tables[group] for seq in seqs]
        table_starts = _starts(np.array([len(table) for table in tables], dtype=np.int64))
        flat = np.concatenate(tables).astype(np.int32, copy=False)
        entry = np.repeat(table_starts[:-1], counts) + positions // block_size
        slots = flat[entry].astype(np.int64) * block_size + positions % block_size
        groups.append(HostGroup(slots, flat, table_starts))
    return HostBatch(token_ids, positions, query_starts, context_lens, tuple(groups))


def pack(seqs: Sequence[ScheduledSeq], block_size: int, device: torch.device) -> StepBatch:
    """`lay_out`, then move it all to the device at once."""
    host = lay_out(seqs, block_size)
    samples = np.array([seq.samples for seq in seqs], dtype=bool)
    sample_rows = host.query_starts[1:][samples] - 1
    per_group = [array for group in host.groups for array in (group.slots, group.tables)]
    token_ids, positions, rows, *moved = to_device_together(
        [host.token_ids, host.positions, sample_rows, *per_group], device
    )
    groups = tuple(
        GroupBatch(slots, tables, group.tables, group.table_starts)
        for slots, tables, group in zip(moved[::2], moved[1::2], host.groups)
    )
    return StepBatch(token_ids, positions, host.query_starts, host.context_lens, groups, rows)


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Make a tensor of the array, which must not change: on a CPU they share memory. A copy to a
    CUDA device does not make the host wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class ArraySpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: type[np.generic]
    fill: int = 0
    """What follows the rows in use."""


class StepBuffer:
    """Arrays of fixed shapes at a fixed place on the device, filled anew for each step."""

    def __init__(self, specs: Sequence[ArraySpec], device: torch.device) -> None:
        self._specs = specs
        self._sizes = [math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs]
        self._starts = _aligned_starts(self._sizes)
        self._bytes = torch.zeros(self._starts.pop(), dtype=torch.uint8, device=device)
        self.tensors = [
            self._bytes[start : start + size].view(_TORCH_DTYPES[np.dtype(s.dtype)]).view(s.shape)
            for start, size, s in zip(self._starts, self._sizes, specs)
        ]

    def fill(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write each array's first rows, and fill up all but the last. The host does not wait."""
        used = self._starts[-1] + arrays[-1].nbytes
        on_gpu = self._bytes.device.type == "cuda"
        content = torch.empty(used, dtype=torch.uint8, pin_memory=on_gpu)
        room = content.numpy()
        for spec, start, size, array in zip(self._specs, self._starts, self._sizes, arrays):
            assert array.dtype == spec.dtype, f"{array.dtype}, not {spec}"
            assert array.nbytes <= size, f"{array.nbytes} bytes, not {spec}"
            typed = room[start : min(start + size, used)].view(spec.dtype)
            typed[: array.size] = array.reshape(-1)
            typed[array.size :] = spec.fill
        self._bytes[:used].copy_(content, non_blocking=True)


def to_device_together(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device
) -> list[torch.Tensor]:
    """Make tensors of the arrays, moved as one. Nothing is moved if all are empty."""
    if not any(array.size for array in arrays):
        return [
            torch.empty(array.shape, dtype=_TORCH_DTYPES[array.dtype], device=device)
            for array in arrays
        ]
    starts = _aligned_starts([array.nbytes for array in arrays])
    content = np.empty(starts.pop(), np.uint8)
    for start, array in zip(starts, arrays):
        content[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    moved = to_device(content, device)
    return [
        moved[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays)
    ]


def _aligned_starts(sizes: Sequence[int]) -> list[int]:
    """Compute where arrays of these bytes start, and where the last one ends."""
    return [0, *np.cumsum([-(-s // _ALIGNED_BYTES) * _ALIGNED_BYTES for s in sizes]).tolist()]


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
