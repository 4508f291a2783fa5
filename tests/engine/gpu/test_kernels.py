"""The device's kernels against float64 on the CPU, which looks at every key one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.api import LocalDeviceMemory
from engine.kernels.native.native_kernels import pick_kernels
from engine.kernels.paged_kv import TORCH_DTYPES, LayerKv, PagedKv
from engine.kernels.protocol import Activation, AttentionShape, HeadNorms, Kernels, Rotation
from engine.kernels.step_batch import StepBatch, pack
from engine.kernels.torch import decode_rows
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.request import RequestId, ScheduledSeq
from kv_transfer.layout import KvLayout, LayerGroup, RegionLayout, TensorSpec

BLOCK_SIZE, KV_HEADS, HEADS, DIM = 16, 2, 8, 64
SHAPE = AttentionShape(HEADS, KV_HEADS, DIM, eps=1e-6, scale=0.1)
LONGEST_ERROR = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Of a whole result, relative: ‖out - reference‖ / ‖reference‖."""
SEQUENCES = ((0, 1), (15, 1), (16, 1), (300, 1), (0, 40), (33, 17), (250, 64), (1000, 1))
"""Context and new tokens of each."""


@dataclass
class Scene:
    kernels: Kernels
    kv: LayerKv
    batch: StepBatch
    tables: list[np.ndarray]


