"""Which `done` admits its lease, decided and answered on the progress thread.

The writer waits for the answer. Waking an event loop for it would cost more time than moving a
short prompt's bytes. The decision is one small step under a lock. The `LeaseTable` on the event
loop gets the decision through a `Mailbox` and does the rest: timers, the listener, quarantine.
Renewals are only recorded here; the lease's timer reads them.

So a lease may be admitted here before its table knows. `withdraw` decides who was first: after it,
a lease that was not admitted never will be.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.v1 import transfer_pb2
from kv_transfer.layout import NULL_BLOCK, KvLayout
from kv_transfer.lease import FirstToken, Lease, LeaseId, logprobs_from_proto
from kv_transfer.routes import pairs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """The end of a lease's time as GRANTED. `first` is None if what arrived is wrong."""

    lease: Lease
    first: FirstToken | None


@dataclass
class _Offer:
    """A lease that can be admitted until it is withdrawn."""

    lease: Lease
    heard_at_s: float
    expected: dict[tuple[int, int], tuple[int, int, int]]
    """(source rank, target rank) -> (source ranks, blocks, bytes) that its `done` must report"""
    reported: set[tuple[int, int]] = field(default_factory=set)
    first: FirstToken | None = None
    is_admitted: bool = False
    is_withdrawn: bool = False


class Admission:
    """Own what the source ranks reported for each lease. Any thread."""

    def __init__(
        self,
        layout: KvLayout,
        tp_size: int,
        fingerprint: bytes,
        send: Callable[[bytes, transfer_pb2.TransferMessage], None],
        new_message: Callable[..., transfer_pb2.TransferMessage],
        report: Callable[[Decision], None],
        now_s: Callable[[], float],
    ) -> None:
        """`new_message`: `TransferRank.new_message`. `report` gets each lease's decision."""
        self._now_s = now_s
        self._layout, self._tp_size, self._fingerprint = layout, tp_size, fingerprint
        self._send, self._new_message, self._report = send, new_message, report
        self._lock = threading.Lock()
        self._offers: dict[LeaseId, _Offer] = {}

    def offer(self, lease: Lease) -> None:
        """Let the lease be admitted from now on."""
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
        """Admit nothing under this lease any more. False: it is already admitted."""
        with self._lock:
            offer = self._offers[lease_id]
            offer.is_withdrawn = not offer.is_admitted
            return offer.is_withdrawn

    def forget(self, lease_id: LeaseId) -> None:
        with self._lock:
            del self._offers[lease_id]

    def heard(self, message: transfer_pb2.TransferMessage) -> None:
        """Record that the writer still serves the message's lease."""
        with self._lock:
            offer = self._offers.get(LeaseId(message.lease_id))
            if offer is not None and is_from_writer(offer.lease, message):
                offer.heard_at_s = self._now_s()

    def heard_at_s(self, lease_id: LeaseId) -> float:
        """Return the time of the writer's last message, or of the grant before the first."""
        with self._lock:
            return self._offers[lease_id].heard_at_s

    def lease_ids(self) -> set[LeaseId]:
        with self._lock:
            return set(self._offers)

    def done(self, message: transfer_pb2.TransferMessage, error: str) -> None:
        """Take a source rank's `done` to one of this worker's ranks. `error`: what that rank found
        wrong, or empty."""
        with self._lock:
            offer = self._offers.get(LeaseId(message.lease_id))
            if offer is None or not is_from_writer(offer.lease, message):
                refused, address = "the lease is unknown, or names another writer", b""
            else:
                was_open = not (offer.is_admitted or offer.is_withdrawn)
                refused = self._book(offer, message.sender_rank, message.done, error)
                # Before the answer, so that in the mailbox its consequences follow the decision.
                if was_open and (offer.is_admitted or offer.is_withdrawn):
                    self._report(Decision(offer.lease, None if refused else offer.first))
                if not (refused or offer.is_admitted):
                    return  # other ranks have yet to report
                address = offer.lease.writer.rank0_address
        about = message.lease_id, message.lease_epoch
        if not refused:
            self._send(address, self._new_message(*about, ack=transfer_pb2.TransferAck()))
            return
        log.error("lease %s: %s", message.lease_id, refused)
        nack = transfer_pb2.TransferNack(
            reason=refused,
            writer_worker_id=message.sender_worker_id,
            writer_incarnation=message.sender_incarnation,
        )
        address = message.done.reply_to.transfer_address
        self._send(address, self._new_message(*about, nack=nack))

    def _book(
        self, offer: _Offer, source_rank: int, done: transfer_pb2.TransferDone, error: str
    ) -> str:
        """Count a `done`, or return why it is refused."""
        if offer.is_withdrawn:
            return "the lease is fenced"
        if offer.is_admitted:
            return ""
        wrong = error or self._mismatch(offer, source_rank, done)
        if wrong:
            offer.is_withdrawn = True
            return wrong
        offer.heard_at_s = self._now_s()
        offer.reported.add((source_rank, done.target_rank))
        if (source_rank, done.target_rank) == (0, 0):
            offer.first = FirstToken(done.first_token, logprobs_from_proto(done.logprobs))
        if len(offer.reported) == len(offer.expected):
            assert offer.first is not None, "every done has come, but not the first token"
            offer.is_admitted = True
        return ""

    def _mismatch(self, offer: _Offer, source_rank: int, done: transfer_pb2.TransferDone) -> str:
        """Name the first mismatch between a `done` and its lease; empty if there is none."""
        if done.kv_fingerprint != self._fingerprint:
            return "the writer has another kv_fingerprint"
        expected = offer.expected.get((source_rank, done.target_rank))
        if expected is None:
            return f"rank {source_rank} has nothing to send to rank {done.target_rank}"
        sent = (done.num_source_ranks, done.num_blocks, done.num_bytes)
        if sent != expected:
            return f"done reports (ranks, blocks, bytes) {sent}, the lease expects {expected}"
        if not done.checksum_stride:
            return ""
        tables = [[b for b in table if b != NULL_BLOCK] for table in offer.lease.block_ids]
        if [list(g.block_ids) for g in done.groups] != tables:
            return "the checksums cover other blocks"
        return ""


