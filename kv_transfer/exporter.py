"""Handoffs this worker sends, seen from its rank 0.

A handoff:
1. `open`: the lease is checked and delivered to the sink of every rank; the engine computes and the
   ranks push while layers finish;
2. `finish`: the first token is known. The ranks flush and send `done`; the receiver answers `Ack`;
3. or it breaks at any moment (fenced, refused, a peer lost, no answer in time, cancelled): every
   rank is told to stop, and once all have drained the receiver is told `Failed` and `Drained`.

While it is open its lease is renewed, by time, for as long as the engine is well: a prompt that
waits for others, or whose chunk takes long, is being served. A hung engine renews nothing, nor does
a blocked one, for nothing says that its wait ends. What is being finished needs no engine.

Either way the handoff is remembered by a tombstone, as is a lease that was fenced before it was
ever seen: it is never opened (again), and a fence for it is answered with `Drained` at once.
A handoff that broke ends for its caller after `ack_timeout_s` even when a rank has not answered;
the receiver is told `Drained`, and `wait_drained` returns, only when all really have.

Lives on rank 0's event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.config.transfer import TransferConfig
from baton.v1 import transfer_pb2
from kv_transfer.clock import Clock, LoopClock, Timer
from kv_transfer.errors import (
    CancelledHandoffError,
    FencedError,
    FingerprintError,
    HandoffError,
    HandoffTimeoutError,
    LeaseFencedError,
    LeaseServedError,
    NackError,
    PeerLostError,
    PostFailedError,
    RankLostError,
    WrongWriterError,
)
from kv_transfer.layout import HandoffId
from kv_transfer.lease import (
    FirstToken,
    FirstTokenLogprobs,
    Lease,
    LogprobsLike,
    Receipt,
    WorkerIdentity,
    handoff_id,
)
from kv_transfer.mailbox import Event, PeerLost
from kv_transfer.rank import TransferRank
from kv_transfer.rank_books import RankBooks
from kv_transfer.tombstones import Tombstones

log = logging.getLogger(__name__)

_RENEWALS = 3  # so often within the time that a lease lasts: one may be late, or lost
_RESENDS = 4  # a `done` is repeated this often within its timeout, until it is answered


class Exporter:
    def __init__(
        self,
        rank: TransferRank,
        identity: WorkerIdentity,
        fingerprint: bytes,
        config: TransferConfig,
        send_to_sinks: Callable[[bytes], None],
        engine_is_well: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        """On the running event loop. `send_to_sinks` delivers a payload to `KvSink.message` of
        every rank of this worker, before anything of a later `add_prefill`. `engine_is_well`:
        whether it lives, its step under way may still end, and it is not blocked."""
        self._rank, self._identity, self._fingerprint = rank, identity, fingerprint
        self._config, self._send_to_sinks = config, send_to_sinks
        self._engine_is_well = engine_is_well
        self._loop = asyncio.get_running_loop()
        self._clock = clock or LoopClock(self._loop)
        self._exports: dict[HandoffId, Export] = {}
        self.rank_books = RankBooks(rank, self._exports)
        self._tombstones = Tombstones(config.tombstone_s)
        self._can_still_land: set[HandoffId] = set()  # for good: `Drained` is never said of these
        self.on_broken: Callable[[HandoffId, HandoffError], None] | None = None
        """Told, once, when a handoff breaks: computing on for it is in vain."""
        for other in identity.ranks[1:]:  # so that their death is noticed
            rank.transport.connect(other.transfer_address)
        rank.exporter_mail.bind(self._loop.call_soon_threadsafe, self._handle)

    def open(self, lease: Lease) -> HandoffId:
        """Begin to serve a lease; `finish` or `cancel` must be called for it in the end.

        Raises LeaseFencedError when its owner has fenced it or it is over, LeaseServedError,
        FingerprintError, WrongWriterError, or LeaseError when it does not fit this worker's layout.
        """
        self.check_unserved(lease)
        handoff = lease.handoff_id
        named = (lease.writer.worker_id, lease.writer.incarnation)
        if named != (self._identity.worker_id, self._identity.incarnation):
            raise WrongWriterError(f"lease {lease.lease_id} is for {named[0]}, start {named[1]}")
        if lease.kv_fingerprint != self._fingerprint:
            raise FingerprintError(
                f"KV of {lease.owner.worker_id} ({lease.kv_fingerprint.hex()}) is not of the kind "
                f"of {self._identity.worker_id} ({self._fingerprint.hex()})"
            )
        self._rank.check_lease(lease)
        export = self._exports[handoff] = Export(lease)
        self._send_to_sinks(self._rank.open_payload(lease))
        # Not before the engine has the prompt, which comes next.
        export.renewal = self._clock.call_later(0.0, lambda: self._renew(export))
        return handoff

    def check_unserved(self, lease: Lease) -> None:
        """Raises LeaseFencedError or LeaseServedError for one that was asked for before."""
        if self._tombstones.holds(lease.handoff_id, self._clock.now_s()):
            raise LeaseFencedError(f"lease {lease.lease_id} is fenced or over")
        if lease.handoff_id in self._exports:
            raise LeaseServedError(f"lease {lease.lease_id} is being served already")

    def _renew(self, export: Export) -> None:
        """Now and from time to time, until the handoff is over."""
        if export.finishing_at_s is not None or self._engine_is_well():
            self._rank.send_progress(export.lease)
        export.renewal = self._clock.call_later(
            export.lease.renew_within_s / _RENEWALS, lambda: self._renew(export)
        )

    async def finish(
        self,
        handoff: HandoffId,
        first_token: int,
        logprobs: LogprobsLike | None,
        timeout_s: float | None = None,
    ) -> Receipt:
        """Send `done` once all is pushed and wait for the receiver's `Ack`.

        Raises PeerLostError, RankLostError, FencedError, NackError, HandoffTimeoutError
        (`timeout_s`, or the configured one, since the later of the first token and the last flush
        to the receiver that it waited for), PostFailedError or CancelledHandoffError; then it has
        drained on every rank, or `ack_timeout_s` more have passed.
        """
        export = self._exports.get(handoff)
        if export is None:
            raise CancelledHandoffError(f"handoff {handoff} is over")
        assert export.finishing_at_s is None, f"handoff {handoff} is finished twice"
        export.finishing_at_s = self._clock.now_s()
        if export.error is None:
            self._begin_finish(handoff, export, first_token, logprobs, timeout_s)
        try:
            await export.over.wait()
        finally:
            if export.over.is_set():
                self._close(handoff, export)
        if export.receipt is None:
            assert export.error is not None
            raise export.error
        return export.receipt

    def _begin_finish(
        self,
        handoff: HandoffId,
        export: Export,
        first_token: int,
        logprobs: LogprobsLike | None,
        timeout_s: float | None,
    ) -> None:
        kept = None
        if logprobs is not None:
            kept = FirstTokenLogprobs(logprobs.logprob, logprobs.rank, logprobs.top)
        self._rank.finish(handoff, FirstToken(first_token, kept))
        timeout_s = self._config.ack_timeout_s if timeout_s is None else timeout_s
        self._await_ack(handoff, export, timeout_s)

    def _await_ack(
        self, handoff: HandoffId, export: Export, timeout_s: float, is_repeat: bool = False
    ) -> None:
        """Repeat the `done` from time to time, until nothing has moved for too long."""
        assert export.finishing_at_s is not None
        since_s = self._rank.moved_at_s(handoff) or export.finishing_at_s
        left_s = since_s + timeout_s - self._clock.now_s()
        if left_s <= 0:
            error = HandoffTimeoutError(f"no acknowledgement in {timeout_s:.3g} s")
            self._break(handoff, error)
            return

        if is_repeat:
            self._rank.resend_done(handoff)
        export.timer = self._clock.call_later(
            min(timeout_s / _RESENDS, left_s),
            lambda: self._await_ack(handoff, export, timeout_s, is_repeat=True),
        )

    async def cancel(self, handoff: HandoffId, ended_by: FirstToken | None = None) -> bool:
        """Stop a handoff; returns when it has drained on every rank, or after `ack_timeout_s`.

        `ended_by`: the first token, where it ends the request; the receiver is told it.

        False: it has not drained, and its blocks may still be read until `wait_drained` returns.
        One that is over or unknown is drained already.
        """
        export = self._exports.get(handoff)
        if export is None:
            return True
        if export.error is None:
            export.ended_by = ended_by
        self._break(handoff, CancelledHandoffError(f"handoff {handoff} was cancelled"))
        await export.over.wait()
        self._close(handoff, export)
        return self._is_drained(export)

    async def wait_drained(self, handoff: HandoffId) -> None:
        """Return once nothing of a handoff is in flight on any rank, however long that takes."""
        export = self._exports.get(handoff)
        if export is not None:
            await export.all_drained.wait()

    def error(self, handoff: HandoffId) -> HandoffError | None:
        """What broke an open handoff, if anything has."""
        export = self._exports.get(handoff)
        return export.error if export is not None else None

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
            self.rank_books.told(event)
            return
        if kind == "fence":
            self._fenced(handoff, event)
            return
        export = self._exports.get(handoff)
        if export is None:
            return
        if kind == "rank_drained":
            self._rank_drained(handoff, export, event)
        elif not export.is_from_owner(event):
            log.warning("%s of handoff %s from %s", kind, handoff, event.sender_worker_id)
        elif kind == "ack":
            export.acked_at_s = self._clock.now_s()
            self._settle(handoff, export)
        elif kind == "nack" and self._is_own(event.nack):
            self._break(handoff, NackError(event.nack.reason))

    def _is_own(self, nack: transfer_pb2.TransferNack) -> bool:
        """Not an answer to somebody who used our name or address."""
        return (nack.writer_worker_id, nack.writer_incarnation) == (
            self._identity.worker_id,
            self._identity.incarnation,
        )

    def _fenced(self, handoff: HandoffId, message: transfer_pb2.TransferMessage) -> None:
        export = self._exports.get(handoff)
        if export is None:
            self._tombstones.bury(handoff, self._clock.now_s())
            self._tell_drained(message.fence.reply_to.transfer_address, message)
        elif not export.is_from_owner(message):
            log.warning("fence of handoff %s from %s", handoff, message.sender_worker_id)
        elif export.over.is_set() and self._is_drained(export):
            self._tell_drained(export.lease.owner.rank0_address, message)
        else:
            self._break(handoff, FencedError(f"lease {message.lease_id} was fenced by its owner"))

    def _rank_drained(
        self, handoff: HandoffId, export: Export, message: transfer_pb2.TransferMessage
    ) -> None:
        report = message.rank_drained
        if message.sender_worker_id != self._identity.worker_id:
            return
        export.drained.setdefault(message.sender_rank, report)
        if report.can_still_land:
            self._can_still_land.add(handoff)
        if report.error:
            kind = PeerLostError if report.peer_lost else PostFailedError
            self._break(handoff, kind(f"rank {message.sender_rank}: {report.error}"))
        self._settle(handoff, export)

    def _peer_lost(self, address: bytes) -> None:
        own = address in (rank.transfer_address for rank in self._identity.ranks)
        for handoff, export in list(self._exports.items()):
            owner = export.lease.owner
            if own:
                self._break(handoff, RankLostError("a rank of this worker is lost"))
            elif address in (rank.transfer_address for rank in owner.ranks):
                self._break(handoff, PeerLostError(f"{owner.worker_id} is lost"))

    # --- what follows ----------------------------------------------------------------------------

    def _break(self, handoff: HandoffId, error: HandoffError) -> None:
        """The handoff will not succeed: stop every rank. The first reason stands."""
        export = self._exports[handoff]
        if export.error is not None or export.over.is_set():
            return
        export.error = error
        export.stop_timers()
        export.timer = self._clock.call_later(
            self._config.ack_timeout_s, lambda: self._give_up_waiting(handoff, export)
        )
        self._rank.cancel(handoff)
        if self.on_broken is not None:
            self.on_broken(handoff, error)

    def _give_up_waiting(self, handoff: HandoffId, export: Export) -> None:
        """A rank does not answer. What it has put can land yet, even if its process is gone: only
        the receiver knows over what it came."""
        if not export.over.is_set():
            log.error("handoff %s: not every rank has drained", handoff)
            self._end(export)

    def _is_drained(self, export: Export) -> bool:
        return len(export.drained) == self._identity.tp_size

    def _settle(self, handoff: HandoffId, export: Export) -> None:
        """Give the outcome once every rank has drained."""
        if not self._is_drained(export):
            return
        export.all_drained.set()
        if export.error is None:
            if export.acked_at_s is not None and not export.over.is_set():
                export.receipt = export.make_receipt()
                self._end(export)
            return
        if not export.owner_told:
            export.owner_told = True
            self._tell_failed(export)
        self._end(export)
        if export.collected:
            self._exports.pop(handoff, None)

    def _end(self, export: Export) -> None:
        export.stop_timers()
        export.over.set()

    def _close(self, handoff: HandoffId, export: Export) -> None:
        export.stop_timers()
        export.collected = True
        self._tombstones.bury(handoff, self._clock.now_s())
        self._rank.forget(handoff)
        if self._is_drained(export):
            self._exports.pop(handoff, None)

    # --- what is said ----------------------------------------------------------------------------

    def _tell_failed(self, export: Export) -> None:
        lease = export.lease
        message = self._rank.new_message(lease.lease_id, lease.lease_epoch)
        assert export.error is not None
        message.failed.reason = f"{export.error.reason}: {export.error}"
        if export.ended_by is not None:
            message.failed.ended_by.CopyFrom(export.ended_by.to_proto())
        self._rank.send(lease.owner.rank0_address, message)
        self._tell_drained(lease.owner.rank0_address, message)

    def _tell_drained(self, address: bytes, about: transfer_pb2.TransferMessage) -> None:
        if handoff_id(about.lease_id, about.lease_epoch) in self._can_still_land:
            return
        message = self._rank.new_message(about.lease_id, about.lease_epoch)
        message.drained.SetInParent()
        self._rank.send(address, message)


@dataclass(eq=False)
class Export:
    """One handoff as rank 0 of the writer sees it: who has drained, what is awaited, how it ends.

    Owned by the exporter, and changed on its event loop only."""

    lease: Lease
    drained: dict[int, transfer_pb2.RankDrained] = field(default_factory=dict)  # by rank
    all_drained: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """With a receipt, or the error that broke it."""
    receipt: Receipt | None = None
    error: HandoffError | None = None
    acked_at_s: float | None = None
    finishing_at_s: float | None = None
    ended_by: FirstToken | None = None  # so nothing has to move
    owner_told: bool = False  # that it failed and has drained
    collected: bool = False  # the caller of `finish` or `cancel` has its outcome
    timer: Timer | None = None  # of the answer that is waited for: `Ack`, or that ranks drained
    renewal: Timer | None = None

    def stop_timers(self) -> None:
        for timer in (self.timer, self.renewal):
            if timer is not None:
                timer.cancel()

    def is_from_owner(self, message: transfer_pb2.TransferMessage) -> bool:
        """The message is of this start of the worker that gave the lease."""
        owner = self.lease.owner
        return (message.sender_worker_id, message.sender_incarnation) == (
            owner.worker_id,
            owner.incarnation,
        )

    def make_receipt(self) -> Receipt:
        """What was moved and how long it took, once every rank has drained and `Ack` has come."""
        reports = self.drained.values()
        assert self.acked_at_s is not None
        assert self.finishing_at_s is not None
        return Receipt(
            num_bytes=sum(report.num_bytes for report in reports),
            num_blocks=max(report.num_blocks for report in reports),
            put_s=max(report.put_s for report in reports),
            exposed_s=self.acked_at_s - self.finishing_at_s,
        )
