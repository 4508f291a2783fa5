"""The seam between handoffs and what moves bytes: one-sided puts, flushes and small messages.

A transport belongs to one process and has one progress thread. Every method but `close` may be
called from any thread and returns at once: it enqueues. Callbacks run on the progress thread, one
at a time, and must only enqueue or send in their turn.

What a transport promises: operations to one peer start in the order they were asked for; a flush
completes when every earlier put to that peer has left this process's hands for good, so that
nothing of it can be written later (but see `FlushResult.is_over`). A flush that succeeds is no
proof that the peer lives, nor that it has seen anything: only the peer's own message is.
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
    "array[int]"  # of typecode "Q": unsigned 64-bit numbers, which compiled code reads in place
)


@dataclass(frozen=True, eq=False)
class Place:
    """Where one side's blocks lie: regions at `bases`, of `num_blocks` blocks each; in a region
    each tensor's first block at `offsets`, the next ones `strides` bytes on."""

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
class Way:
    """From this process's blocks to a peer's: of a block's tensors `lengths` bytes each; `rkeys` by
    target region."""

    source: Place
    target: Place
    lengths: Words  # [num_tensors]
    rkeys: tuple[bytes, ...]

    @cached_property
    def packed(self) -> Words:
        """For compiled code: `struct way` of `ucx/post_loop.c`."""
        words: list[int] = []
        for place in (self.source, self.target):
            offsets, strides = (
                column.buffer_info()[0] for column in (place.offsets, place.strides)
            )
            words += place.bases.buffer_info()[0], place.num_blocks, offsets, strides
        return array("Q", (*words, *self.lengths.buffer_info()))


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of bytes to copy into a peer's memory: of each block one for each tensor. `sources` and
    `targets`: blocks here and there, in pairs, every one in a region of its place."""

    way: Way
    sources: Words
    targets: Words

    @property
    def num_blocks(self) -> int:
        return len(self.targets)

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.way.lengths) * self.num_blocks

    def coalesced(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(source, target, length, region here, region there), in order: neighbours that follow on
        at both ends are one. Regions are registered apart and never merged."""
        here, there = self.way.source, self.way.target
        for tensor, length in enumerate(self.way.lengths):
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
    """The runs, moved on by some bytes at either end: a block's layers lie at a constant stride."""

    runs: Runs
    source_offset: int = 0
    target_offset: int = 0


@dataclass(frozen=True)
class FlushResult:
    """`error` is None when every put before the flush is done; `busy_s` is what the flush, and the
    peer's puts since the last one, have cost this process. Unless `is_over`, what was put
    before a flush that failed may still land, though it has left this process's hands: the kernel
    delivers what it has taken of a TCP connection that broke."""

    error: str | None
    busy_s: float
    is_over: bool = True


OnMessage = Callable[[bytes], None]
OnPeerLost = Callable[[bytes], None]
OnFlushed = Callable[[FlushResult], None]
OnFailed = Callable[[str], None]
OnFatal = Callable[[BaseException], None]


class Device(Protocol):
    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


class Tensor(Protocol):
    """A contiguous torch tensor of bytes, uint8 [num_bytes]. Nothing here imports torch for it."""

    @property
    def device(self) -> Device: ...

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...


class TransferMemory(Protocol):
    """A rank's pool: `engine.api.KvMemory` and what a peer must know to write into it."""

    @property
    def num_regions(self) -> int: ...

    @property
    def region_stride_bytes(self) -> int: ...

    @property
    def blocks_per_region(self) -> int: ...

    @property
    def buffer(self) -> Any:
        """The whole reservation: uint8 [num_regions * region_stride_bytes]; void after `close`. A
        numpy array, or what was registered: a tensor, or the array that shares its memory."""

    @property
    def regions(self) -> tuple[Region, ...]: ...

    def read(self, spans: Sequence[tuple[int, int]]) -> Iterable[npt.NDArray[np.uint8]]:
        """The bytes of these (offset, length) in the buffer, in order, where the host reads them:
        in place, or in one copy from the device."""


class Peer(Protocol):
    """A connection to one process."""

    @property
    def address(self) -> bytes: ...


class Transport(Protocol):
    on_fatal: OnFatal | None
    """Told, on the progress thread, of the exception that ends it: nothing moves or arrives any
    more, nothing in flight can be proved over, so the process must leave. Set before `start`."""

    @property
    def address(self) -> bytes:
        """What a peer's `connect` takes."""

    def allocate(
        self, num_regions: int, region_bytes: int, blocks_per_region: int
    ) -> TransferMemory:
        """Make, touch and register the pool. Before `start`, once. Raises TransportError."""

    def register(self, buffer: Tensor, num_regions: int, blocks_per_region: int) -> TransferMemory:
        """Register a pool that exists, as regions of equal size one after the other: for memory
        that only torch can allocate. Kept alive until `close`. Instead of `allocate`; before
        `start`, once. Raises TransportError."""

    def start(self, on_message: OnMessage, on_peer_lost: OnPeerLost) -> None:
        """Begin to move things. `on_peer_lost` gets the address of a peer, once per connection."""

    def connect(self, address: bytes) -> Peer:
        """The connection to that address, made when there is none or the last one was lost."""

    def puts_end_with_process(self, address: bytes) -> bool:
        """Whether nothing that the process at this address has put here can land once that process
        is gone: it writes this pool itself, as over shared memory. False: it does not, as over TCP,
        or it is not known, as of a process that was never connected to."""

    def prepare(self, peer: Peer, regions: Sequence[Region]) -> None:
        """These regions of the peer will be written: do now what the first puts would wait for."""

    def put(self, peer: Peer, batch: PutBatch, on_failed: OnFailed) -> None:
        """Copy into the peer's memory. `on_failed` is told why a put of the batch was refused,
        before the callback of any later flush: other batches to that peer have not failed."""

    def flush(self, peer: Peer, on_flushed: OnFlushed) -> None:
        """Wait for all earlier puts to that peer, refused ones aside. A lost peer is an error."""

    def send(self, peer: Peer, payload: bytes, expects_answer: bool = False) -> None:
        """One message, after every flush that has completed; lost when the peer is.
        `expects_answer`: one is about to come, so look out for it a moment before sleeping."""

    def close(self) -> None:
        """Drop what is under way and free everything, the pool too. Idempotent."""
