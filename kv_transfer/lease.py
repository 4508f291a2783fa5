"""Values of a handoff, and their conversion to and from protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from baton.v1 import common_pb2, transfer_pb2, worker_pb2
from kv_transfer.layout import NULL_BLOCK, BlockId, HandoffId, TokenLogprobs
from kv_transfer.process import ProcessIdentity

LeaseId = NewType("LeaseId", str)


@dataclass(frozen=True)
class RankAddress:
    """How peers reach one tensor-parallel rank of a worker."""

    tp_rank: int
    transfer_address: bytes
    process: ProcessIdentity

    def to_proto(self) -> common_pb2.RankAddress:
        process = self.process.to_proto()
        return common_pb2.RankAddress(
            tp_rank=self.tp_rank, transfer_address=self.transfer_address, process=process
        )

    @staticmethod
    def from_proto(message: common_pb2.RankAddress) -> RankAddress:
        process = ProcessIdentity.from_proto(message.process)
        return RankAddress(message.tp_rank, message.transfer_address, process)


@dataclass(frozen=True)
class WorkerIdentity:
    """One start of one worker. `ranks`: one per tensor-parallel rank, in order.

    Raises ValueError when there are none, they are out of order, or one has no address."""

    worker_id: str
    incarnation: int
    ranks: tuple[RankAddress, ...]

    def __post_init__(self) -> None:
        found = [rank.tp_rank for rank in self.ranks]
        if not found or found != list(range(len(found))):
            raise ValueError(f"worker {self.worker_id!r} has ranks {found}, not 0, 1, ...")
        if not all(rank.transfer_address for rank in self.ranks):
            raise ValueError(f"worker {self.worker_id!r} has a rank without a transfer address")

    @property
    def start(self) -> tuple[str, int]:
        """What distinguishes this start from any other of any worker."""
        return self.worker_id, self.incarnation

    def sent(self, message: transfer_pb2.TransferMessage) -> bool:
        """Whether this start of the worker sent the message."""
        return (message.sender_worker_id, message.sender_incarnation) == self.start

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
    """A registered memory range with a rank's blocks [first_block, first_block + num_blocks)."""

    first_block: int
    num_blocks: int
    base_address: int
    num_bytes: int
    rkey: bytes


@dataclass(frozen=True)
class RankLease:
    """The memory that one rank of the owner offers; `regions` in order, of equal block count.
    `put_address`: where puts into it go."""

    tp_rank: int
    regions: tuple[Region, ...]
    put_address: bytes

    def to_proto(self) -> worker_pb2.RankLease:
        regions = [worker_pb2.RegionRef(**vars(region)) for region in self.regions]
        return worker_pb2.RankLease(
            tp_rank=self.tp_rank, regions=regions, put_address=self.put_address
        )

    @staticmethod
    def from_proto(message: worker_pb2.RankLease) -> RankLease:
        regions = tuple(
            Region(r.first_block, r.num_blocks, r.base_address, r.num_bytes, r.rkey)
            for r in message.regions
        )
        return RankLease(message.tp_rank, regions, message.put_address)


@dataclass(frozen=True)
class Lease:
    """The receiver's blocks, promised to one named writer.

    `block_ids` has one table per layer group: the prompt's blocks from `num_cached_tokens` on. The
    null block marks a block that has left the sliding window: nothing is pushed for it.
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
        """Name of this grant, by which the writer's engine and ranks know the handoff."""
        return handoff_id(self.lease_id, self.lease_epoch)

    def num_writable_blocks(self, group: int) -> int:
        """Number of blocks of a layer group that the writer must push."""
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
    """Split a handoff's name into lease id and lease epoch."""
    lease_id, epoch = handoff.rsplit(":", 1)
    return lease_id, int(epoch)


@dataclass(frozen=True)
class FirstToken:
    """The prompt's first output token, sampled by the writer.

    `finished`: the reason if the token ends the request; UNSPECIFIED: it continues.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    finished: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED

    def to_proto(self) -> worker_pb2.FirstToken:
        return worker_pb2.FirstToken(
            id=self.token_id, logprobs=logprobs_to_proto(self.logprobs), finished=self.finished
        )

    @staticmethod
    def from_proto(message: worker_pb2.FirstToken) -> FirstToken:
        return FirstToken(message.id, logprobs_from_proto(message.logprobs), message.finished)


def logprobs_to_proto(logprobs: TokenLogprobs | None) -> common_pb2.Logprobs | None:
    if logprobs is None:
        return None
    return common_pb2.Logprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[common_pb2.TokenLogprob(id=token, logprob=value) for token, value in logprobs.top],
        prompt=filter(None, map(logprobs_to_proto, logprobs.prompt)),
    )


def logprobs_from_proto(message: common_pb2.Logprobs) -> TokenLogprobs | None:
    """Read a token's log-probabilities; None for an unset message, whose rank is 0."""
    if message.rank == 0:
        return None
    top = tuple((each.id, each.logprob) for each in message.top)
    prompt = tuple(filter(None, map(logprobs_from_proto, message.prompt)))
    return TokenLogprobs(message.logprob, message.rank, top, prompt)


@dataclass(frozen=True)
class Receipt:
    """What a finished handoff moved and what it cost.

    `put_s`: seconds that the slowest rank spent posting and flushing. `exposed_s`: seconds from the
    first token to the receiver's `Ack`.
    """

    num_bytes: int
    num_blocks: int
    put_s: float
    exposed_s: float
