"""Which rank of the writer feeds which rank of the receiver, and with what bytes. Pure.

Tensor-parallel widths may differ. If several source ranks hold a head, the lowest one sends it. If
several target ranks hold a head, each gets it. A rank's share of a block is a run of heads, so it
is one contiguous run of bytes per layer and tensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.errors import LeaseError
from kv_transfer.layout import BlockId, KvLayout, RegionLayout, TensorSpec
from kv_transfer.lease import Lease, Region
from kv_transfer.transport import BlockAddresses, CopyPath, PutBatch, Runs, TransferMemory, Words


@dataclass(frozen=True)
class RankPair:
    """One source rank and one target rank."""

    source_rank: int
    source_size: int
    target_rank: int
    target_size: int

    def heads(self, tensor: TensorSpec) -> range:
        """Return the heads of a tensor that the source rank sends the target rank; may be empty."""
        source = tensor.heads_of_rank(self.source_rank, self.source_size)
        if self.source_rank > 0:
            below = tensor.heads_of_rank(self.source_rank - 1, self.source_size)
            if below.stop > source.start:  # replicated: a lower rank holds the same head
                return range(source.start, source.start)
        target = tensor.heads_of_rank(self.target_rank, self.target_size)
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        return range(start, max(start, stop))

    def block_bytes(self, layout: KvLayout, group: int) -> int:
        """Bytes of one block of a layer group, over all its layers, that this pair moves."""
        spec = layout.groups[group]
        return spec.num_layers * sum(
            len(self.heads(t)) * layout.head_bytes(t) for t in spec.tensors
        )

    def is_fed(self, layout: KvLayout) -> bool:
        return any(self.block_bytes(layout, group) for group in range(len(layout.groups)))


def pairs(layout: KvLayout, source_size: int, target_size: int) -> tuple[RankPair, ...]:
    """List all pairs that move any bytes. Rank 0 always feeds rank 0."""
    return tuple(
        pair
        for source in range(source_size)
        for target in range(target_size)
        if (pair := RankPair(source, source_size, target, target_size)).is_fed(layout)
    )


def check_width(layout: KvLayout, tp_size: int) -> None:
    """Raise LeaseError when the layout's heads cannot be divided among `tp_size` ranks."""
    try:
        for group in layout.groups:
            for tensor in group.tensors:
                tensor.heads_of_rank(0, tp_size)
    except ValueError as error:
        raise LeaseError(str(error)) from None


class Route:
    """The route from a source rank's pool into the regions of one target rank."""

    def __init__(
        self,
        source: RegionLayout,
        source_regions: Sequence[Region],
        target_rank: int,
        target_size: int,
        target_regions: Sequence[Region],
    ) -> None:
        """Raises LeaseError when the regions are too small for the layout."""
        self.pair = RankPair(source.tp_rank, source.tp_size, target_rank, target_size)
        self._source = source
        self._target = _target_layout(source.layout, target_rank, target_size, target_regions)
        self._num_source_blocks = len(source_regions) * source.num_blocks
        self._num_target_blocks = len(target_regions) * self._target.num_blocks
        self._bases = _bases(source_regions), _bases(target_regions)
        self._rkeys = tuple(region.rkey for region in target_regions)
        groups = range(len(source.layout.groups))
        self._paths = [self._path(group) for group in groups]
        self._layer_strides = [
            (source.layer_stride_bytes(group), self._target.layer_stride_bytes(group))
            for group in groups
        ]

    def runs(
        self, group: int, source_blocks: Sequence[BlockId], target_blocks: Sequence[BlockId]
    ) -> Runs | None:
        """List the puts of these blocks for the first layer of their group; None if there are none.

        Raises LeaseError for a target block outside the offered regions.
        """
        path = self._paths[group]
        if path is None or not source_blocks:
            return None
        # Compiled code checks no bounds.
        assert max(source_blocks) < self._num_source_blocks, source_blocks
        if max(target_blocks) >= self._num_target_blocks:
            raise LeaseError(f"block {max(target_blocks)} is in none of the offered regions")
        return Runs(path, _words(source_blocks), _words(target_blocks))

    def at_layer(self, runs: Runs, group: int, layer_in_group: int) -> PutBatch:
        """Shift the puts to another layer: each side has a constant stride between layers."""
        source_bytes, target_bytes = self._layer_strides[group]
        return PutBatch(runs, layer_in_group * source_bytes, layer_in_group * target_bytes)

    def _path(self, group: int) -> CopyPath | None:
        """The copy path of a group's first layer; None if the pair moves nothing of it."""
        spec = self._source.layout.groups[group]
        heads = [(t, heads) for t in spec.tensors if (heads := self.pair.heads(t))]
        if not heads:
            return None
        lengths = [len(part) * self._source.layout.head_bytes(tensor) for tensor, part in heads]
        source, target = (
            BlockAddresses(
                bases,
                side.num_blocks,
                _words([_offset(side, spec.first_layer, *part) for part in heads]),
                _words([side.tensor_block_bytes(tensor) for tensor, _ in heads]),
            )
            for side, bases in zip((self._source, self._target), self._bases, strict=True)
        )
        return CopyPath(source, target, _words(lengths), self._rkeys)


