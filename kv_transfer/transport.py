"""The seam between handoffs and the transports: one-sided puts, flushes and small messages.

A transport belongs to one process and has one progress thread. Every method but `close` may be
called from any thread and returns at once: it enqueues. Callbacks run on the progress thread, one
at a time, and may themselves only enqueue or send.

A transport promises that operations to one peer start in the order of the calls. A flush completes
when this process has finished every earlier put to that peer, so that nothing of it can be written
later (but see `FlushResult.is_over`). A successful flush does not prove that the peer lives or has
seen anything: only a message from the peer does.

A process has one address for messages and another for puts, which it can revoke.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kv_transfer.lease import Region

Words: TypeAlias = (
    "array[int]"  # typecode "Q": unsigned 64-bit numbers that compiled code reads in place
)


@dataclass(frozen=True, eq=False)
class BlockAddresses:
    """Addresses of one side's blocks. Regions start at `bases` and hold `num_blocks` blocks each.
    In a region, tensor t's first block is at `offsets[t]`, the next one `strides[t]` bytes
    later."""

    bases: Words  # [num_regions]
    num_blocks: int
    offsets: Words  # [num_tensors]
    strides: Words  # [num_tensors]

    def region_of(self, block: int) -> int:
        return block // self.num_blocks

    def address_of(self, tensor: int, block: int) -> int:
        region, row = divmod(block, self.num_blocks)
        return self.bases[region] + self.offsets[tensor] + row * self.strides[tensor]


@dataclass(frozen=True, eq=False)
class CopyPath:
    """From this process's blocks to a peer's. `lengths`: bytes to copy per tensor of a block;
    `rkeys`: the peer's remote keys, per target region."""

    source: BlockAddresses
    target: BlockAddresses
    lengths: Words  # [num_tensors]
    rkeys: tuple[bytes, ...]

    @cached_property
    def packed(self) -> Words:
        """Write the path as `struct copy_path` of `ucx/post_loop.c`, for compiled code."""
        words: list[int] = []
        for side in (self.source, self.target):
            offsets, strides = (column.buffer_info()[0] for column in (side.offsets, side.strides))
            words += side.bases.buffer_info()[0], side.num_blocks, offsets, strides
        return array("Q", (*words, *self.lengths.buffer_info()))


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of bytes to copy into a peer's memory: one run per block and tensor. `sources` and
    `targets` are pairs of block ids, each within the regions of its side."""

    path: CopyPath
    sources: Words
    targets: Words

    @property
    def num_blocks(self) -> int:
        return len(self.targets)

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.path.lengths) * self.num_blocks

    def coalesced(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (source, target, length, region here, region there), in order.

        Runs that are adjacent at both ends become one, except across regions, which are registered
        separately."""
        here, there = self.path.source, self.path.target
        for tensor, length in enumerate(self.path.lengths):
            run: tuple[int, int, int, int, int] | None = None
            for block, to in zip(self.sources, self.targets, strict=True):
                source, target = here.address_of(tensor, block), there.address_of(tensor, to)
                regions = here.region_of(block), there.region_of(to)
                if run is not None:
                    gone = run[2]
                    if (source - gone, target - gone, *regions) == (*run[:2], *run[3:]):
                        run = (*run[:2], gone + length, *regions)
                        continue
                    yield run
                run = (source, target, length, *regions)
            if run is not None:
                yield run


@dataclass(frozen=True, eq=False)
class PutBatch:
    """Runs shifted by an offset at each end: the layers of a block have a constant stride."""

    runs: Runs
    source_offset: int = 0
    target_offset: int = 0


@dataclass(frozen=True)
class FlushResult:
    """The result of a flush. `error` is None if every earlier put is done. `busy_s`: seconds that
    the flush, and the puts since the last one, cost this process. Unless `is_over`, puts before a
    failed flush may still land: the kernel delivers what it has taken of a broken TCP
    connection."""

    error: str | None
    busy_s: float
    is_over: bool = True


OnMessage = Callable[[bytes], None]
OnPeerLost = Callable[[bytes], None]
OnFlushed = Callable[[FlushResult], None]
OnFailed = Callable[[str], None]
OnFatal = Callable[[BaseException], None]
OnRevoked = Callable[[], None]


class Tensor(Protocol):
    """A contiguous torch tensor, uint8 [num_bytes]. This package does not import torch for it."""

    @property
    def device(self) -> Any: ...

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...


