"""The Triton kernels behind the protocol, for tensors on a GPU.

Decodes and chunks of prompts take one launch each, whatever their number, windows and lengths. The
work is cut on the host, once a step and layer group (`pieces`), and travels to the device at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from engine.kernels.paged_kv import LayerKv
from engine.kernels.pieces import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    AttentionWork,
    Cutting,
    DevicePieces,
    Pieces,
    cut,
)
from engine.kernels.protocol import Activation, AttentionShape, HeadNorms, Rotation
from engine.kernels.step_batch import GroupBatch, StepBatch, to_device_together
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.kernels.triton import triton_programs as programs

_MOST_HEAD_DIM = 256
_MOST_HEADS_PER_KV_HEAD = 64
_LEAST_ROWS = 16
"""Fewest rows of a tensor core's product."""
_INTERPRETED_SMS = 2
_HEADS_AT_ONCE = 8
_PARTS_AT_ONCE = 16


@dataclass(frozen=True)
class Launch:
    """How many rows and keys a program of attention has at once, and how Triton compiles it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    pieces_per_sm: int
    """Pieces times KV heads that keep a multiprocessor busy."""
    least_keys: int
    """Keys below which a piece is not worth its merge."""
    max_registers: int | None = None
    """Most registers of a thread, so that more programs share a multiprocessor."""
    one_loop: bool = False
    """Mask all keys alike: where reading them takes the time, masks cost nothing."""


def small_launch(group: int, head_dim: int, item_bytes: int) -> Launch:
    rows = max(_LEAST_ROWS, triton.next_power_of_2(group))
    keys = 64 if head_dim * item_bytes <= 256 else 32
    return Launch(rows, keys, 4, 3, pieces_per_sm=2, least_keys=256, one_loop=True)


def large_launch(group: int, head_dim: int, item_bytes: int) -> Launch:
    if item_bytes == 4:  # products in float32, without tensor cores
        return Launch(max(32, triton.next_power_of_2(group)), 32, 4, 3, 1, 512)
    if head_dim > 128:
        return Launch(64, 32, 8, 3, 1, 512)
    # Two programs share a multiprocessor: one multiplies while the other takes exponentials.
    return Launch(128, 64, 8, 3, 1, 512, max_registers=128)


class TritonKernels:
    """Heads that the programs do not serve go to the torch kernels; see `serves`."""

    name = "triton"

    def __init__(self) -> None:
        self._torch = TorchKernels()
        self._batch: StepBatch | None = None
        self._work: dict[int, AttentionWork] = {}  # of the batch, by its groups' places

    @staticmethod
    def serves(num_heads: int, kv_heads: int, head_dim: int) -> bool:
        return head_dim <= _MOST_HEAD_DIM and num_heads <= _MOST_HEADS_PER_KV_HEAD * kv_heads

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _norm_rows(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return _norm_rows(x, residual, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty(len(gate_up), width)
        block = min(1024, triton.next_power_of_2(width))
        if len(out):
            is_gelu = activation is Activation.GELU_TANH
            programs.gate[(len(out), -(-width // block))](
                gate_up, out, WIDTH=width, BLOCK=block, GELU=is_gelu, num_warps=4
            )
        return out

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        norms: HeadNorms | None,
        rotation: Rotation,
        kv: LayerKv,
        group: GroupBatch,
    ) -> torch.Tensor:
        queries = qkv.new_empty(len(qkv), shape.num_heads, shape.head_dim)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        programs.rotate_and_write[(len(qkv), -(-heads // _HEADS_AT_ONCE))](
            qkv.contiguous(),
            queries,
            kv.keys,
            kv.values,
            group.slots,
            rotation.cos,
            rotation.sin,
            qkv if norms is None else norms.query,
            qkv if norms is None else norms.key,
            kv.keys.stride(0),
            kv.keys.stride(1),
            kv.blocks_per_region,
            shape.eps,
            HEADS=shape.num_heads,
            KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim,
            PADDED_HALF=triton.next_power_of_2(shape.head_dim // 2),
            BLOCK_SIZE=kv.block_size,
            NORMED=norms is not None,
            AT_ONCE=_HEADS_AT_ONCE,
            num_warps=4,
        )
        return queries

    def attend(
        self,
        queries: torch.Tensor,
        kv: LayerKv,
        batch: StepBatch,
        group: GroupBatch,
        shape: AttentionShape,
        window: int | None,
    ) -> torch.Tensor:
        num_heads, head_dim = queries.shape[1:]
        kv_heads = kv.keys.shape[2]
        if not self.serves(num_heads, kv_heads, head_dim):
            return self._torch.attend(queries, kv, batch, group, shape, window)
        shared = num_heads // kv_heads
        small = small_launch(shared, head_dim, queries.element_size())
        large = large_launch(shared, head_dim, queries.element_size())
        work = group.work or self._work_of(batch, group, window, kv_heads, shared, (small, large))
        out = torch.empty_like(queries)
        if work.small is not None:
            _attend(queries, out, kv, group.tables, (shape.scale, window), work.small, small)
        if work.large is not None:
            _attend(queries, out, kv, group.tables, (shape.scale, window), work.large, large)
        return out

    def _work_of(
        self,
        batch: StepBatch,
        group: GroupBatch,
        window: int | None,
        kv_heads: int,
        shared: int,
        launches: tuple[Launch, Launch],
    ) -> AttentionWork:
        """Cut a group's work in its first layer of a step; all of its layers use it."""
        if self._batch is not batch:
            self._batch, self._work = batch, {}
        found = self._work.get(id(group))
        if found is None:
            device = group.tables.device
            cuttings = [cutting(launch, shared, kv_heads, device) for launch in launches]
            found = _work_on_device(batch, group, window, cuttings)
            self._work[id(group)] = found
        return found


