"""One rank's share of a handoff: what the writer pushes, and what the receiver verifies.

On the writer, `RankHandoff` tracks what is pushed and what is missing, and the functions below
make its `done`. On the receiver, `why_wrong` verifies what was pushed to a rank.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.v1 import transfer_pb2, worker_pb2
from kv_transfer.errors import LeaseError
from kv_transfer.layout import NULL_BLOCK, BlockId, BlockPush, HandoffId, KvLayout, RegionLayout
from kv_transfer.lease import FirstToken, Lease, RankAddress, logprobs_to_proto
from kv_transfer.routes import RankPair, Route, block_checksums, pairs
from kv_transfer.transport import Peer, PutBatch, Runs, TransferMemory


class Tombstones:
    """Handoffs that are over, each remembered for `keep_s` after it was first added.

    A late message about one of them must not begin it again."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s: dict[HandoffId, float] = {}  # in the order of burial, and so of expiry

    def __len__(self) -> int:
        return len(self._until_s)

    def bury(self, handoff: HandoffId, now_s: float) -> None:
        self._purge(now_s)
        self._until_s.setdefault(handoff, now_s + self._keep_s)

    def holds(self, handoff: HandoffId, now_s: float) -> bool:
        self._purge(now_s)
        return handoff in self._until_s

    def _purge(self, now_s: float) -> None:
        while self._until_s:
            oldest = next(iter(self._until_s))
            if self._until_s[oldest] > now_s:
                return
            del self._until_s[oldest]


class Phase(enum.Enum):
    PUSHING = "pushing"
    FLUSHING = "flushing"  # nothing more is posted; waiting for puts in flight
    DRAINED = "drained"  # nothing is in flight, and nothing will be


@dataclass
class Lane:
    """The connection and route to one target rank; `mail_address` takes its messages."""

    peer: Peer
    mail_address: bytes
    route: Route
    done: transfer_pb2.TransferMessage  # made when the handoff opens, completed before its flush
    sent: bytes | None = None  # `done` as it was sent, for a resend

    def leads_to(self, address: bytes) -> bool:
        return address in (self.peer.address, self.mail_address)

    def has_put(self, batch: PutBatch, is_first_layer: bool) -> None:
        """Count a layer's runs as handed to the transport, a block with its group's first layer."""
        self.done.done.num_bytes += batch.runs.num_bytes
        if is_first_layer:
            self.done.done.num_blocks += batch.runs.num_blocks


@dataclass
class _PushRuns:
    push: BlockPush  # kept alive, because its id() is the key
    flags: int  # its wanted ordinals, as `_flags` encodes them
    runs: dict[int, Runs]  # target rank ->


@dataclass
class RankHandoff:
    """One handoff on one rank of the writer. Guarded by the rank's lock."""

    lease: Lease
    layout: KvLayout
    lanes: dict[int, Lane]  # target rank ->
    phase: Phase = Phase.PUSHING
    first: FirstToken | None = None
    cancelled: bool = False
    error: str | None = None
    peer_lost: bool = False
    can_still_land: bool = False  # a connection broke under its puts and may still deliver them
    put_s: float = 0.0
    num_flushing: int = 0
    moved_at_s: float | None = None  # when a flush to its receiver last ended while it flushed
    report: transfer_pb2.TransferMessage | None = None  # rank 0's RankDrained, held until `Ack`
    source_blocks: list[dict[int, BlockId]] = field(init=False)  # per group: ordinal -> block here
    _missing: list[list[int]] = field(init=False)  # per group and layer: flags of missing blocks
    _num_unfinished: int = field(init=False)  # layers with missing blocks
    _runs: dict[int, _PushRuns] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._missing = []
        for spec, table in zip(self.layout.groups, self.lease.block_ids, strict=True):
            wanted = _flags([o for o, block in enumerate(table) if block != NULL_BLOCK])
            self._missing.append([wanted] * spec.num_layers)
        self._num_unfinished = sum(bool(missing) for row in self._missing for missing in row)
        self.source_blocks = [{} for _ in self.layout.groups]

    @property
    def has_pushed(self) -> bool:
        return any(self.source_blocks)

    @property
    def is_pushed(self) -> bool:
        """Whether every layer of every wanted block has been enqueued."""
        return self._num_unfinished == 0

    def layer_batches(self, layer: int, push: BlockPush) -> list[tuple[Lane, PutBatch]]:
        """List the puts of one layer of a push. Raises LeaseError if a block cannot be pushed."""
        prepared = self._runs.get(id(push)) or self._prepare(push)
        layer_in_group = layer - self.layout.groups[push.group].first_layer
        self._mark(push.group, layer_in_group, prepared.flags)
        batches = []
        for target, runs in prepared.runs.items():
            lane = self.lanes[target]
            batches.append((lane, lane.route.at_layer(runs, push.group, layer_in_group)))
        return batches

    def step_done(self) -> None:
        self._runs.clear()

    def _mark(self, group: int, layer_in_group: int, flags: int) -> None:
        row = self._missing[group]
        missing = row[layer_in_group]
        row[layer_in_group] = missing & ~flags
        if missing and not row[layer_in_group]:
            self._num_unfinished -= 1

    def _prepare(self, push: BlockPush) -> _PushRuns:
        """Compute once per step what every layer of the step repeats."""
        table = self.lease.block_ids[push.group]
        kept = [
            (ordinal, block)
            for ordinal, block in zip(push.ordinals, push.block_ids, strict=True)
            if self._is_wanted(table, ordinal, block)
        ]
        self.source_blocks[push.group].update(kept)
        sources = [block for _, block in kept]
        targets = [table[ordinal] for ordinal, _ in kept]
        runs = {}
        for target, lane in self.lanes.items():
            found = lane.route.runs(push.group, sources, targets)
            if found is not None:
                runs[target] = found
        prepared = _PushRuns(push, _flags([ordinal for ordinal, _ in kept]), runs)
        self._runs[id(push)] = prepared
        return prepared

    @staticmethod
    def _is_wanted(table: Sequence[BlockId], ordinal: int, block: BlockId) -> bool:
        if not 0 <= ordinal < len(table):
            raise LeaseError(f"block {ordinal} is pushed, but the lease has {len(table)} blocks")
        if table[ordinal] == NULL_BLOCK:
            return False
        if block == NULL_BLOCK:
            raise LeaseError(f"block {ordinal} is wanted, but it has left the writer's window")
        return True

    def tables(self) -> tuple[list[list[BlockId]], list[list[BlockId]]]:
        """List (source, target) blocks per group, in the lease's order, without null blocks."""
        sources: list[list[BlockId]] = []
        targets: list[list[BlockId]] = []
        for table, known in zip(self.lease.block_ids, self.source_blocks, strict=True):
            wanted = [o for o, block in enumerate(table) if block != NULL_BLOCK]
            sources.append([known[o] for o in wanted])
            targets.append([table[o] for o in wanted])
        return sources, targets