class TransferMemory:
    """A rank's pool: `engine.api.KvMemory`, plus what a peer needs to write into it."""

    buffer: Any
    """The whole pool: uint8 [num_regions * region_stride_bytes], invalid after `close`. A numpy
    array, or the registered tensor, or an array that shares its memory."""
    regions: tuple[Region, ...]

    def __init__(self, num_regions: int, region_stride_bytes: int, blocks_per_region: int) -> None:
        self.num_regions = num_regions
        self.region_stride_bytes = region_stride_bytes
        self.blocks_per_region = blocks_per_region

    def make_regions(self, base: int, rkeys: Sequence[bytes]) -> tuple[Region, ...]:
        """Make the pool's regions of its first address and each region's remote key."""
        blocks, stride = self.blocks_per_region, self.region_stride_bytes
        return tuple(
            Region(index * blocks, blocks, base + index * stride, stride, rkey)
            for index, rkey in enumerate(rkeys)
        )

    def read(self, spans: Sequence[tuple[int, int]]) -> Iterable[npt.NDArray[np.uint8]]:
        """Read the bytes of these (offset, length) spans of the buffer, in order, in host memory:
        in place or in one copy from the device."""
        return (self.buffer[start : start + length] for start, length in spans)


class Peer(Protocol):
    """A connection to one process."""

    @property
    def address(self) -> bytes: ...


class Transport(Protocol):
    on_fatal: OnFatal | None
    """Called on the progress thread with the exception that ends it. Nothing moves any more, and
    nothing in flight can be proved over, so the process must exit. Set before `start`."""

    @property
    def address(self) -> bytes:
        """Return what a peer's `connect` takes for messages."""

    @property
    def put_address(self) -> bytes:
        """Return what a peer's `connect` takes for puts into this pool; it is another after
        `revoke_puts`."""

    def allocate(
        self, num_regions: int, region_bytes: int, blocks_per_region: int
    ) -> TransferMemory:
        """Allocate, touch and register the pool. Once, before `start`. Raises TransportError."""

    def register(self, buffer: Tensor, num_regions: int, blocks_per_region: int) -> TransferMemory:
        """Register an existing pool as adjacent regions of equal size: for memory that only torch
        can allocate. The transport keeps it alive until `close`. Called instead of `allocate`,
        once, before `start`. Raises TransportError."""

    def start(self, on_message: OnMessage, on_peer_lost: OnPeerLost) -> None:
        """Start the progress thread. `on_peer_lost` gets a lost peer's address, once per
        connection."""

    def connect(self, address: bytes) -> Peer:
        """Return the connection to that address; a new one if there is none or the last one was
        lost."""

    def puts_end_with_process(self, address: bytes) -> bool:
        """Whether a peer's puts into this pool cannot land after its process has ended: the peer
        writes the pool itself, as over shared memory. False: as over TCP, or unknown because the
        peer was never connected."""

    def puts_end_with_revocation(self, address: bytes) -> bool:
        """Whether a peer's puts into this pool cannot land once they are revoked: they pass through
        this process, as over TCP, or its queue pairs. False also if the peer was never
        connected."""

    def revoke_puts(self, on_revoked: OnRevoked) -> None:
        """Close the present `put_address` and open another. When `on_revoked` is called, no put to
        the former one can land, except those of `puts_end_with_process`. Its peers are lost."""

    def prepare(self, peer: Peer, regions: Sequence[Region]) -> None:
        """Prepare puts into these regions of the peer: do now what the first puts would wait
        for."""

    def put(self, peer: Peer, batch: PutBatch, on_failed: OnFailed) -> None:
        """Copy into the peer's memory. `on_failed` gets the reason if a put of this batch is
        refused, before any later flush's callback. Other batches to that peer are unaffected."""

    def flush(self, peer: Peer, on_flushed: OnFlushed) -> None:
        """Wait for all earlier puts to that peer except refused ones. A lost peer is an error."""

    def send(self, peer: Peer, payload: bytes, expects_answer: bool = False) -> None:
        """Send one message, after every completed flush. It is lost if the peer is.
        `expects_answer`: an answer comes soon, so poll for it briefly before sleeping."""

    def close(self) -> None:
        """Drop what is in flight and free everything, including the pool. Idempotent."""