def decode_cutting(shape: AttentionShape, keys: torch.Tensor) -> Cutting | None:
    """How single tokens are cut, for keys as a `LayerKv` has them; None: torch's kernels attend."""
    if not TritonKernels.serves(shape.num_heads, shape.num_kv_heads, shape.head_dim):
        return None
    shared = shape.num_heads // shape.num_kv_heads
    launch = small_launch(shared, shape.head_dim, keys.element_size())
    return cutting(launch, shared, shape.num_kv_heads, keys.device)


def cutting(launch: Launch, shared: int, kv_heads: int, device: torch.device) -> Cutting:
    """Choose how tokens are cut. `shared` is the number of query heads of one KV head."""
    wanted = max(1, launch.pieces_per_sm * _num_sms(device) // kv_heads)
    return Cutting(launch.rows // shared, wanted, launch.least_keys)


def _work_on_device(
    batch: StepBatch,
    group: GroupBatch,
    window: int | None,
    cuttings: list[Cutting],
) -> AttentionWork:
    counts = np.diff(batch.query_starts)
    is_small = counts <= cuttings[0].tile
    found: list[Pieces[npt.NDArray[np.int32]] | None] = []
    for seqs, how in zip((np.flatnonzero(is_small), np.flatnonzero(~is_small)), cuttings):
        found.append(
            cut(
                batch.query_starts[seqs],
                counts[seqs],
                batch.context_lens[seqs],
                group.table_starts[seqs],
                window,
                how,
            )
            if len(seqs)
            else None
        )
    arrays = [array for each in found if each is not None for array in (each.items, each.merges)]
    moved = iter(to_device_together(arrays, group.tables.device))
    small, large = (
        None if each is None else DevicePieces(next(moved), next(moved), each.num_parts)
        for each in found
    )
    return AttentionWork(small, large)


def _attend(
    queries: torch.Tensor,
    out: torch.Tensor,
    kv: LayerKv,
    tables: torch.Tensor,
    scale_and_window: tuple[float, int | None],
    pieces: DevicePieces,
    launch: Launch,
) -> None:
    scale, window = scale_and_window
    num_heads, head_dim = queries.shape[1:]
    kv_heads = kv.keys.shape[2]
    tile = launch.rows // (num_heads // kv_heads)
    padded = max(16, triton.next_power_of_2(head_dim))
    rows = tile * (num_heads // kv_heads)
    partial = queries.new_empty((pieces.num_parts, kv_heads, rows, head_dim), dtype=torch.float32)
    lse = queries.new_empty((pieces.num_parts, kv_heads, rows), dtype=torch.float32)
    programs.attend[(len(pieces.items), kv_heads)](
        queries,
        out,
        kv.keys,
        kv.values,
        tables,
        pieces.items,
        partial,
        lse,
        kv.keys.stride(0),
        kv.keys.stride(1),
        kv.blocks_per_region,
        scale,
        window or 0,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        BLOCK_SIZE=kv.block_size,
        TILE=tile,
        BLOCK_M=launch.rows,
        BLOCK_N=launch.keys,
        ONE_REGION=kv.keys.shape[0] == 1,
        WINDOWED=window is not None,
        ITEM_FIELDS=ITEM_FIELDS,
        ONE_LOOP=launch.one_loop,
        num_warps=launch.num_warps,
        num_stages=_stages(launch, padded, queries),
        maxnreg=launch.max_registers,
    )
    if len(pieces.merges):
        programs.merge[(len(pieces.merges), num_heads)](
            partial,
            lse,
            pieces.merges,
            out,
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded,
            TILE=tile,
            MERGE_FIELDS=MERGE_FIELDS,
            PARTS=_PARTS_AT_ONCE,
            num_warps=4,
        )


def _norm_rows(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    assert residual is None or residual.is_contiguous()
    x = x.contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    if len(x):
        programs.norm_rows[(len(x),)](
            x,
            x if residual is None else residual,
            weight,
            out,
            eps,
            WIDTH=x.shape[1],
            BLOCK=block,
            ADD=residual is not None,
            num_warps=min(16, max(1, block // 512)),
        )
    return out


def _stages(launch: Launch, padded: int, queries: torch.Tensor) -> int:
    """Count the stages for which the multiprocessor's shared memory has room."""
    item = queries.element_size()
    each = 2 * launch.keys * padded * item
    room = _shared_bytes(queries.device) - launch.rows * padded * item
    # Addresses come from a table, which takes every other stage.
    return max(1, min(launch.num_stages, 2 * (room // each) - 1))


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