def _offset(layout: RegionLayout, layer: int, tensor: TensorSpec, heads: range) -> int:
    """Offset in a region of a run of heads of the region's first block."""
    held = tensor.heads_of_rank(layout.tp_rank, layout.tp_size)
    start = layout.tensor_offset(layer, tensor.name)
    return start + (heads.start - held.start) * layout.layout.head_bytes(tensor)


def _bases(regions: Sequence[Region]) -> Words:
    return _words([region.base_address for region in regions])


def _words(values: Sequence[int]) -> Words:
    return array("Q", values)


def _target_layout(
    layout: KvLayout, target_rank: int, target_size: int, regions: Sequence[Region]
) -> RegionLayout:
    if not regions or not regions[0].num_blocks:
        raise LeaseError(f"rank {target_rank} offers no memory")
    num_blocks = regions[0].num_blocks
    target = RegionLayout(layout, target_rank, target_size, num_blocks)
    for index, region in enumerate(regions):
        if region.num_blocks != num_blocks or region.first_block != index * num_blocks:
            raise LeaseError(f"rank {target_rank}'s regions are not of equal block count, in order")
        if region.num_bytes < target.num_bytes():
            raise LeaseError(
                f"rank {target_rank}'s region has {region.num_bytes} bytes, "
                f"its {num_blocks} blocks take {target.num_bytes()}"
            )
    return target


def block_checksums(
    memory: TransferMemory,
    layout: RegionLayout,
    pair: RankPair,
    tables: Sequence[Sequence[BlockId]],
    stride: int,
) -> list[int]:
    """Compute 64-bit checksums of the pair's share of every `stride`-th block of each group's
    table.

    Equal bytes give equal checksums on both sides: each covers layers, then tensors, then the heads
    that the pair moves. `layout` is the layout of the calling side.
    """
    checksums = []
    for group, table in enumerate(tables):
        offsets = _share_offsets(layout, pair, group)
        for block in table[::stride]:
            region, row = divmod(block, layout.num_blocks)
            base = region * memory.region_stride_bytes
            digest = hashlib.blake2b(digest_size=8)
            spans = [(base + offset + row * row_bytes, n) for offset, row_bytes, n in offsets]
            for part in memory.read(spans):
                digest.update(part.data)
            checksums.append(int.from_bytes(digest.digest(), "little"))
    return checksums


def _share_offsets(layout: RegionLayout, pair: RankPair, group: int) -> list[tuple[int, int, int]]:
    """List (offset in region, bytes between blocks, bytes of the share) for each layer and
    tensor."""
    spec = layout.layout.groups[group]
    offsets = []
    for layer in range(spec.first_layer, spec.first_layer + spec.num_layers):
        for tensor in spec.tensors:
            heads = pair.heads(tensor)
            if heads:
                length = len(heads) * layout.layout.head_bytes(tensor)
                offset = _offset(layout, layer, tensor, heads)
                offsets.append((offset, layout.tensor_block_bytes(tensor), length))
    return offsets


def check_lease(lease: Lease, layout: RegionLayout, regions: Sequence[Region]) -> None:
    """Raise LeaseError when the lease's memory or tables do not fit this rank's layout, or when
    `renew_within_s` is not positive."""
    if not lease.renew_within_s > 0:
        raise LeaseError(f"the lease has renew_within_s = {lease.renew_within_s:g}")
    groups = len(layout.layout.groups)
    if len(lease.block_ids) != groups:
        raise LeaseError(f"the lease has {len(lease.block_ids)} block tables, not {groups}")
    if [rank.tp_rank for rank in lease.ranks] != list(range(lease.owner.tp_size)):
        raise LeaseError("the lease does not offer the memory of every rank of its owner")
    check_width(layout.layout, lease.owner.tp_size)
    for rank in lease.ranks:
        Route(layout, regions, rank.tp_rank, len(lease.ranks), rank.regions)
