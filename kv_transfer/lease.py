"""Values of a handoff, and their conversion from and to the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from baton.v1 import common_pb2, worker_pb2
from kv_transfer.layout import NULL_BLOCK, BlockId, HandoffId
from kv_transfer.process import ProcessIdentity

LeaseId = NewType("LeaseId", str)


@dataclass(frozen=True)
class RankAddress:
    """One tensor-parallel rank of a worker as its transfer peers see it."""

    tp_rank: int
    transfer_address: bytes
    process: ProcessIdentity

    def to_proto(self) -> common_pb2.RankAddress:
        return common_pb2.RankAddress(
            tp_rank=self.tp_rank,
            transfer_address=self.transfer_address,
            process=self.process.to_proto(),
        )

    @staticmethod
    def from_proto(message: common_pb2.RankAddress) -> RankAddress:
        return RankAddress(
            message.tp_rank,
            message.transfer_address,
            ProcessIdentity.from_proto(message.process),
        )


@dataclass(frozen=True)
class WorkerIdentity:
    """One start of one worker; `ranks` in order, one per tensor-parallel rank. ValueError when
    there are none, out of order, or one has no address."""

    worker_id: str
    incarnation: int
    ranks: tuple[RankAddress, ...]

    def __post_init__(self) -> None:
        told = [rank.tp_rank for rank in self.ranks]
        if not told or told != list(range(len(told))):
            raise ValueError(f"worker {self.worker_id!r} has ranks {told}, not 0, 1, ...")
        if not all(rank.transfer_address for rank in self.ranks):
            raise ValueError(f"worker {self.worker_id!r} has a rank without a transfer address")

    @property
    def tp_size(self) -> int:
        return len(self.ranks)

    @property
    def rank0_address(self) -> bytes:
        return self.ranks[0].transfer_address

    def to_proto(self) -> common_pb2.WorkerRef:
        return common_pb2.WorkerRef(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            ranks=[rank.to_proto() for rank in self.ranks],
        )

    @staticmethod
    def from_proto(message: common_pb2.WorkerRef) -> WorkerIdentity:
        ranks = tuple(RankAddress.from_proto(rank) for rank in message.ranks)
        return WorkerIdentity(message.worker_id, message.incarnation, ranks)


@dataclass(frozen=True)
class Region:
    """A registered range that holds blocks [first_block, first_block + num_blocks) of a rank."""

    first_block: int
    num_blocks: int
    base_address: int
    num_bytes: int
    rkey: bytes


@dataclass(frozen=True)
class RankLease:
    """The memory one rank of the owner offers; `regions` of equal block count, in order."""

    tp_rank: int
    regions: tuple[Region, ...]

    def to_proto(self) -> worker_pb2.RankLease:
        regions = [
            worker_pb2.RegionRef(
                first_block=r.first_block,
                num_blocks=r.num_blocks,
                base_address=r.base_address,
                num_bytes=r.num_bytes,
                rkey=r.rkey,
            )
            for r in self.regions
        ]
        return worker_pb2.RankLease(tp_rank=self.tp_rank, regions=regions)

    @staticmethod
    def from_proto(message: worker_pb2.RankLease) -> RankLease:
        regions = tuple(
            Region(r.first_block, r.num_blocks, r.base_address, r.num_bytes, r.rkey)
            for r in message.regions
        )
        return RankLease(message.tp_rank, regions)


@dataclass(frozen=True)
class Lease:
    """The receiver's blocks promised to one named writer.

    `block_ids` has one table per layer group: the prompt's blocks from `num_cached_tokens` on;
    the null block stands where a window has left, and nothing is pushed there.
    """

    lease_id: LeaseId
    lease_epoch: int
    owner: WorkerIdentity
    writer: WorkerIdentity
    kv_fingerprint: bytes
    ranks: tuple[RankLease, ...]
    num_cached_tokens: int
    renew_within_s: float
    block_ids: tuple[tuple[BlockId, ...], ...]

    @property
    def handoff_id(self) -> HandoffId:
        """Names this grant; the writer's engine and ranks know the handoff by it."""
        return handoff_id(self.lease_id, self.lease_epoch)

    def num_writable_blocks(self, group: int) -> int:
        """Blocks of a layer group that the writer must push."""
        return sum(block != NULL_BLOCK for block in self.block_ids[group])

    def to_proto(self) -> worker_pb2.Lease:
        return worker_pb2.Lease(
            lease_id=self.lease_id,
            lease_epoch=self.lease_epoch,
            owner=self.owner.to_proto(),
            writer=self.writer.to_proto(),
            kv_fingerprint=self.kv_fingerprint,
            tp_size=len(self.ranks),
            ranks=[rank.to_proto() for rank in self.ranks],
            num_cached_tokens=self.num_cached_tokens,
            renew_within_ms=round(self.renew_within_s * 1000),
            groups=[worker_pb2.GroupBlocks(block_ids=table) for table in self.block_ids],
        )

    @staticmethod
    def from_proto(message: worker_pb2.Lease) -> Lease:
        return Lease(
            lease_id=LeaseId(message.lease_id),
            lease_epoch=message.lease_epoch,
            owner=WorkerIdentity.from_proto(message.owner),
            writer=WorkerIdentity.from_proto(message.writer),
            kv_fingerprint=message.kv_fingerprint,
            ranks=tuple(RankLease.from_proto(rank) for rank in message.ranks),
            num_cached_tokens=message.num_cached_tokens,
            renew_within_s=message.renew_within_ms / 1000,
            block_ids=tuple(
                tuple(BlockId(block) for block in group.block_ids) for group in message.groups
            ),
        )


def handoff_id(lease_id: str, lease_epoch: int) -> HandoffId:
    return HandoffId(f"{lease_id}:{lease_epoch}")


def split_handoff_id(handoff: HandoffId) -> tuple[str, int]:
    """(lease id, lease epoch)"""
    lease_id, epoch = handoff.rsplit(":", 1)
    return lease_id, int(epoch)


class LogprobsLike(Protocol):
    """Log-probabilities of a sampled token: its own, its rank, and the likeliest (id, logprob)."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


@dataclass(frozen=True)
class FirstTokenLogprobs:
    """As `engine.request.TokenLogprobs`, which this package does not know."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class FirstToken:
    """The prompt's first output token, sampled by the writer.

    `finished` says why when it ends the request; UNSPECIFIED: it goes on.
    """

    token_id: int
    logprobs: FirstTokenLogprobs | None = None
    finished: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED

    def to_proto(self) -> worker_pb2.FirstToken:
        logprobs = None if self.logprobs is None else logprobs_to_proto(self.logprobs)
        return worker_pb2.FirstToken(id=self.token_id, logprobs=logprobs, finished=self.finished)

    @staticmethod
    def from_proto(message: worker_pb2.FirstToken) -> FirstToken:
        logprobs = logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None
        return FirstToken(message.id, logprobs, message.finished)


def logprobs_to_proto(logprobs: LogprobsLike) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[common_pb2.TokenLogprob(id=token, logprob=value) for token, value in logprobs.top],
    )


def logprobs_from_proto(message: common_pb2.Logprobs) -> FirstTokenLogprobs:
    return FirstTokenLogprobs(
        message.logprob, message.rank, tuple((t.id, t.logprob) for t in message.top)
    )


@dataclass(frozen=True)
class Receipt:
    """What a finished handoff moved and what it cost.

    `put_s`: time the slowest rank spent posting and flushing; `exposed_s`: from the first token
    until the receiver's acknowledgement.
    """

    num_bytes: int
    num_blocks: int
    put_s: float
    exposed_s: float
