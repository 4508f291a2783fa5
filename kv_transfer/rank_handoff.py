"""One handoff as one rank of the writer sees it: what is pushed, what is missing, how it ends."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.v1 import transfer_pb2
from kv_transfer.errors import LeaseError
from kv_transfer.layout import NULL_BLOCK, BlockId, HandoffId, KvLayout
from kv_transfer.lease import FirstToken, Lease
from kv_transfer.routes import GroupRuns, Route
from kv_transfer.transport import Peer, PutBatch


class Push(Protocol):
    """As `engine.request.BlockPush`, which this package does not know."""

    @property
    def handoff_id(self) -> HandoffId: ...
    @property
    def group(self) -> int: ...
    @property
    def ordinals(self) -> tuple[int, ...]: ...
    @property
    def block_ids(self) -> tuple[BlockId, ...]: ...


class Phase(enum.Enum):
    PUSHING = "pushing"
    FLUSHING = "flushing"  # nothing more is posted; waiting for what is under way
    DRAINED = "drained"  # nothing of it is in flight, and nothing will be


@dataclass
class Lane:
    """The way to one target rank."""

    peer: Peer
    route: Route
    done: transfer_pb2.TransferMessage  # made when the handoff opens, completed for its flush
    sent: bytes | None = None  # `done` as it was sent, to be sent again
    num_bytes: int = 0  # handed to the transport: what `done` tells, whatever was to be handed
    num_blocks: int = 0

    def has_put(self, batch: PutBatch, is_first_layer: bool) -> None:
        """A layer's runs were handed over; a block counts with the first layer of its group."""
        self.num_bytes += batch.runs.num_bytes
        if is_first_layer:
            self.num_blocks += batch.runs.num_blocks


@dataclass
class _PushRuns:
    push: Push  # keeps the key alive: its identity
    flags: int  # of its wanted ordinals, as `_flags` makes them
    runs: dict[int, GroupRuns]  # target rank ->


@dataclass
class RankHandoff:
    """Owned by its rank and guarded by the rank's lock."""

    lease: Lease
    layout: KvLayout
    lanes: dict[int, Lane]  # target rank ->
    phase: Phase = Phase.PUSHING
    first: FirstToken | None = None
    cancelled: bool = False
    error: str | None = None
    peer_lost: bool = False
    can_still_land: bool = False  # a connection broke under its puts, and may deliver them yet
    put_s: float = 0.0
    num_flushing: int = 0
    moved_at_s: float | None = None  # last flush to its receiver that has ended during its own
    report: transfer_pb2.TransferMessage | None = None  # rank 0's that it has drained, until `Ack`
    source_blocks: list[dict[int, BlockId]] = field(init=False)  # per group: ordinal -> block here
    _missing: list[list[int]] = field(init=False)  # per group and layer: flags of what is wanted
    _num_unfinished: int = field(init=False)  # layers of which blocks are missing
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
        """Every layer of every block the lease lacks has been enqueued."""
        return self._num_unfinished == 0

    def layer_batches(self, layer: int, push: Push) -> list[tuple[Lane, PutBatch]]:
        """The puts of one layer of a push. Raises LeaseError for a block that cannot be pushed."""
        prepared = self._runs.get(id(push)) or self._prepare(push)
        layer_in_group = layer - self.layout.groups[push.group].first_layer
        self._mark(push.group, layer_in_group, prepared.flags)
        return [
            (self.lanes[target], runs.at(layer_in_group)) for target, runs in prepared.runs.items()
        ]

    def step_done(self) -> None:
        self._runs.clear()

    def _mark(self, group: int, layer_in_group: int, flags: int) -> None:
        row = self._missing[group]
        missing = row[layer_in_group]
        row[layer_in_group] = missing & ~flags
        if missing and not row[layer_in_group]:
            self._num_unfinished -= 1

    def _prepare(self, push: Push) -> _PushRuns:
        """Work out once a step what every layer of the step repeats."""
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
            group_runs = lane.route.runs(push.group, sources, targets)
            if group_runs is not None:
                runs[target] = group_runs
        prepared = _PushRuns(push, _flags([ordinal for ordinal, _ in kept]), runs)
        self._runs[id(push)] = prepared
        return prepared

    @staticmethod
    def _is_wanted(table: Sequence[BlockId], ordinal: int, block: BlockId) -> bool:
        if not 0 <= ordinal < len(table):
            raise LeaseError(f"block {ordinal} is pushed, but the lease has {len(table)}")
        if table[ordinal] == NULL_BLOCK:
            return False
        if block == NULL_BLOCK:
            raise LeaseError(f"block {ordinal} is wanted, but has left the window here")
        return True

    def tables(self) -> tuple[list[list[BlockId]], list[list[BlockId]]]:
        """(source, target) blocks per group, in the lease's order, without null blocks."""
        sources: list[list[BlockId]] = []
        targets: list[list[BlockId]] = []
        for table, known in zip(self.lease.block_ids, self.source_blocks, strict=True):
            wanted = [o for o, block in enumerate(table) if block != NULL_BLOCK]
            sources.append([known[o] for o in wanted])
            targets.append([table[o] for o in wanted])
        return sources, targets


def _flags(ordinals: Sequence[int]) -> int:
    """A number whose bytes are 1 at these places: a set that costs little to take from another."""
    flags = bytearray(max(ordinals, default=-1) + 1)
    for ordinal in ordinals:
        flags[ordinal] = 1
    return int.from_bytes(flags, "little")
