"""Which `done` admits its lease: decided and answered where it arrives, on the progress thread.

The writer waits for the answer, and an event loop that had to be woken for it would cost more than
the bytes of a short prompt. The decision is one small step under a lock; everything that follows
from it (timers, the listener, quarantine) is the `LeaseTable`'s, on the event loop, which is told
what was decided. That a writer was heard of is only noted here: the lease's timer looks it up.

Between the two a lease may be admitted here while its table has not heard of it yet. `withdraw`
settles who was first: after it a lease that was not admitted never will be.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.v1 import transfer_pb2
from kv_transfer.layout import NULL_BLOCK, KvLayout
from kv_transfer.lease import FirstToken, Lease, LeaseId, logprobs_from_proto
from kv_transfer.routes import pairs

log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    PARTIAL = "other ranks have yet to report"
    ADMITTED = "all is here"
    REPEATED = "it was admitted before"
    WRONG = "what has arrived is not what was to come"
    REFUSED = "the lease is fenced, unknown, or another writer's"


@dataclass(frozen=True)
class Decision:
    """What one `done` led to. `first` is there when it admits, `reason` when it does not; `lease`
    is None when it is not the sender's."""

    lease: Lease | None
    outcome: Outcome
    first: FirstToken | None = None
    reason: str = ""


@dataclass
class _Offer:
    """A lease that may be admitted, until it is withdrawn."""

    lease: Lease
    heard_at_s: float
    expected: dict[tuple[int, int], tuple[int, int, int]]
    """(source rank, target rank) -> what its `done` must say: source ranks, blocks, bytes"""
    reported: set[tuple[int, int]] = field(default_factory=set)
    first: FirstToken | None = None
    is_admitted: bool = False
    is_withdrawn: bool = False


