"""A rank's `done`: the writer fills it in, the receiver verifies what has arrived.

Every rank of the receiver verifies what was pushed to it. Rank 0's `Admission` decides; the other
ranks report to their rank 0 what they have found. `RankArrivals` takes renewals too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton.v1 import transfer_pb2, worker_pb2
from kv_transfer.admission import Admission
from kv_transfer.layout import BlockId, KvLayout, RegionLayout
from kv_transfer.lease import FirstToken, Lease, logprobs_to_proto
from kv_transfer.rank_handoff import Lane, RankHandoff
from kv_transfer.routes import RankPair, block_checksums, pairs
from kv_transfer.transport import TransferMemory

log = logging.getLogger(__name__)


def fill_done(
    done: transfer_pb2.TransferDone, lease: Lease, pair: RankPair, layout: KvLayout
) -> None:
    """What is known when a handoff opens."""
    fed = pairs(layout, pair.source_size, pair.target_size)
    done.target_rank = pair.target_rank
    done.num_source_ranks = sum(other.target_rank == pair.target_rank for other in fed)
    done.num_writer_ranks = pair.source_size
    done.kv_fingerprint = lease.kv_fingerprint


def fill_counts(lane: Lane, first: FirstToken | None) -> None:
    """What is known when all that goes this way has been handed to the transport; not after the
    flush, for which the receiver waits."""
    done = lane.done.done
    done.num_bytes, done.num_blocks = lane.num_bytes, lane.num_blocks
    if first is not None:
        done.first_token = first.token_id
        if first.logprobs is not None:
            done.logprobs.CopyFrom(logprobs_to_proto(first.logprobs))


def add_checksums(
    handoff: RankHandoff,
    lane: Lane,
    source: RegionLayout,
    memory: TransferMemory,
    stride: int,
) -> None:
    """Checksums of every `stride`-th block that has gone this way, and which blocks they are."""
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
    """Why the blocks that have come are not those sent; empty when they are, or are not checked."""
    if done.target_rank != target.tp_rank:
        return f"a done for rank {done.target_rank} came to rank {target.tp_rank}"
    if not done.checksum_stride:
        return ""
    tables = [[BlockId(block) for block in group.block_ids] for group in done.groups]
    num_blocks = memory.num_regions * memory.blocks_per_region
    if len(tables) != len(target.layout.groups) or any(
        block >= num_blocks for table in tables for block in table
    ):
        return "the done names blocks that do not exist"
    if source_rank >= done.num_writer_ranks:
        return f"rank {source_rank} is not one of {done.num_writer_ranks}"
    pair = RankPair(source_rank, done.num_writer_ranks, target.tp_rank, target.tp_size)
    try:
        found = block_checksums(memory, target, pair, tables, done.checksum_stride)
    except ValueError as error:  # a width over which the heads cannot be split
        return str(error)
    wrong = sum(a != b for a, b in zip(found, done.checksums, strict=False))
    if wrong or len(found) != len(done.checksums):
        return f"{wrong} of {len(found)} checksums differ ({len(done.checksums)} were sent)"
    return ""


class RankArrivals:
    """Takes the messages of writers, and of this worker's other ranks, on the progress thread."""

    def __init__(
        self,
        region_layout: RegionLayout,
        memory: TransferMemory,
        rank0_address: bytes | None,
        send: Callable[[bytes, transfer_pb2.TransferMessage], None],
    ) -> None:
        """`rank0_address` is None on rank 0."""
        self.admission: Admission | None = None
        """On the rank 0 of a worker that gives leases: what a `done` is reported to."""
        self._region_layout, self._memory = region_layout, memory
        self._rank0_address, self._send = rank0_address, send

    def progress(self, message: transfer_pb2.TransferMessage) -> None:
        """A writer renews its lease."""
        if self.admission is not None:
            self.admission.heard(message)

    def done(self, message: transfer_pb2.TransferMessage) -> None:
        """Verify what has arrived here, then let rank 0 decide: this rank, or the one we tell."""
        done, source_rank = message.done, message.sender_rank
        error = why_wrong(done, source_rank, self._region_layout, self._memory)
        if self._rank0_address is None:
            self._decide(message, source_rank, done, error)
            return
        report = transfer_pb2.TransferMessage()
        report.CopyFrom(message)  # the sender stays the writer: rank 0 checks it
        report.rank_done.source_rank = source_rank
        report.rank_done.done.CopyFrom(done)
        report.rank_done.error = error
        self._send(self._rank0_address, report)

    def rank_done(self, message: transfer_pb2.TransferMessage) -> None:
        """On rank 0: another rank has verified what has arrived there."""
        report = message.rank_done
        self._decide(message, report.source_rank, report.done, report.error)

    def _decide(
        self,
        message: transfer_pb2.TransferMessage,
        source_rank: int,
        done: transfer_pb2.TransferDone,
        error: str,
    ) -> None:
        if self.admission is None:
            log.error("a done from %s, but nothing is leased here", message.sender_worker_id)
        else:
            self.admission.done(message, source_rank, done, error)
