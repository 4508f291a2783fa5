"""Handoffs that this worker sends, seen from its rank 0.

A handoff:
1. `open`: the lease is checked. The engine tells the sink of every rank and computes, and the ranks
   push each layer as it finishes.
2. `finish`: the first token is known. The ranks flush and send `done`; the receiver answers `Ack`.
3. Or it breaks at any time: fenced, refused, peer lost, no answer in time, or cancelled. Every rank
   stops, and is told so until it has. Once all have drained, the receiver gets `Failed` and
   `Drained`.

A timer renews the lease while the handoff is open and the engine is well. A prompt that waits
behind others, or whose chunk takes long, is still being served. A hung or blocked engine renews
nothing, because its wait may never end. After `finish` the engine is not needed.

An ended handoff leaves a tombstone, and so does a lease that was fenced before it arrived. It can
never be opened (again), and a fence for it gets `Drained` at once. A broken handoff ends for its
caller after `ack_timeout_s` even if a rank has not answered. The receiver gets `Drained`, and
`wait_drained` returns, only when all ranks have drained.

Runs on rank 0's event loop. Not thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from baton.clock import Clock, LoopClock, Timer
from baton.v1 import transfer_pb2
from kv_transfer.admission import Event, PeerLost
from kv_transfer.errors import (
    FingerprintError,
    HandoffError,
    LeaseServedError,
    Reason,
    WrongWriterError,
)
from kv_transfer.layout import HandoffId
from kv_transfer.lease import FirstToken, Lease, Receipt, handoff_id
from kv_transfer.rank import TransferRank

log = logging.getLogger(__name__)

_RENEWALS = 3  # renewals per lease duration: one may be late or lost
_LONGEST_POLL_S = 1.0
_RESENDS = 4  # `done` messages within the timeout, until one is answered


class Exporter:
    def __init__(
        self,
        rank: TransferRank,
        fingerprint: bytes,
        engine_is_well: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        """Must be called on the running event loop.

        `engine_is_well`: the engine lives, and is neither hung nor blocked."""
        self._rank, self._identity, self._config = rank, rank.identity, rank.config
        self._fingerprint, self._engine_is_well = fingerprint, engine_is_well
        loop = asyncio.get_running_loop()
        self._clock = clock or LoopClock(loop)
        self._exports: dict[HandoffId, Export] = {}
        self.held_handoffs = HeldHandoffs(rank, self._exports)
        self._can_still_land: set[HandoffId] = set()  # their `Drained` says so
        self.on_broken: Callable[[HandoffId, HandoffError], None] | None = None
        """Called once when a handoff breaks, so that its computation can stop."""
        for other in self._identity.ranks[1:]:  # a connection notices the rank's death
            rank.transport.connect(other.transfer_address)
        rank.exporter_mail.bind(loop.call_soon_threadsafe, self._handle)

    def open(self, lease: Lease) -> HandoffId:
        """Begin to serve a lease. The caller gives its `opening` to the sink of every rank
        before anything is pushed, and must later call `finish` or `cancel`.

        Raises LeaseServedError, FingerprintError, WrongWriterError, or LeaseError if it does not
        fit this worker's layout.
        """
        self.check_unserved(lease)
        handoff = lease.handoff_id
        if lease.writer.start != self._identity.start:
            worker_id, start = lease.writer.start
            raise WrongWriterError(f"lease {lease.lease_id} is for {worker_id}, start {start}")
        if lease.kv_fingerprint != self._fingerprint:
            raise FingerprintError(
                f"{lease.owner.worker_id} has kv_fingerprint {lease.kv_fingerprint.hex()}, "
                f"{self._identity.worker_id} has {self._fingerprint.hex()}"
            )
        self._rank.check_lease(lease)
        export = self._exports[handoff] = Export(lease)
        # By a timer, so that the engine gets the prompt first.
        export.renewal = self._clock.call_later(0.0, lambda: self._renew(export))
        return handoff

    @staticmethod
    def opening(lease: Lease) -> bytes:
        """Encode what tells a rank's sink of the lease: `KvSink.message` takes it."""
        return transfer_pb2.OpenHandoff(lease=lease.to_proto()).SerializeToString()

    def check_unserved(self, lease: Lease) -> None:
        """Raise LeaseServedError for a lease that was asked for before, or fenced."""
        if self._rank.is_over(lease.handoff_id):
            raise LeaseServedError(f"lease {lease.lease_id} is fenced or over")
        if lease.handoff_id in self._exports:
            raise LeaseServedError(f"lease {lease.lease_id} is already being served")

    def _renew(self, export: Export) -> None:
        """Renew now and at intervals until the handoff is over."""
        if export.finishing_at_s is not None or self._engine_is_well():
            self._rank.send_progress(export.lease)
        export.renewal = self._clock.call_later(
            export.lease.renew_within_s / _RENEWALS, lambda: self._renew(export)
        )

    async def finish(self, handoff: HandoffId, first: FirstToken) -> Receipt:
        """Send `done` once all is pushed, and wait for the receiver's `Ack`.

        Raises HandoffError. Then every rank has drained, or `ack_timeout_s` more seconds have
        passed. That timeout counts from the first token, or from the last flush to the receiver if
        that was later.
        """
        export = self._exports.get(handoff)
        if export is None:
            raise HandoffError(Reason.CANCELLED, f"handoff {handoff} is over")
        assert export.finishing_at_s is None, f"handoff {handoff} is finished twice"
        export.finishing_at_s = self._clock.now_s()
        if export.error is None:
            self._rank.finish(handoff, first)
            self._await_ack(handoff, export)
        try:
            await export.over.wait()
        finally:
            if export.over.is_set():
                self._close(handoff, export)
        if export.error is not None:
            raise export.error
        return export.make_receipt()

    def _await_ack(self, handoff: HandoffId, export: Export, is_repeat: bool = False) -> None:
        """Repeat the `done` at intervals; break the handoff when nothing moves for too long."""
        assert export.finishing_at_s is not None
        timeout_s = self._config.ack_timeout_s
        since_s = self._rank.moved_at_s(handoff) or export.finishing_at_s
        left_s = since_s + timeout_s - self._clock.now_s()
        if left_s <= 0:
            self._break(handoff, Reason.TIMEOUT, f"no acknowledgement in {timeout_s:.3g} s")
            return

        if is_repeat:
            self._rank.resend_done(handoff)
        export.timer = self._clock.call_later(
            min(timeout_s / _RESENDS, left_s),
            lambda: self._await_ack(handoff, export, is_repeat=True),
        )

    async def cancel(self, handoff: HandoffId, ended_by: FirstToken | None = None) -> bool:
        """Stop a handoff. Returns when every rank has drained, or after `ack_timeout_s`.

        `ended_by`: the first token if it ends the request; the receiver gets it.

        False: not drained, and its blocks may still be read until `wait_drained` returns. A handoff
        that is over or unknown has drained.
        """
        export = self._exports.get(handoff)
        if export is None:
            return True
        if export.error is None:
            export.ended_by = ended_by
        self._break(handoff, Reason.CANCELLED, f"handoff {handoff} was cancelled")
        await export.over.wait()
        self._close(handoff, export)
        return export.all_drained.is_set()

    async def wait_drained(self, handoff: HandoffId) -> None:
        """Return once nothing of a handoff is in flight on any rank. Has no timeout."""
        export = self._exports.get(handoff)
        if export is not None:
            await export.all_drained.wait()

    def num_open(self) -> int:
        return len(self._exports)

    def check_integrity(self) -> None:
        """Raise AssertionError when a rank still holds a handoff that is not open here."""
        assert self._rank.num_open_handoffs() <= len(self._exports), (
            self._rank.num_open_handoffs(),
            list(self._exports),
        )

    # --- what arrives ----------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, PeerLost):
            self._peer_lost(event.address)
            return
        assert isinstance(event, transfer_pb2.TransferMessage), event
        kind = event.WhichOneof("message")
        handoff = handoff_id(event.lease_id, event.lease_epoch)
        if kind == "rank_books":
            self.held_handoffs.answered(event)
            return
        if kind == "fence":
            self._fenced(handoff, event)
            return
        export = self._exports.get(handoff)
        if export is None:
            return
        if kind == "rank_drained":
            self._rank_drained(handoff, export, event)
        elif not export.lease.owner.sent(event):
            log.warning("%s of handoff %s from %s", kind, handoff, event.sender_worker_id)
        elif kind == "ack":
            export.acked_at_s = self._clock.now_s()
            self._complete(handoff, export)
        elif kind == "nack":
            nack = event.nack  # not for another worker that had this address
            if (nack.writer_worker_id, nack.writer_incarnation) == self._identity.start:
                self._break(handoff, Reason.NACK, nack.reason)

    def _fenced(self, handoff: HandoffId, message: transfer_pb2.TransferMessage) -> None:
        export = self._exports.get(handoff)
        if export is None:
            self._rank.forget(handoff)
            self._send_drained(message.fence.reply_to.transfer_address, message)
        elif not export.lease.owner.sent(message):
            log.warning("fence of handoff %s from %s", handoff, message.sender_worker_id)
        elif export.over.is_set() and export.all_drained.is_set():
            self._send_drained(export.lease.owner.rank0_address, message)
        else:
            self._break(handoff, Reason.FENCED, f"lease {message.lease_id}")

    def _rank_drained(
        self, handoff: HandoffId, export: Export, message: transfer_pb2.TransferMessage
    ) -> None:
        report = message.rank_drained
        if not self._identity.sent(message):
            return
        export.drained.setdefault(message.sender_rank, report)
        if report.can_still_land:
            self._can_still_land.add(handoff)
        if report.error:
            reason = Reason.PEER_LOST if report.peer_lost else Reason.POST_FAILED
            self._break(handoff, reason, f"rank {message.sender_rank}: {report.error}")
        self._complete(handoff, export)

    def _peer_lost(self, address: bytes) -> None:
        own = address in (rank.transfer_address for rank in self._identity.ranks)
        for handoff, export in list(self._exports.items()):
            owner = export.lease.owner
            if own:
                self._break(handoff, Reason.RANK_LOST, "a rank of this worker")
            elif address in (rank.transfer_address for rank in owner.ranks):
                self._break(handoff, Reason.PEER_LOST, owner.worker_id)

    # --- what follows ----------------------------------------------------------------------------

    def _break(self, handoff: HandoffId, reason: Reason, message: str) -> None:
        """Stop a handoff on every rank. The first error is kept."""
        export = self._exports[handoff]
        if export.error is not None or export.over.is_set():
            return
        export.error = HandoffError(reason, message)
        export.stop_timers()
        export.timer = self._clock.call_later(
            self._config.ack_timeout_s, lambda: self._give_up_waiting(handoff, export)
        )
        self._cancel_until_drained(handoff, export, self._config.drain_poll_s)
        if self.on_broken is not None:
            self.on_broken(handoff, export.error)

    def _cancel_until_drained(self, handoff: HandoffId, export: Export, pause_s: float) -> None:
        """Cancel on every rank, at growing intervals: a message between ranks may be lost."""
        if export.all_drained.is_set():
            return
        self._rank.cancel(handoff)
        longer_s = min(_LONGEST_POLL_S, 2 * pause_s)
        self._clock.call_later(
            pause_s, lambda: self._cancel_until_drained(handoff, export, longer_s)
        )

    def _give_up_waiting(self, handoff: HandoffId, export: Export) -> None:
        """End the wait for a rank that does not answer. Its puts may still land, even if its
        process is gone: only the receiver knows which transport they used."""
        if not export.over.is_set():
            log.error("handoff %s: not every rank has drained", handoff)
            self._end(export)

    def _complete(self, handoff: HandoffId, export: Export) -> None:
        """Set the outcome once every rank has drained."""
        if len(export.drained) < self._identity.tp_size:
            return
        export.all_drained.set()
        if export.error is None:
            if export.acked_at_s is not None and not export.over.is_set():
                self._end(export)
            return
        if not export.owner_informed:
            export.owner_informed = True
            self._send_failed(export)
        self._end(export)
        if export.collected:
            self._exports.pop(handoff, None)

    def _end(self, export: Export) -> None:
        export.stop_timers()
        export.over.set()

    def _close(self, handoff: HandoffId, export: Export) -> None:
        export.stop_timers()
        export.collected = True
        if export.all_drained.is_set():
            self._rank.forget(handoff)
            self._exports.pop(handoff, None)

    # --- what is said ----------------------------------------------------------------------------

    def _send_failed(self, export: Export) -> None:
        lease = export.lease
        ended_by = None if export.ended_by is None else export.ended_by.to_proto()
        failed = transfer_pb2.TransferFailed(reason=str(export.error), ended_by=ended_by)
        message = self._rank.new_message(lease.lease_id, lease.lease_epoch, failed=failed)
        self._rank.send(lease.owner.rank0_address, message)
        self._send_drained(lease.owner.rank0_address, message)

    def _send_drained(self, address: bytes, about: transfer_pb2.TransferMessage) -> None:
        handoff = handoff_id(about.lease_id, about.lease_epoch)
        drained = transfer_pb2.TransferDrained(can_still_land=handoff in self._can_still_land)
        message = self._rank.new_message(about.lease_id, about.lease_epoch, drained=drained)
        self._rank.send(address, message)