class Admission:
    """Owns what has been reported of each lease. Any thread."""

    def __init__(
        self,
        layout: KvLayout,
        tp_size: int,
        fingerprint: bytes,
        send: Callable[[bytes, transfer_pb2.TransferMessage], None],
        new_message: Callable[[str, int], transfer_pb2.TransferMessage],
        tell: Callable[[Decision], None],
        now_s: Callable[[], float],
    ) -> None:
        """`tell` hears of what is ADMITTED or WRONG; nothing else changes the lease's state."""
        self._now_s = now_s
        self._layout, self._tp_size, self._fingerprint = layout, tp_size, fingerprint
        self._send, self._new_message, self._tell = send, new_message, tell
        self._lock = threading.Lock()
        self._offers: dict[LeaseId, _Offer] = {}

    def offer(self, lease: Lease) -> None:
        """The lease may be admitted from now on."""
        offer = _Offer(lease, self._now_s(), self._expected(lease))
        with self._lock:
            self._offers[lease.lease_id] = offer

    def _expected(self, lease: Lease) -> dict[tuple[int, int], tuple[int, int, int]]:
        fed = pairs(self._layout, lease.writer.tp_size, self._tp_size)
        num_blocks = [lease.num_writable_blocks(g) for g in range(len(lease.block_ids))]
        expected = {}
        for pair in fed:
            bytes_of = [pair.block_bytes(self._layout, g) for g in range(len(num_blocks))]
            expected[pair.source_rank, pair.target_rank] = (
                sum(other.target_rank == pair.target_rank for other in fed),
                sum(n for n, size in zip(num_blocks, bytes_of, strict=True) if size),
                sum(n * size for n, size in zip(num_blocks, bytes_of, strict=True)),
            )
        return expected

    def withdraw(self, lease_id: LeaseId) -> bool:
        """Nothing will be admitted under this lease. False: it has been already."""
        with self._lock:
            offer = self._offers[lease_id]
            offer.is_withdrawn = not offer.is_admitted
            return offer.is_withdrawn

    def forget(self, lease_id: LeaseId) -> None:
        with self._lock:
            del self._offers[lease_id]

    def heard(self, message: transfer_pb2.TransferMessage) -> None:
        """The message's lease is still being served."""
        with self._lock:
            offer = self._offers.get(LeaseId(message.lease_id))
            if offer is not None and is_from_writer(offer.lease, message):
                offer.heard_at_s = self._now_s()

    def heard_at_s(self, lease_id: LeaseId) -> float:
        """When the writer was last heard of, or the lease was granted."""
        with self._lock:
            return self._offers[lease_id].heard_at_s

    def lease_ids(self) -> set[LeaseId]:
        with self._lock:
            return set(self._offers)

    def done(
        self,
        message: transfer_pb2.TransferMessage,
        source_rank: int,
        done: transfer_pb2.TransferDone,
        error: str,
    ) -> None:
        """A source rank has reported to one of our ranks, which found `error` in what has come."""
        decision = self._decide(message, source_rank, done, error)
        # Before it is answered: whatever that leads to finds the table's event loop told already.
        if decision.outcome in (Outcome.ADMITTED, Outcome.WRONG):
            self._tell(decision)
        if decision.outcome in (Outcome.ADMITTED, Outcome.REPEATED):
            assert decision.lease is not None
            answer = self._new_message(message.lease_id, message.lease_epoch)
            answer.ack.SetInParent()
            self._send(decision.lease.writer.rank0_address, answer)
        elif decision.outcome is not Outcome.PARTIAL:
            log.error("lease %s: %s", message.lease_id, decision.reason)
            self._nack(message, done, decision.reason)

    def _nack(
        self,
        about: transfer_pb2.TransferMessage,
        done: transfer_pb2.TransferDone,
        reason: str,
    ) -> None:
        answer = self._new_message(about.lease_id, about.lease_epoch)
        answer.nack.reason = reason
        answer.nack.writer_worker_id = about.sender_worker_id
        answer.nack.writer_incarnation = about.sender_incarnation
        self._send(done.reply_to.transfer_address, answer)

    def _decide(
        self,
        message: transfer_pb2.TransferMessage,
        source_rank: int,
        done: transfer_pb2.TransferDone,
        error: str,
    ) -> Decision:
        with self._lock:
            offer = self._offers.get(LeaseId(message.lease_id))
            if offer is None or not is_from_writer(offer.lease, message):
                reason = "the lease is unknown, or names another writer"
                return Decision(None, Outcome.REFUSED, reason=reason)
            if offer.is_withdrawn:
                return Decision(offer.lease, Outcome.REFUSED, reason="the lease is fenced")
            if offer.is_admitted:
                return Decision(offer.lease, Outcome.REPEATED)
            wrong = error or self._mismatch(offer, source_rank, done)
            if wrong:
                offer.is_withdrawn = True
                return Decision(offer.lease, Outcome.WRONG, reason=wrong)
            offer.heard_at_s = self._now_s()
            return self._book(offer, source_rank, done)

    @staticmethod
    def _book(offer: _Offer, source_rank: int, done: transfer_pb2.TransferDone) -> Decision:
        offer.reported.add((source_rank, done.target_rank))
        if (source_rank, done.target_rank) == (0, 0):
            offer.first = _first_token(done)
        if len(offer.reported) < len(offer.expected):
            return Decision(offer.lease, Outcome.PARTIAL)
        assert offer.first is not None, "every done has come, but not the first token"
        offer.is_admitted = True
        return Decision(offer.lease, Outcome.ADMITTED, offer.first)

    def _mismatch(self, offer: _Offer, source_rank: int, done: transfer_pb2.TransferDone) -> str:
        """What a `done` says that is not as it must be; empty when all is."""
        if done.kv_fingerprint != self._fingerprint:
            return "the writer's kv_fingerprint is another"
        expected = offer.expected.get((source_rank, done.target_rank))
        if expected is None:
            return f"rank {source_rank} owes rank {done.target_rank} nothing"
        told = (done.num_source_ranks, done.num_blocks, done.num_bytes)
        if told != expected:
            return f"(ranks, blocks, bytes) are {told}, not {expected}"
        if not done.checksum_stride:
            return ""
        tables = [[b for b in table if b != NULL_BLOCK] for table in offer.lease.block_ids]
        if [list(g.block_ids) for g in done.groups] != tables:
            return "the checksums are of other blocks"
        return ""


def is_from_writer(lease: Lease, message: transfer_pb2.TransferMessage) -> bool:
    """The message is about this grant, and of this start of its named writer."""
    writer = lease.writer
    return (message.sender_worker_id, message.sender_incarnation, message.lease_epoch) == (
        writer.worker_id,
        writer.incarnation,
        lease.lease_epoch,
    )


def _first_token(done: transfer_pb2.TransferDone) -> FirstToken:
    logprobs = logprobs_from_proto(done.logprobs) if done.HasField("logprobs") else None
    return FirstToken(done.first_token, logprobs)
