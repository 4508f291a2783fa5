"""Leases this worker has given: who may write which of its blocks, and until when.

A lease:
1. GRANTED: its named writer may write its blocks. Whatever is heard of the writer renews it;
2. every source rank has reported `done` for every rank it feeds, and all agrees: ADMITTED, and the
   writer gets `Ack`. A repeated `done` gets `Ack` again;
3. released, expired, failed, or its writer lost: QUARANTINED. The writer is told to stop (`Fence`);
   nothing is admitted any more (`Nack`), and nobody else may write the blocks;
4. the writer has provably stopped: the lease is forgotten and the listener told that its blocks are
   free. Never on a timeout.

What proves that a writer has stopped. Its `Drained`, on every transport. Over shared memory also
that all its processes are gone (`process.is_gone`): a put is a copy made by the writer's own
threads. For a writer on another machine or in another pid namespace only `Drained` counts here:
libucp does not tell when a TCP connection's receive queue is empty, nor does it revoke a registered
region or destroy a queue pair on its own; such a writer's blocks stay quarantined until it answers
or this worker ends. `num_quarantined_blocks` shows them.

Lives on rank 0's event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.v1 import transfer_pb2
from kv_transfer.clock import Clock, LoopClock, Timer
from kv_transfer.config import TransferConfig
from kv_transfer.layout import NULL_BLOCK, BlockId
from kv_transfer.lease import FirstToken, Lease, LeaseId, WorkerIdentity, logprobs_from_proto
from kv_transfer.mailbox import Event, PeerLost
from kv_transfer.process import ProcessIdentity, is_gone
from kv_transfer.rank import TransferRank
from kv_transfer.routes import RankPair, pairs

log = logging.getLogger(__name__)

_LONGEST_POLL_S = 1.0

ProcessIsGone = Callable[[ProcessIdentity], bool | None]


class LeaseState(enum.Enum):
    GRANTED = "granted"
    ADMITTED = "admitted"
    QUARANTINED = "quarantined"


class LeaseFailure(enum.Enum):
    EXPIRED = "nothing was heard of the writer in time"
    WRITER_LOST = "the writer's process is lost"
    WRITER_FAILED = "the writer gave up"
    CORRUPT = "what has arrived is not what was to come"


class LeaseListener(Protocol):
    """Owns the blocks. Called on the table's event loop."""

    def admitted(self, request_id: str, first: FirstToken) -> None:
        """All KV is here; the writer will touch it no more."""

    def failed(self, request_id: str, reason: LeaseFailure) -> None:
        """It will not be admitted: quarantine the blocks until `quiescent`."""

    def quiescent(self, request_id: str) -> None:
        """The writer has provably stopped: quarantined blocks may be freed."""


@dataclass
class _Entry:
    request_id: str
    lease: Lease
    deadline_s: float
    state: LeaseState = LeaseState.GRANTED
    reported: set[tuple[int, int]] = field(default_factory=set)  # (source rank, target rank)
    first: FirstToken | None = None
    timer: Timer | None = None
    num_polls: int = 0

    def writable(self) -> set[tuple[int, BlockId]]:
        """(group, block) of every block that its writer could still touch."""
        if self.state is LeaseState.ADMITTED:
            return set()
        return {
            (group, block)
            for group, table in enumerate(self.lease.block_ids)
            for block in table
            if block != NULL_BLOCK
        }