def _flags(ordinals: Sequence[int]) -> int:
    """Encode a set of ordinals as a number whose bytes are 1 at them: cheap to subtract from
    another."""
    flags = bytearray(max(ordinals, default=-1) + 1)
    for ordinal in ordinals:
        flags[ordinal] = 1
    return int.from_bytes(flags, "little")


def new_done(
    lease: Lease, pair: RankPair, layout: KvLayout, reply_to: RankAddress
) -> transfer_pb2.TransferDone:
    """Make a `done` of what is known when the handoff opens."""
    fed = pairs(layout, pair.source_size, pair.target_size)
    return transfer_pb2.TransferDone(
        target_rank=pair.target_rank,
        num_source_ranks=sum(other.target_rank == pair.target_rank for other in fed),
        num_writer_ranks=pair.source_size,
        kv_fingerprint=lease.kv_fingerprint,
        reply_to=reply_to.to_proto(),
    )


def fill_first_token(done: transfer_pb2.TransferDone, first: FirstToken) -> None:
    """Fill in the first token. It is called before the flush, because the receiver waits for what
    follows the flush."""
    done.first_token = first.token_id
    logprobs = logprobs_to_proto(first.logprobs)
    if logprobs is not None:
        done.logprobs.CopyFrom(logprobs)


def add_checksums(
    handoff: RankHandoff,
    lane: Lane,
    source: RegionLayout,
    memory: TransferMemory,
    stride: int,
) -> None:
    """Add the checksums and ids of every `stride`-th block that the lane has sent."""
    sources, targets = handoff.tables()
    done = lane.done.done
    done.checksum_stride = stride
    done.groups.extend(worker_pb2.GroupBlocks(block_ids=table) for table in targets)
    done.checksums.extend(block_checksums(memory, source, lane.route.pair, sources, stride))


def why_wrong(
    done: transfer_pb2.TransferDone,
    source_rank: int,
    target: RegionLayout,
    memory: TransferMemory,
) -> str:
    """Say why the received blocks differ from the sent ones; empty if they do not or are
    unchecked."""
    if done.target_rank != target.tp_rank:
        return f"rank {target.tp_rank} received a done for rank {done.target_rank}"
    if not done.checksum_stride:
        return ""
    tables = [[BlockId(block) for block in group.block_ids] for group in done.groups]
    num_blocks = memory.num_regions * memory.blocks_per_region
    if len(tables) != len(target.layout.groups) or any(
        block >= num_blocks for table in tables for block in table
    ):
        return "the done names blocks that do not exist"
    if source_rank >= done.num_writer_ranks:
        return f"source rank {source_rank} is not below {done.num_writer_ranks}"
    pair = RankPair(source_rank, done.num_writer_ranks, target.tp_rank, target.tp_size)
    try:
        found = block_checksums(memory, target, pair, tables, done.checksum_stride)
    except ValueError as error:  # the heads cannot be split over that many ranks
        return str(error)
    wrong = sum(a != b for a, b in zip(found, done.checksums, strict=False))
    if wrong or len(found) != len(done.checksums):
        return f"{wrong} of {len(found)} checksums differ ({len(done.checksums)} were sent)"
    return ""
