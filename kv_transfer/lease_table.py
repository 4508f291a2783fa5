"""Leases that this worker has granted: who may write which of its blocks, and until when.

A lease:
1. GRANTED: its named writer may write its blocks. Every message of the writer renews it.
2. ADMITTED: every source rank has reported `done` for every rank it feeds, and the reports match
   the lease. `Admission` decides this on the progress thread and answers `Ack`.
3. QUARANTINED: the lease was released, expired or failed, or its writer is lost. The writer gets
   `Fence` and every later `done` gets `Nack`. No other writer may get the blocks.
4. Forgotten: the writer has provably stopped, and the listener gets `quiescent`. A timeout never
   leads here.

Three things prove that nothing of a writer's can land any more:
- Its `Drained`, on every transport, unless it says that a broken connection may still deliver.
- Where the writer writes the pool itself, as over shared memory: the end of all its processes
  (`process.is_gone`).
- Where its puts pass through this worker, as over TCP and RDMA: their revocation. Every rank closes
  the address that puts come to and opens another. This needs no word from the writer or about it,
  but it ends every other open lease of that kind too: these fail, and are retried.

Puts are revoked only for a writer that cannot answer: its connection or its processes are lost, or
its `Drained` says that puts can still land. One that is silent may only be stopped, and keeps its
blocks in quarantine. `num_quarantined_blocks` counts them.

Runs on rank 0's event loop. Not thread-safe, except for the `Admission` that it owns.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.clock import Clock, LoopClock, Timer
from baton.v1 import transfer_pb2
from kv_transfer.admission import (
    Admission,
    Decision,
    Event,
    PeerLost,
    Revoked,
    is_from_writer,
)
from kv_transfer.layout import NULL_BLOCK, BlockId
from kv_transfer.lease import FirstToken, Lease, LeaseId, RankAddress, WorkerIdentity
from kv_transfer.process import ProcessIdentity, is_gone
from kv_transfer.rank import TransferRank
from kv_transfer.routes import check_width

log = logging.getLogger(__name__)

_LONGEST_POLL_S = 1.0
_PATIENT_POLLS = 5  # 1.5 s by default: only the message connection may have broken
_ADMITTED_ACK_TIMEOUTS = 2  # how long a `done` may repeat: the writer waits for one, then drains

ProcessIsGone = Callable[[ProcessIdentity], bool | None]


class LeaseState(enum.Enum):
    GRANTED = "granted"
    ADMITTED = "admitted"
    QUARANTINED = "quarantined"


class LeaseFailure(enum.Enum):
    EXPIRED = "the writer did not renew the lease in time"
    WRITER_LOST = "the writer's process is lost"
    WRITER_FAILED = "the writer gave up"
    CORRUPT = "what arrived is not what the lease expects"
    REVOKED = "another writer was lost, and revoking its puts revoked this one's"


class LeaseListener(Protocol):
    """The owner of the blocks. Called on the table's event loop."""

    def admitted(self, request_id: str, first: FirstToken) -> None:
        """All KV has arrived; the writer will not touch it again."""

    def failed(
        self, request_id: str, reason: LeaseFailure, ended_by: FirstToken | None = None
    ) -> None:
        """The lease will not be admitted: quarantine the blocks until `quiescent`. `ended_by`: the
        first token if it ends the request, which is no error."""

    def quiescent(self, request_id: str) -> None:
        """The writer has provably stopped: the quarantined blocks may be freed."""


