"""The kernels in plain torch: for any device, and what the native ones are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from engine.attention.kernels import AttentionShape, HeadNorms, Rotation
from engine.attention.paged_kv import LayerKv
from engine.step_batch import GroupBatch, StepBatch


class TorchKernels:
    """Gather each sequence's blocks, then scaled_dot_product_attention."""

    name = "torch"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        norms: HeadNorms | None,
        rotation: Rotation,
        kv: LayerKv,
        group: GroupBatch,
    ) -> torch.Tensor:
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        widths = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        queries, keys, values = torch.split(heads, widths, dim=1)
        if norms is not None:
            queries = self.rms_norm(queries, norms.query, shape.eps)
            keys = self.rms_norm(keys, norms.key, shape.eps)
        block, offset = group.slots // kv.block_size, group.slots % kv.block_size
        region, block = block // kv.blocks_per_region, block % kv.blocks_per_region
        kv.keys[region, block, :, offset] = _rotate(keys, rotation)
        kv.values[region, block, :, offset] = values
        return _rotate(queries, rotation)

    def attend(
        self,
        queries: torch.Tensor,
        kv: LayerKv,
        batch: StepBatch,
        group: GroupBatch,
        window: int | None,
    ) -> torch.Tensor:
        out = torch.empty_like(queries)
        for seq in range(batch.num_seqs):
            first, last = int(batch.query_starts[seq]), int(batch.query_starts[seq + 1])
            context = int(batch.context_lens[seq])
            table = group.tables[group.table_starts[seq] : group.table_starts[seq + 1]]
            # Blocks before the window may be gone: their content must not even be multiplied by 0.
            begin = 0 if window is None else max(0, context + 1 - window)
            end = context + last - first
            out[first:last] = _attend_one(queries[first:last], kv, table, (begin, end), window)
        return out


def _rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate dimension i with i + head_dim / 2, [n, heads, head_dim], in float32."""
    low, high = heads.float().chunk(2, dim=-1)
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def _attend_one(
    queries: torch.Tensor,
    kv: LayerKv,
    table: torch.Tensor,
    span: tuple[int, int],
    window: int | None,
) -> torch.Tensor:
    """One sequence's queries [n, heads, head_dim], its last n positions, over positions `span`."""
    begin, end = span
    size = kv.block_size
    blocks = table[begin // size : -(-end // size)].long()
    region, block = blocks // kv.blocks_per_region, blocks % kv.blocks_per_region
    skip = begin % size

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor[region, block].transpose(0, 1).flatten(1, 2)  # [kv_heads, slots, head_dim]
        return found[:, skip : skip + end - begin]

    key_at = torch.arange(begin, end, device=queries.device)
    query_at = torch.arange(end - len(queries), end, device=queries.device)
    visible = key_at[None, :] <= query_at[:, None]
    if window is not None:
        visible &= key_at[None, :] > query_at[:, None] - window
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        gather(kv.keys)[None],
        gather(kv.values)[None],
        attn_mask=None if len(queries) == 1 else visible,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
