"""Which rank of the writer feeds which rank of the receiver, and with what bytes. Pure.

Tensor-parallel widths may differ. A head that several source ranks hold is sent by the lowest of
them; a head that several target ranks hold is sent to each. A rank's share of a block is a run of
heads, and so one contiguous run of bytes per layer and tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import LeaseError
from kv_transfer.layout import BlockId, KvLayout, RegionLayout, TensorSpec
from kv_transfer.lease import Region
from kv_transfer.transport import PutBatch, Runs, TransferMemory, Words

Column = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankPair:
    """One source rank and one target rank."""

    source_rank: int
    source_size: int
    target_rank: int
    target_size: int

    def heads(self, tensor: TensorSpec) -> range:
        """Heads of a tensor that the source rank owes the target rank; may be empty."""
        source = tensor.heads_of_rank(self.source_rank, self.source_size)
        if self.source_rank > 0:
            below = tensor.heads_of_rank(self.source_rank - 1, self.source_size)
            if below.stop > source.start:  # replicated: a lower rank holds the same head
                return range(source.start, source.start)
        target = tensor.heads_of_rank(self.target_rank, self.target_size)
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        return range(start, max(start, stop))

    def layer_bytes(self, layout: KvLayout, group: int) -> int:
        """Bytes of one block of one layer that go this way."""
        return sum(len(self.heads(t)) * layout.head_bytes(t) for t in layout.groups[group].tensors)

    def block_bytes(self, layout: KvLayout, group: int) -> int:
        """Bytes of one block of a layer group, over its layers, that go this way."""
        return layout.groups[group].num_layers * self.layer_bytes(layout, group)

    def is_fed(self, layout: KvLayout) -> bool:
        return any(self.layer_bytes(layout, group) for group in range(len(layout.groups)))


def pairs(layout: KvLayout, source_size: int, target_size: int) -> tuple[RankPair, ...]:
    """All pairs between which something moves. Rank 0 always feeds rank 0."""
    return tuple(
        pair
        for source in range(source_size)
        for target in range(target_size)
        if (pair := RankPair(source, source_size, target, target_size)).is_fed(layout)
    )


def check_width(layout: KvLayout, tp_size: int) -> None:
    """Raise LeaseError when the layout's heads cannot be divided among so many ranks."""
    try:
        for group in layout.groups:
            for tensor in group.tensors:
                tensor.heads_of_rank(0, tp_size)
    except ValueError as error:
        raise LeaseError(str(error)) from None


@dataclass(frozen=True, eq=False)
class GroupRuns:
    """The puts of some blocks for the first layer of their group; later layers lie at a constant
    stride on either side."""

    first: Runs
    source_layer_bytes: int
    target_layer_bytes: int

    def at(self, layer_in_group: int) -> PutBatch:
        return PutBatch(
            self.first,
            layer_in_group * self.source_layer_bytes,
            layer_in_group * self.target_layer_bytes,
        )


@dataclass(frozen=True, eq=False)
class _Shares:
    """What goes of a group's tensors, in bytes, each int64 [num_tensors, 1] but `lengths`
    [num_tensors]: where the first layer's lies in a region of either side, how far apart blocks
    are, how much of each goes."""

    source_offsets: Column
    target_offsets: Column
    source_strides: Column
    target_strides: Column
    lengths: Words


class Route:
    """From a source rank's pool into the regions that one target rank offers."""

    def __init__(
        self,
        source: RegionLayout,
        source_regions: Sequence[Region],
        target_rank: int,
        target_size: int,
        target_regions: Sequence[Region],
    ) -> None:
        """Raises LeaseError when the regions cannot hold what the layout says."""
        self.pair = RankPair(source.tp_rank, source.tp_size, target_rank, target_size)
        self._source = source
        self._target = _target_layout(source.layout, target_rank, target_size, target_regions)
        self._source_bases = _bases(source_regions)
        self._target_bases = _bases(target_regions)
        self._rkeys = tuple(region.rkey for region in target_regions)
        groups = range(len(source.layout.groups))
        self._shares = [self._shares_of(group) for group in groups]
        self._layer_strides = [
            (layer_stride_bytes(source, group), layer_stride_bytes(self._target, group))
            for group in groups
        ]

    def runs(
        self, group: int, source_blocks: Sequence[BlockId], target_blocks: Sequence[BlockId]
    ) -> GroupRuns | None:
        """The puts of these blocks; None when nothing of them goes this way.

        Raises LeaseError for a target block outside the offered regions.
        """
        shares = self._shares[group]
        if shares is None or not len(source_blocks):
            return None
        # Few operations: each costs microseconds here, where the first layer's bytes wait for them.
        here, source_rows = np.divmod(np.array(source_blocks, np.int64), self._source.num_blocks)
        there, target_rows = np.divmod(np.array(target_blocks, np.int64), self._target.num_blocks)
        try:
            target_bases = self._target_bases[there]
        except IndexError:
            raise LeaseError(
                f"block {max(target_blocks)} is in none of the offered regions"
            ) from None
        sources = source_rows * shares.source_strides + shares.source_offsets
        sources += self._source_bases[here]
        targets = target_rows * shares.target_strides + shares.target_offsets
        targets += target_bases
        first = Runs(
            sources.view(np.uint64),
            targets.view(np.uint64),
            shares.lengths,
            here,
            there,
            self._rkeys,
        )
        return GroupRuns(first, *self._layer_strides[group])

    def _shares_of(self, group: int) -> _Shares | None:
        spec, layouts = self._source.layout.groups[group], (self._source, self._target)
        rows = []
        for tensor in spec.tensors:
            heads = self.pair.heads(tensor)
            if heads:
                offsets = [_offset(side, spec.first_layer, tensor, heads) for side in layouts]
                strides = [side.tensor_block_bytes(tensor) for side in layouts]
                rows.append([*offsets, *strides, len(heads) * layouts[0].layout.head_bytes(tensor)])
        if not rows:
            return None
        columns = np.array(rows, dtype=np.int64)  # [num_tensors, 5]
        lengths = np.ascontiguousarray(columns[:, 4]).view(np.uint64)
        source_offsets, target_offsets, source_strides, target_strides = (
            columns[:, i : i + 1] for i in range(4)
        )
        return _Shares(source_offsets, target_offsets, source_strides, target_strides, lengths)


def layer_stride_bytes(layout: RegionLayout, group: int) -> int:
    """Distance in a region between one layer of a group and the next."""
    block_bytes = layout.layout.rank_block_bytes(group, layout.tp_rank, layout.tp_size)
    return block_bytes // layout.layout.groups[group].num_layers * layout.num_blocks


def _offset(layout: RegionLayout, layer: int, tensor: TensorSpec, heads: range) -> int:
    """Where in a region a run of heads of its first block lies."""
    held = tensor.heads_of_rank(layout.tp_rank, layout.tp_size)
    start = layout.tensor_offset(layer, tensor.name)
    return start + (heads.start - held.start) * layout.layout.head_bytes(tensor)


def _bases(regions: Sequence[Region]) -> npt.NDArray[np.int64]:
    return np.array([region.base_address for region in regions], dtype=np.int64)


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
    """64-bit checksums of the pair's share of every `stride`-th block of each group's table.

    Equal on both sides for equal bytes: over the layers in order, the tensors in order, and the
    heads that go from the source rank to the target rank. `layout` is that of the side that asks.
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
    """(offset in region, bytes between blocks, bytes of the share) for each layer and tensor."""
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
