"""The kernels in plain torch: for any device, and for machines without a compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.paged_kv import LayerKv
from engine.kernels.protocol import Activation, AttentionShape, HeadNorms, Rotation
from engine.kernels.step_batch import GroupBatch, StepBatch
from engine.kernels.torch.decode_rows import DecodeRows, decode_rows


class TorchKernels:
    """Gather the blocks, then call scaled_dot_product_attention: once for all decodes of similar
    length, once for each chunk of a prompt.

    Heads that share a KV head are passed as queries of one head, so that no key or value is
    repeated.
    """

    name = "torch"

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._decodes: dict[int, list[DecodeRows]] = {}  # of the batch, by its groups' places

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation is Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh") * up
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
        shape: AttentionShape,
        window: int | None,
    ) -> torch.Tensor:
        out = torch.empty_like(queries)
        for rows in self._decode_rows(batch, group, window, kv.block_size, queries.device):
            out[rows.rows] = _attend_decodes(queries[rows.rows], kv, rows, shape.scale)
        for seq in range(batch.num_seqs):
            first, last = int(batch.query_starts[seq]), int(batch.query_starts[seq + 1])
            if last - first == 1:
                continue  # a decode
            context = int(batch.context_lens[seq])
            table = group.tables[group.table_starts[seq] : group.table_starts[seq + 1]]
            # Blocks before the window may be gone: their content must not even be multiplied by 0.
            begin = 0 if window is None else max(0, context + 1 - window)
            end = context + last - first
            out[first:last] = _attend_chunk(
                queries[first:last], kv, table, (begin, end), window, shape.scale
            )
        return out

    def _decode_rows(
        self,
        batch: StepBatch,
        group: GroupBatch,
        window: int | None,
        block_size: int,
        device: torch.device,
    ) -> list[DecodeRows]:
        """Made by a group's first layer in a step, used by all of its layers."""
        if self._batch is not batch:
            self._batch, self._decodes = batch, {}
        found = self._decodes.get(id(group))
        if found is None:
            found = decode_rows(batch, group, window, block_size, device)
            self._decodes[id(group)] = found
        return found


def _rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate dimension i with i + head_dim / 2, [n, heads, head_dim], in float32."""
    low, high = heads.float().chunk(2, dim=-1)
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def _gather(tensor: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks int64 [n, width] of one layer's K or V: a copy, [n, kv_heads, slots, head_dim]."""
    per_region, kv_heads = tensor.shape[1:3]
    heads = torch.arange(kv_heads, device=tensor.device)[None, :, None]
    blocks = blocks[:, None, :]
    return tensor[blocks // per_region, blocks % per_region, heads].flatten(2, 3)


def _attend_decodes(
    queries: torch.Tensor, kv: LayerKv, rows: DecodeRows, scale: float
) -> torch.Tensor:
    """One query of each sequence: [n, heads, head_dim] -> same shape."""
    keys, values = _gather(kv.keys, rows.blocks), _gather(kv.values, rows.blocks)
    zero = keys.new_zeros(())  # of the host, it would be copied in, and the host would wait
    for tensor in (keys, values):
        tensor[rows.junk_rows, :, rows.junk_slots] = zero  # even times 0 it could be NaN
    per_kv_head = queries.view(len(queries), keys.shape[1], -1, queries.shape[2])
    out = F.scaled_dot_product_attention(
        per_kv_head, keys, values, attn_mask=rows.visible, scale=scale
    )
    return out.flatten(1, 2)


def _attend_chunk(
    queries: torch.Tensor,
    kv: LayerKv,
    table: torch.Tensor,
    span: tuple[int, int],
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """One sequence's queries [n, heads, head_dim], its last n positions, over positions `span`."""
    begin, end = span
    size, count = kv.block_size, len(queries)
    blocks = table[None, begin // size : -(-end // size)].long()
    slots = slice(begin % size, begin % size + end - begin)
    keys, values = (_gather(tensor, blocks)[:, :, slots] for tensor in (kv.keys, kv.values))
    key_at = torch.arange(begin, end, device=queries.device)
    query_at = torch.arange(end - count, end, device=queries.device)
    visible = key_at[None, :] <= query_at[:, None]
    if window is not None:
        visible &= key_at[None, :] > query_at[:, None] - window
    # [n, heads, head_dim] -> [1, kv_heads, heads of one KV head * n, head_dim]
    per_kv_head = queries.view(count, keys.shape[1], -1, queries.shape[2]).permute(1, 2, 0, 3)
    kv_heads, group = per_kv_head.shape[:2]
    mask = visible.repeat(group, 1)
    out = F.scaled_dot_product_attention(
        per_kv_head.flatten(1, 2)[None], keys, values, attn_mask=mask, scale=scale
    )
    return out.view(kv_heads, group, count, -1).permute(2, 0, 1, 3).flatten(1, 2)