@dataclass(eq=False)
class Export:
    """One handoff as rank 0 of the writer sees it. Only the exporter changes it."""

    lease: Lease
    drained: dict[int, transfer_pb2.RankDrained] = field(default_factory=dict)  # by rank
    all_drained: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all is acknowledged, or with the error that broke the handoff."""
    error: HandoffError | None = None
    acked_at_s: float | None = None
    finishing_at_s: float | None = None
    ended_by: FirstToken | None = None  # it ends the request, so no KV has to move
    owner_informed: bool = False  # the owner got `Failed` and `Drained`
    collected: bool = False  # the caller of `finish` or `cancel` has the outcome
    timer: Timer | None = None  # for the awaited answer: `Ack`, or the ranks' RankDrained
    renewal: Timer | None = None

    def stop_timers(self) -> None:
        for timer in (self.timer, self.renewal):
            if timer is not None:
                timer.cancel()

    def make_receipt(self) -> Receipt:
        """The receipt, once every rank has drained and `Ack` has arrived."""
        reports = self.drained.values()
        assert self.acked_at_s is not None
        assert self.finishing_at_s is not None
        return Receipt(
            num_bytes=sum(report.num_bytes for report in reports),
            num_blocks=max(report.num_blocks for report in reports),
            put_s=max(report.put_s for report in reports),
            exposed_s=self.acked_at_s - self.finishing_at_s,
        )


_ANSWER_S = 5.0


class HeldHandoffs:
    """Ask every rank above 0 which handoffs it holds. `open_here`: those open at rank 0.

    A rank drops a handoff before it reports that it has drained, and rank 0 keeps it until every
    rank has. Messages arrive in the order they were sent. So whenever rank 0 reads an answer, every
    handoff in it must be open at rank 0."""

    def __init__(self, rank: TransferRank, open_here: Container[HandoffId]) -> None:
        self._rank = rank
        self._open_here = open_here
        self._asking = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[str]] = {}  # by rank, to the newest question

    async def problems(self) -> list[str]:
        """One line per rank that holds a handoff not open here or does not answer in time."""
        others, loop = self._rank.identity.ranks[1:], asyncio.get_running_loop()
        question = self._rank.new_message(rank_books_asked=transfer_pb2.RankBooksAsked())
        async with self._asking:
            answers = self._answers = {other.tp_rank: loop.create_future() for other in others}
            for other in others:
                self._rank.send(other.transfer_address, question)
            if answers:
                await asyncio.wait(answers.values(), timeout=_ANSWER_S)
        found = []
        for rank, answer in answers.items():
            if not answer.done():
                found.append(f"rank {rank}: it did not answer within {_ANSWER_S:g} s")
            elif answer.result():
                found.append(f"rank {rank}: {answer.result()}")
        return found

    def answered(self, message: transfer_pb2.TransferMessage) -> None:
        """Check a rank's answer now, before a later message of the rank is read. It may be to an
        earlier question."""
        answer = self._answers.get(message.sender_rank)
        if not self._rank.identity.sent(message) or answer is None or answer.done():
            return
        strays = [h for h in message.rank_books.handoffs if h not in self._open_here]
        answer.set_result(f"it holds handoffs that are not open: {strays}" if strays else "")