class LeaseTable:
    def __init__(
        self,
        rank: TransferRank,
        identity: WorkerIdentity,
        fingerprint: bytes,
        config: TransferConfig,
        listener: LeaseListener,
        clock: Clock | None = None,
        process_is_gone: ProcessIsGone = is_gone,
    ) -> None:
        """On the running event loop."""
        self._process_is_gone = process_is_gone
        self._rank, self._identity, self._fingerprint = rank, identity, fingerprint
        self._config, self._listener = config, listener
        loop = asyncio.get_running_loop()
        self._clock = clock or LoopClock(loop)
        self._layout = rank.region_layout.layout
        self._entries: dict[LeaseId, _Entry] = {}
        self._writable: dict[tuple[int, BlockId], LeaseId] = {}  # (group, block) -> its one lease
        self._epochs = itertools.count(1)
        rank.lease_mail.bind(loop.call_soon_threadsafe, self._handle)

    def grant(
        self,
        request_id: str,
        writer: WorkerIdentity,
        reserved: Sequence[Sequence[BlockId]],
        num_cached_tokens: int,
        deadline_s: float,
    ) -> Lease:
        """Let `writer` write these blocks (per layer group, the prompt's from `num_cached_tokens`
        on). It must be admitted within `deadline_s` seconds from now, however often it is renewed.
        """
        lease = Lease(
            lease_id=LeaseId(uuid.uuid4().hex),
            lease_epoch=next(self._epochs),
            owner=self._identity,
            writer=writer,
            kv_fingerprint=self._fingerprint,
            ranks=self._rank.rank_leases(),
            num_cached_tokens=num_cached_tokens,
            renew_within_s=self._config.renew_within_s,
            block_ids=tuple(tuple(table) for table in reserved),
        )
        entry = _Entry(request_id, lease, self._clock.now_s() + deadline_s)
        twice = entry.writable() & self._writable.keys()
        assert not twice, f"blocks of {request_id} are writable under another lease: {twice}"
        self._entries[lease.lease_id] = entry
        self._writable.update(dict.fromkeys(entry.writable(), lease.lease_id))
        for writer_rank in writer.ranks:  # so that its death is noticed
            self._rank.transport.connect(writer_rank.transfer_address)
        self._renew(entry)
        return lease

    def release(self, lease_id: LeaseId) -> bool:
        """The lease is no longer wanted. True: its writer may still write, so quarantine the blocks
        until `quiescent`. False: admitted, already quarantined, or unknown."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.state is not LeaseState.GRANTED:
            return False
        self._quarantine(entry)
        return True

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(
            len(e.writable()) for e in self._entries.values() if e.state is LeaseState.QUARANTINED
        )

    def state(self, lease_id: LeaseId) -> LeaseState | None:
        """None: never granted, or forgotten."""
        entry = self._entries.get(lease_id)
        return entry.state if entry else None

    def num_open_leases(self) -> int:
        """Leases whose writer may still write."""
        return sum(e.state is not LeaseState.ADMITTED for e in self._entries.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is writable by two, or a lease has no timer."""
        seen: dict[tuple[int, BlockId], LeaseId] = {}
        for entry in self._entries.values():
            assert entry.timer is not None, f"lease {entry.lease.lease_id} has no timer"
            for block in entry.writable():
                assert block not in seen, f"{block}: {seen[block]} and {entry.lease.lease_id}"
                seen[block] = entry.lease.lease_id
        assert seen == self._writable, f"writable {self._writable} differ from the leases' {seen}"

    # --- what arrives ----------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, PeerLost):
            self._writer_lost(event.address)
            return
        kind = event.WhichOneof("message")
        entry = self._entries.get(LeaseId(event.lease_id))
        if entry is None or not self._is_from_writer(entry.lease, event):
            if kind in ("rank_done", "done"):
                self._nack(event, "the lease is unknown, or names another writer")
            return
        if kind == "rank_done":
            self._done(entry, event)
        elif kind == "drained":
            self._drained(entry)
        elif entry.state is LeaseState.GRANTED and kind == "progress":
            self._renew(entry)
        elif entry.state is LeaseState.GRANTED and kind == "failed":
            log.info("lease %s: the writer gave up: %s", event.lease_id, event.failed.reason)
            self._fail(entry, LeaseFailure.WRITER_FAILED)

    @staticmethod
    def _is_from_writer(lease: Lease, message: transfer_pb2.TransferMessage) -> bool:
        writer = lease.writer
        return (message.sender_worker_id, message.sender_incarnation, message.lease_epoch) == (
            writer.worker_id,
            writer.incarnation,
            lease.lease_epoch,
        )

    def _done(self, entry: _Entry, message: transfer_pb2.TransferMessage) -> None:
        if entry.state is LeaseState.QUARANTINED:
            self._nack(message, "the lease is fenced")
            return
        if entry.state is LeaseState.ADMITTED:
            self._ack(entry.lease)
            return
        report = message.rank_done
        wrong = report.error or self._mismatch(entry, report)
        if wrong:
            log.error("lease %s: %s", entry.lease.lease_id, wrong)
            self._nack(message, wrong)
            self._fail(entry, LeaseFailure.CORRUPT)
            return
        entry.reported.add((report.source_rank, report.done.target_rank))
        if (report.source_rank, report.done.target_rank) == (0, 0):
            entry.first = _first_token(report.done)
        if len(entry.reported) < len(self._pairs(entry.lease)):
            self._renew(entry)
        else:
            self._admit(entry)

    def _mismatch(self, entry: _Entry, report: transfer_pb2.RankDone) -> str:
        """What a `done` says that is not as it must be; empty when all is."""
        done, lease = report.done, entry.lease
        if done.kv_fingerprint != self._fingerprint:
            return "the writer's kv_fingerprint is another"
        pair = RankPair(
            report.source_rank, lease.writer.tp_size, done.target_rank, self._identity.tp_size
        )
        expected = self._pairs(lease)
        if pair not in expected:
            return f"rank {report.source_rank} owes rank {done.target_rank} nothing"
        num_sources = sum(p.target_rank == done.target_rank for p in expected)
        groups = range(len(lease.block_ids))
        num_blocks = sum(lease.num_writable_blocks(g) for g in groups)
        num_bytes = sum(
            lease.num_writable_blocks(g) * pair.block_bytes(self._layout, g) for g in groups
        )
        told = (done.num_source_ranks, done.num_blocks, done.num_bytes)
        if told != (num_sources, num_blocks, num_bytes):
            return f"(ranks, blocks, bytes) are {told}, not {(num_sources, num_blocks, num_bytes)}"
        tables = [[b for b in table if b != NULL_BLOCK] for table in lease.block_ids]
        if done.checksum_stride and [list(g.block_ids) for g in done.groups] != tables:
            return "the checksums are of other blocks"
        return ""

    def _pairs(self, lease: Lease) -> tuple[RankPair, ...]:
        return pairs(self._layout, lease.writer.tp_size, self._identity.tp_size)

    def _writer_lost(self, address: bytes) -> None:
        for entry in list(self._entries.values()):
            if address not in (rank.transfer_address for rank in entry.lease.writer.ranks):
                continue
            if entry.state is LeaseState.GRANTED:
                self._fail(entry, LeaseFailure.WRITER_LOST)

    # --- what follows ----------------------------------------------------------------------------

    def _renew(self, entry: _Entry) -> None:
        now_s = self._clock.now_s()
        left_s = min(self._config.renew_within_s, entry.deadline_s - now_s)
        self._set_timer(entry, max(0.0, left_s))

    def _set_timer(self, entry: _Entry, delay_s: float) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer = self._clock.call_later(delay_s, lambda: self._timer(entry))

    def _timer(self, entry: _Entry) -> None:
        if entry.state is LeaseState.GRANTED:
            self._fail(entry, LeaseFailure.EXPIRED)
        elif entry.state is LeaseState.QUARANTINED:
            self._poll(entry)
        else:  # admitted long ago: a repeated `done` is no longer to be expected
            self._forget(entry)

    def _admit(self, entry: _Entry) -> None:
        assert entry.first is not None, "every done has come, but not the first token"
        self._end_writing(entry)
        entry.state = LeaseState.ADMITTED
        self._set_timer(entry, self._config.tombstone_s)
        # The answer first: what the listener does is not the writer's to wait for.
        self._ack(entry.lease)
        self._listener.admitted(entry.request_id, entry.first)

    def _fail(self, entry: _Entry, reason: LeaseFailure) -> None:
        # The listener first: the blocks are in quarantine before they can be found quiescent.
        log.info("lease %s of %s failed: %s", entry.lease.lease_id, entry.request_id, reason.value)
        entry.state = LeaseState.QUARANTINED
        self._listener.failed(entry.request_id, reason)
        self._quarantine(entry)

    def _quarantine(self, entry: _Entry) -> None:
        entry.state = LeaseState.QUARANTINED
        # The first poll comes with a timer, so that `quiescent` never precedes this call's return.
        self._fence(entry.lease)
        self._set_timer(entry, self._config.drain_poll_s)

    def _poll(self, entry: _Entry) -> None:
        """Is the writer gone? If not, tell it to stop again, ever more rarely."""
        if all(self._process_is_gone(rank.process) for rank in entry.lease.writer.ranks):
            self._quiescent(entry)
            return
        entry.num_polls += 1
        if entry.num_polls & (entry.num_polls - 1) == 0:
            self._fence(entry.lease)
        pause_s = self._config.drain_poll_s * 2 ** min(entry.num_polls, 20)
        self._set_timer(entry, min(_LONGEST_POLL_S, pause_s))

    def _drained(self, entry: _Entry) -> None:
        if entry.state is LeaseState.GRANTED:
            self._listener.failed(entry.request_id, LeaseFailure.WRITER_FAILED)
            entry.state = LeaseState.QUARANTINED
        if entry.state is LeaseState.QUARANTINED:
            self._quiescent(entry)

    def _quiescent(self, entry: _Entry) -> None:
        self._forget(entry)
        self._listener.quiescent(entry.request_id)

    def _forget(self, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        self._end_writing(entry)
        del self._entries[entry.lease.lease_id]

    def _end_writing(self, entry: _Entry) -> None:
        for block in entry.writable():
            del self._writable[block]

    # --- what is said ----------------------------------------------------------------------------

    def _ack(self, lease: Lease) -> None:
        message = self._rank.new_message(lease.lease_id, lease.lease_epoch)
        message.ack.SetInParent()
        self._rank.send(lease.writer.rank0_address, message)

    def _fence(self, lease: Lease) -> None:
        message = self._rank.new_message(lease.lease_id, lease.lease_epoch)
        message.fence.reply_to.CopyFrom(self._identity.ranks[0].to_proto())
        self._rank.send(lease.writer.rank0_address, message)

    def _nack(self, about: transfer_pb2.TransferMessage, reason: str) -> None:
        message = self._rank.new_message(about.lease_id, about.lease_epoch)
        message.nack.reason = reason
        message.nack.writer_worker_id = about.sender_worker_id
        message.nack.writer_incarnation = about.sender_incarnation
        self._rank.send(about.rank_done.done.reply_to.transfer_address, message)


def _first_token(done: transfer_pb2.TransferDone) -> FirstToken:
    logprobs = logprobs_from_proto(done.logprobs) if done.HasField("logprobs") else None
    return FirstToken(done.first_token, logprobs)