def is_from_writer(lease: Lease, message: transfer_pb2.TransferMessage) -> bool:
    """Whether the message is about this grant and from this start of its named writer."""
    return lease.writer.sent(message) and message.lease_epoch == lease.lease_epoch


@dataclass(frozen=True)
class PeerLost:
    """The process at this transfer address can no longer be reached."""

    address: bytes


@dataclass(frozen=True)
class Revoked:
    """A rank of this worker offers another put address; nothing put to its former one can land."""


Event = transfer_pb2.TransferMessage | PeerLost | Revoked | Decision
Post = Callable[[Callable[[], None]], object]


class Mailbox:
    """Events for one reader on an event loop: one wake-up for all that have collected.

    Without a reader events are dropped. Ranks above 0 and workers of the other role never have a
    reader, and no peer knows rank 0's address before its reader is bound."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._reader: tuple[Post, Callable[[Event], None]] | None = None
        self._posted = False

    def bind(self, post: Post, handle: Callable[[Event], None]) -> None:
        """`post` runs a callback on the reader's thread (`loop.call_soon_threadsafe`)."""
        with self._lock:
            assert self._reader is None, "a mailbox has one reader"
            self._reader = (post, handle)

    @property
    def num_waiting(self) -> int:
        return len(self._events)

    def put(self, *events: Event) -> None:
        with self._lock:
            if self._reader is None:
                return
            self._events.extend(events)
            if self._posted:
                return
            self._posted = True
            post = self._reader[0]
        try:
            post(self._deliver)
        except RuntimeError:
            # The loop is closed: this process is ending and nothing reads any more.
            self._posted = False

    def _deliver(self) -> None:
        with self._lock:
            self._posted = False
            assert self._reader is not None
            handle = self._reader[1]
        try:
            for _ in range(len(self._events)):
                handle(self._events.popleft())
        finally:
            if self._events:  # one event failed: the loop reports it and handles the others next
                self.put()
