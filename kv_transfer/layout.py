"""The shape of a KV block, its offset in memory, and the fingerprint two workers must share.

A pool of blocks is made of regions of equal block count. Inside a region the order is
[layer][tensor][block][kv head][token][head_dim]. So a tensor-parallel slice of a block (a run of
heads) is one contiguous run of bytes, and so are neighbouring blocks of one layer and tensor.

`BlockPush` and `TokenLogprobs` are what an engine hands over; both sides know them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
HandoffId = NewType("HandoffId", str)  # names one grant of a lease in the writer's engine
NULL_BLOCK = BlockId(0)  # replaces a block outside the window: readable, never written or pushed

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint8": 1}


@dataclass(frozen=True)
class BlockPush:
    """Blocks of one layer group that a step completes and a handoff must carry.

    `ordinals` are positions in the lease's block table of that group (0 is the first block after
    the receiver's cached ones); `block_ids` are this pool's blocks with that content.
    """

    handoff_id: HandoffId
    group: int
    ordinals: tuple[int, ...]
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms, of the model's distribution before temperature and filters."""

    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first
    prompt: tuple[TokenLogprobs, ...] = ()  # with the first token: of the prompt's after its first


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer's KV, for example K. `num_heads` counts the heads of all ranks."""

    name: str
    num_heads: int
    head_dim: int
    dtype: str

    def heads_of_rank(self, tp_rank: int, tp_size: int) -> range:
        """Heads that a rank holds. With fewer heads than ranks, several ranks hold each head.

        Raises ValueError when the heads cannot be split or replicated evenly.
        """
        if self.num_heads % tp_size and tp_size % self.num_heads:
            raise ValueError(f"{self.num_heads} {self.name} heads do not fit {tp_size} ranks")
        if self.num_heads >= tp_size:
            per_rank = self.num_heads // tp_size
            return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
        head = tp_rank * self.num_heads // tp_size
        return range(head, head + 1)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table: the same tensors and the same window."""

    first_layer: int
    num_layers: int
    tensors: tuple[TensorSpec, ...]
    window: int | None = None  # tokens that a layer attends to; None: all


@dataclass(frozen=True)
class KvLayout:
    """Shape of the KV of one model, independent of tensor parallelism and of pool sizes."""

    block_size: int
    groups: tuple[LayerGroup, ...]

    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    def group_of_layer(self, layer: int) -> int:
        for index, group in enumerate(self.groups):
            if group.first_layer <= layer < group.first_layer + group.num_layers:
                return index
        raise IndexError(f"layer {layer} is in no layer group")

    def head_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of one head of one block."""
        return self.block_size * tensor.head_dim * DTYPE_BYTES[tensor.dtype]

    def rank_block_bytes(self, group: int, tp_rank: int, tp_size: int) -> int:
        """Bytes of one block of a group on one rank, over all the group's layers."""
        spec = self.groups[group]
        return spec.num_layers * sum(
            len(tensor.heads_of_rank(tp_rank, tp_size)) * self.head_bytes(tensor)
            for tensor in spec.tensors
        )

    def rank_bytes(self, tp_rank: int, tp_size: int) -> int:
        """Bytes of one block of every group on one rank."""
        groups = range(len(self.groups))
        return sum(self.rank_block_bytes(group, tp_rank, tp_size) for group in groups)

    def token_bytes(self) -> int:
        """KV bytes of one token over all layers and heads."""
        return self.rank_bytes(0, 1) // self.block_size


@dataclass(frozen=True)
class RegionLayout:
    """Where a rank's block lies inside a region of `num_blocks` blocks. Offsets are in bytes.

    All groups have the same number of blocks per region, and each group has its own block ids. A
    region holds each layer's tensors, group after group.
    """

    layout: KvLayout
    tp_rank: int
    tp_size: int
    num_blocks: int

    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.rank_bytes(self.tp_rank, self.tp_size)

    def tensor_offset(self, layer: int, tensor: str) -> int:
        """Offset of one layer's tensor in the region."""
        offset = 0
        for index, group in enumerate(self.layout.groups):
            block_bytes = self.layout.rank_block_bytes(index, self.tp_rank, self.tp_size)
            if not group.first_layer <= layer < group.first_layer + group.num_layers:
                offset += block_bytes * self.num_blocks
                continue
            offset += (layer - group.first_layer) * self.layer_stride_bytes(index)
            for spec in group.tensors:
                if spec.name == tensor:
                    return offset
                offset += self.tensor_block_bytes(spec) * self.num_blocks
        raise KeyError(f"layer {layer} has no tensor {tensor!r}")

    def layer_stride_bytes(self, group: int) -> int:
        """Bytes between one layer of a group and the next."""
        block_bytes = self.layout.rank_block_bytes(group, self.tp_rank, self.tp_size)
        return block_bytes // self.layout.groups[group].num_layers * self.num_blocks

    def tensor_block_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of one block of one layer's tensor on this rank: the stride between blocks."""
        heads = len(tensor.heads_of_rank(self.tp_rank, self.tp_size))
        return heads * self.layout.head_bytes(tensor)


def kv_fingerprint(layout: KvLayout, weights_digest: str, **model: object) -> bytes:
    """16 bytes that differ when two workers' KV could differ. They seed every block hash.

    `model` is whatever else decides KV values, such as rope parameters or an adapter. Values must
    be plain JSON, so that two processes encode them alike; anything else raises TypeError.
    """
    return _fingerprint({"layout": asdict(layout), "weights": weights_digest, "model": model})


def model_fingerprint(weights_digest: str, **model: object) -> bytes:
    """16 bytes that differ when two workers' tokens could differ by more than rounding.

    Workers that share it can resume each other's streams by recomputing the KV, whatever their
    block size and dtype. `model` as for `kv_fingerprint`: equal there implies equal here.
    """
    return _fingerprint({"weights": weights_digest, "model": model})


def _fingerprint(described: object) -> bytes:
    text = json.dumps(described, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