def scene(device: torch.device, dtype: str) -> Scene:
    """A pool of random blocks; those that nobody has, and what is left of last blocks, are NaN."""
    tensors = tuple(TensorSpec(name, KV_HEADS, DIM, dtype) for name in ("k", "v"))
    layout = KvLayout(BLOCK_SIZE, (LayerGroup(0, 1, tensors),))
    counts = [-(-(context + new) // BLOCK_SIZE) for context, new in SEQUENCES]
    blocks = 1 + np.random.default_rng(1).permutation(sum(counts)).astype(np.int32)
    tables = np.split(blocks, np.cumsum(counts)[:-1])
    regions = RegionLayout(layout, 0, 1, (sum(counts) + 2) // 2)
    kv = PagedKv(LocalDeviceMemory(regions, 2, str(device)), regions, device).layers[0]
    seqs = [
        ScheduledSeq(RequestId(str(number)), np.zeros(new, np.uint32), context, (table,), True)
        for number, ((context, new), table) in enumerate(zip(SEQUENCES, tables))
    ]
    generator = torch.Generator().manual_seed(5)
    for tensor in (kv.keys, kv.values):
        tensor.fill_(torch.nan)
        for (context, new), table in zip(SEQUENCES, tables):
            for position in range(context + new):
                region, block = divmod(int(table[position // BLOCK_SIZE]), regions.num_blocks)
                numbers = torch.randn(KV_HEADS, DIM, generator=generator)
                tensor[region, block, :, position % BLOCK_SIZE] = numbers.to(tensor)
    kernels = pick_kernels(torch.device("cuda"), TORCH_DTYPES[dtype])
    return Scene(kernels, kv, pack(seqs, BLOCK_SIZE, device), tables)


def history(tensor: torch.Tensor, table: np.ndarray, length: int) -> torch.Tensor:
    """float64 [kv_heads, length, head_dim] of one sequence."""
    region, block = np.divmod(table, tensor.shape[1])
    found = tensor.cpu().double()[region, block]  # [blocks, kv_heads, block_size, head_dim]
    return found.transpose(0, 1).flatten(1, 2)[:, :length]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("dtype", sorted(LONGEST_ERROR))
def test_attention_is_that_of_one_query_at_a_time(
    dtype: str, window: int | None, device: torch.device
) -> None:
    here = scene(device, dtype)
    num_queries = sum(new for _, new in SEQUENCES)
    queries = torch.randn(num_queries, HEADS, DIM, generator=torch.Generator().manual_seed(6))
    queries = queries.to(device, TORCH_DTYPES[dtype])
    found = here.kernels.attend(queries, here.kv, here.batch, here.batch.groups[0], SHAPE, window)
    rows, row = [], 0
    for (context, new), table in zip(SEQUENCES, here.tables):
        keys, values = (
            history(t, table, context + new).repeat_interleave(HEADS // KV_HEADS, 0)
            for t in (here.kv.keys, here.kv.values)
        )
        for position in range(context, context + new):
            begin = 0 if window is None else max(0, position + 1 - window)
            query = queries[row].cpu().double()[:, None]
            seen = slice(begin, position + 1)
            scores = (query @ keys[:, seen].transpose(1, 2)) * SHAPE.scale
            rows.append((scores.softmax(-1) @ values[:, seen])[:, 0])
            row += 1
    assert relative_error(found, torch.stack(rows)) < LONGEST_ERROR[dtype]


@pytest.mark.gpu
def test_decodes_that_are_gathered_piece_by_piece_see_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = scene(device, "float32")
    queries = torch.randn(here.batch.num_tokens, HEADS, DIM).to(device)
    group = here.batch.groups[0]
    whole = here.kernels.attend(queries, here.kv, here.batch, group, SHAPE, None)
    monkeypatch.setattr(decode_rows, "MOST_BLOCKS", 2)
    pieces = TorchKernels().attend(queries, here.kv, here.batch, group, SHAPE, None)
    assert len(decode_rows.decode_rows(here.batch, group, None, BLOCK_SIZE, device)) > 3
    torch.testing.assert_close(pieces, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(LONGEST_ERROR))
def test_norms_and_gates_are_those_of_float64(dtype: str, device: torch.device) -> None:
    kernels = pick_kernels(torch.device("cuda"), TORCH_DTYPES[dtype])
    generator = torch.Generator().manual_seed(7)
    x, residual = (torch.randn(37, 256, generator=generator) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(256, generator=generator)
    on_device = [each.to(device, TORCH_DTYPES[dtype]) for each in (x, residual)]
    on_device.append(weight.to(device))
    wide = [each.cpu().double() for each in on_device]

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * wide[2]

    limit = LONGEST_ERROR[dtype]
    assert relative_error(kernels.rms_norm(on_device[0], on_device[2], 1e-6), norm(wide[0])) < limit
    added = kernels.add_rms_norm(on_device[0], on_device[1], on_device[2], 1e-6)
    assert relative_error(added, norm(wide[0] + wide[1])) < limit
    assert relative_error(on_device[1], wide[0] + wide[1]) < limit
    gate, up = wide[0].chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    for kind, gated in (("silu", torch.nn.functional.silu(gate)), ("gelu_tanh", gelu)):
        found = kernels.gate(on_device[0], Activation(kind))
        assert relative_error(found, gated * up) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", sorted(LONGEST_ERROR))
def test_queries_are_turned_and_keys_and_values_written_to_their_slots(
    dtype: str, has_norms: bool, device: torch.device
) -> None:
    here = scene(device, dtype)
    generator = torch.Generator().manual_seed(8)
    num_tokens = here.batch.num_tokens
    qkv = torch.randn(num_tokens, SHAPE.qkv_width, generator=generator)
    angles = torch.randn(num_tokens, DIM // 2, generator=generator)
    rotation = Rotation(angles.cos().to(device), angles.sin().to(device))
    weights = [(1 + 0.1 * torch.randn(DIM, generator=generator)) for _ in range(2)]
    on_device = [qkv.to(device, TORCH_DTYPES[dtype]), *(each.to(device) for each in weights)]
    wide = [each.cpu().double() for each in on_device]
    norms = HeadNorms(on_device[1], on_device[2]) if has_norms else None
    group = here.batch.groups[0]
    queries = here.kernels.rotate_and_write(on_device[0], SHAPE, norms, rotation, here.kv, group)

    def turned(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if has_norms:
            heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * weight
        low, high = heads.chunk(2, dim=-1)
        cos, sin = (each.cpu().double()[:, None] for each in (rotation.cos, rotation.sin))
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    heads = wide[0].view(num_tokens, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    limit = LONGEST_ERROR[dtype]
    assert relative_error(queries, turned(heads[0], wide[1])) < limit
    slots = group.slots.cpu().numpy()
    region, block = np.divmod(slots // BLOCK_SIZE, here.kv.keys.shape[1])
    where = (region, block, slice(None), slots % BLOCK_SIZE)
    assert relative_error(here.kv.keys.cpu()[where], turned(heads[1], wide[2])) < limit
    assert relative_error(here.kv.values.cpu()[where], heads[2]) < limit