@dataclass
class _Entry:
    request_id: str
    lease: Lease
    deadline_s: float
    state: LeaseState = LeaseState.GRANTED
    timer: Timer | None = None
    num_polls: int = 0
    is_writer_lost: bool = False

    def writable(self) -> set[tuple[int, BlockId]]:
        """Return (group, block) of every block that its writer may still write."""
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
        fingerprint: bytes,
        listener: LeaseListener,
        clock: Clock | None = None,
        process_is_gone: ProcessIsGone = is_gone,
    ) -> None:
        """Must be called on the running event loop."""
        self._process_is_gone = process_is_gone
        self._rank, self._identity, self._config = rank, rank.identity, rank.config
        self._fingerprint, self._listener = fingerprint, listener
        loop = asyncio.get_running_loop()
        self._clock = clock or LoopClock(loop)
        self._admission = Admission(
            rank.region_layout.layout,
            self._identity.tp_size,
            fingerprint,
            rank.send,
            rank.new_message,
            rank.lease_mail.put,
            self._clock.now_s,
        )
        self._entries: dict[LeaseId, _Entry] = {}
        self._writable: dict[tuple[int, BlockId], LeaseId] = {}  # (group, block) -> its one lease
        self._epochs = itertools.count(1)
        self._revoke_again_at_s = 0.0
        rank.lease_mail.bind(loop.call_soon_threadsafe, self._handle)
        rank.admission = self._admission

    def grant(
        self,
        request_id: str,
        writer: WorkerIdentity,
        reserved: Sequence[Sequence[BlockId]],
        num_cached_tokens: int,
        deadline_s: float,
    ) -> Lease:
        """Let `writer` write the blocks `reserved`: per layer group, from `num_cached_tokens` on.

        The lease must be admitted within `deadline_s` seconds, however often it is renewed. Raises
        LeaseError, and grants nothing, if the heads cannot be divided among the writer's ranks.
        """
        check_width(self._rank.region_layout.layout, writer.tp_size)
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
        self._admission.offer(lease)
        self._entries[lease.lease_id] = entry
        self._writable.update(dict.fromkeys(entry.writable(), lease.lease_id))
        for writer_rank in writer.ranks:  # a connection notices the rank's death
            self._rank.transport.connect(writer_rank.transfer_address)
        self._renew(entry)
        return lease

    def release(self, lease_id: LeaseId) -> bool:
        """Give up a lease. True: its writer may still write, so the caller must quarantine the
        blocks until `quiescent`. False: admitted, already quarantined, or unknown."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.state is not LeaseState.GRANTED:
            return False
        self._admission.withdraw(lease_id)  # may be too late: `_decided` handles that
        self._quarantine(entry)
        return True

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(
            len(e.writable()) for e in self._entries.values() if e.state is LeaseState.QUARANTINED
        )

    def state(self, lease_id: LeaseId) -> LeaseState | None:
        """Return the state of a lease; None if it was never granted or is forgotten."""
        entry = self._entries.get(lease_id)
        return entry.state if entry else None

    def num_open_leases(self) -> int:
        """Number of leases whose writer may still write."""
        return sum(e.state is not LeaseState.ADMITTED for e in self._entries.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when two leases share a writable block, or one has no timer."""
        seen: dict[tuple[int, BlockId], LeaseId] = {}
        for entry in self._entries.values():
            assert entry.timer is not None, f"lease {entry.lease.lease_id} has no timer"
            for block in entry.writable():
                assert block not in seen, f"{block}: {seen[block]} and {entry.lease.lease_id}"
                seen[block] = entry.lease.lease_id
        assert self._admission.lease_ids() == self._entries.keys(), "leases offered and leases held"
        assert seen == self._writable, f"writable {self._writable} differ from the leases' {seen}"

    # --- what arrives ----------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, PeerLost):
            self._writer_lost(event.address)
        elif isinstance(event, Revoked):
            self._revoked()
        elif isinstance(event, Decision):
            self._decided(event)
        else:
            self._heard(event)

    def _heard(self, message: transfer_pb2.TransferMessage) -> None:
        entry = self._entries.get(LeaseId(message.lease_id))
        if entry is None or not is_from_writer(entry.lease, message):
            return
        kind = message.WhichOneof("message")
        if kind == "drained":
            self._drained(entry, message.drained.can_still_land)
        elif entry.state is LeaseState.GRANTED and kind == "failed":
            log.info("lease %s: the writer gave up: %s", message.lease_id, message.failed.reason)
            has_token = message.failed.HasField("ended_by")
            first = FirstToken.from_proto(message.failed.ended_by) if has_token else None
            self._fail(entry, LeaseFailure.WRITER_FAILED, first)

    def _decided(self, decision: Decision) -> None:
        """Apply a decision of `Admission`, which answers the writer itself."""
        entry = self._entries.get(decision.lease.lease_id)
        if entry is None:
            return
        if decision.first is None:
            if entry.state is LeaseState.GRANTED:
                self._fail(entry, LeaseFailure.CORRUPT)
        elif entry.state is LeaseState.GRANTED:
            self._admitted(entry, decision.first)
        else:  # released in the meantime, but its writer has finished: it writes no more
            self._quiescent(entry)

    def _writer_lost(self, address: bytes) -> None:
        for entry in list(self._entries.values()):
            if address not in (rank.transfer_address for rank in entry.lease.writer.ranks):
                continue
            entry.is_writer_lost = True
            if entry.state is LeaseState.GRANTED:
                self._fail(entry, LeaseFailure.WRITER_LOST)

    def _revoked(self) -> None:
        """End every lease that puts can no longer reach: a rank offers another put address only
        once its former one is closed."""
        offers = self._rank.rank_leases()
        for entry in list(self._entries.values()):
            ranks = zip(entry.lease.ranks, offers, strict=True)
            is_open = any(rank.put_address == offer.put_address for rank, offer in ranks)
            if is_open or not self._passes_through_here(entry):
                continue
            if entry.state is LeaseState.GRANTED:
                self._fail(entry, LeaseFailure.REVOKED)
            if entry.state is LeaseState.QUARANTINED:
                self._quiescent(entry)

    # --- what follows ----------------------------------------------------------------------------

    def _left_s(self, entry: _Entry) -> float:
        """Seconds until the lease expires, if its writer sends nothing more."""
        heard_at_s = self._admission.heard_at_s(entry.lease.lease_id)
        expires_at_s = min(heard_at_s + self._config.renew_within_s, entry.deadline_s)
        return expires_at_s - self._clock.now_s()

    def _renew(self, entry: _Entry) -> None:
        self._set_timer(entry, max(0.0, self._left_s(entry)))

    def _set_timer(self, entry: _Entry, delay_s: float) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer = self._clock.call_later(delay_s, lambda: self._timer(entry))

    def _timer(self, entry: _Entry) -> None:
        if entry.state is LeaseState.GRANTED and self._left_s(entry) > 0:
            self._renew(entry)
        elif entry.state is LeaseState.GRANTED:
            self._fail(entry, LeaseFailure.EXPIRED)
        elif entry.state is LeaseState.QUARANTINED:
            self._poll(entry)
        else:  # admitted long ago: no repeated `done` is expected any more
            self._forget(entry)

    def _admitted(self, entry: _Entry, first: FirstToken) -> None:
        self._end_writing(entry)
        entry.state = LeaseState.ADMITTED
        self._set_timer(entry, _ADMITTED_ACK_TIMEOUTS * self._config.ack_timeout_s)
        self._listener.admitted(entry.request_id, first)

    def _fail(
        self, entry: _Entry, reason: LeaseFailure, ended_by: FirstToken | None = None
    ) -> None:
        if not self._admission.withdraw(entry.lease.lease_id):
            return  # admitted a moment ago: `_decided` comes next
        # The listener first: it must quarantine the blocks before `quiescent` can come.
        fields = {"request_id": entry.request_id, "lease_id": entry.lease.lease_id}
        log.info("lease failed: %s", reason.value, extra={"fields": fields})
        entry.state = LeaseState.QUARANTINED
        self._listener.failed(entry.request_id, reason, ended_by)
        self._quarantine(entry)

    def _quarantine(self, entry: _Entry) -> None:
        entry.state = LeaseState.QUARANTINED
        # A timer makes the first poll, so that `quiescent` never comes before this call returns.
        self._fence(entry.lease)
        self._set_timer(entry, self._config.drain_poll_s)

    def _poll(self, entry: _Entry) -> None:
        """Check whether the writer is gone. If not, fence it again, at growing intervals."""
        if all(map(self._is_over, entry.lease.writer.ranks)):
            self._quiescent(entry)
            return
        entry.num_polls += 1
        if entry.num_polls & (entry.num_polls - 1) == 0:
            self._fence(entry.lease)
        if entry.num_polls > _PATIENT_POLLS and self._is_lost(entry):
            self._revoke()
        pause_s = self._config.drain_poll_s * 2 ** min(entry.num_polls, 20)
        self._set_timer(entry, min(_LONGEST_POLL_S, pause_s))

    def _is_over(self, writer: RankAddress) -> bool:
        """Whether no put of this writer's rank can land any more. All ranks of this worker use the
        same transports, so rank 0 answers for all."""
        return self._process_is_gone(writer.process) is True and (
            self._rank.transport.puts_end_with_process(writer.transfer_address)
        )

    def _is_lost(self, entry: _Entry) -> bool:
        """Whether only revocation can end the quarantine: the writer cannot answer."""
        gone = (self._process_is_gone(rank.process) for rank in entry.lease.writer.ranks)
        return self._passes_through_here(entry) and (entry.is_writer_lost or all(gone))

    def _passes_through_here(self, entry: _Entry) -> bool:
        ends = self._rank.transport.puts_end_with_revocation
        return all(ends(rank.transfer_address) for rank in entry.lease.writer.ranks)

    def _revoke(self) -> None:
        """Revoke puts at every rank, for all leases whose writers are lost; once in a while."""
        if self._clock.now_s() >= self._revoke_again_at_s:
            log.info("revoking all puts: a lost writer's may still arrive")
            self._revoke_again_at_s = self._clock.now_s() + _LONGEST_POLL_S
            self._rank.revoke_puts()

    def _drained(self, entry: _Entry, can_still_land: bool) -> None:
        if can_still_land:
            entry.is_writer_lost = True
            if entry.state is LeaseState.GRANTED:
                self._fail(entry, LeaseFailure.WRITER_FAILED)
            return
        if entry.state is LeaseState.GRANTED:
            if not self._admission.withdraw(entry.lease.lease_id):
                return  # as in `_fail`
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
        self._admission.forget(entry.lease.lease_id)
        del self._entries[entry.lease.lease_id]

    def _end_writing(self, entry: _Entry) -> None:
        for block in entry.writable():
            del self._writable[block]

    # --- what is said ----------------------------------------------------------------------------

    def _fence(self, lease: Lease) -> None:
        fence = transfer_pb2.TransferFence(reply_to=self._identity.ranks[0].to_proto())
        message = self._rank.new_message(lease.lease_id, lease.lease_epoch, fence=fence)
        self._rank.send(lease.writer.rank0_address, message)
