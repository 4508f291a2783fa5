"""A rank's `done`: what a writer says of the blocks it has pushed, and its check on arrival."""

from __future__ import annotations

from baton.v1 import transfer_pb2, worker_pb2
from kv_transfer.layout import BlockId, KvLayout, RegionLayout
from kv_transfer.lease import FirstToken, Lease, logprobs_to_proto
from kv_transfer.rank_handoff import Lane, RankHandoff
from kv_transfer.routes import RankPair, block_checksums, pairs
from kv_transfer.transport import TransferMemory


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
