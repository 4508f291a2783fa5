"""One tensor-parallel rank's part in handoffs, sending and receiving: the `KvSink` of its engine.

A handoff on a rank of the writer:
1. `message`: rank 0's exporter has sent the lease to every rank. The rank computes its routes.
2. `layer_done`: the rank enqueues a layer's blocks to every target rank that needs them.
3. When all is pushed (and rank 0 knows the first token), the rank flushes every target.
4. After a target's flush the progress thread sends it `done`. After the last one the rank is
   drained and reports this to rank 0. Rank 0's own report waits for the receiver's answer, so that
   the event loop wakes once for both.
A cancel, a fence or a lost peer skips to 3 and sends no `done`. After a rank reports that it is
drained, nothing of the handoff is in flight or will be. The exception is `can_still_land`: a TCP
connection broke, and the kernel may still deliver what it has taken.

On the receiver, a rank verifies every `done` that it receives. Rank 0's `Admission` decides: ranks
above 0 report to it. All other messages go to the `LeaseTable` or the `Exporter` of rank 0.

Three threads call in here: engine, progress, rank 0's event loop. `_lock` guards the handoffs. It
is held briefly, and never while a callback runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from baton.config.transfer import TransferConfig
from baton.v1 import transfer_pb2
from kv_transfer.admission import Admission, Event, Mailbox, PeerLost, Revoked
from kv_transfer.errors import LeaseError
from kv_transfer.layout import BlockPush, HandoffId, RegionLayout
from kv_transfer.lease import (
    FirstToken,
    Lease,
    RankAddress,
    RankLease,
    WorkerIdentity,
    handoff_id,
    split_handoff_id,
)
from kv_transfer.process import own_identity
from kv_transfer.rank_handoff import (
    Lane,
    Phase,
    RankHandoff,
    Tombstones,
    add_checksums,
    fill_first_token,
    new_done,
    why_wrong,
)
from kv_transfer.routes import RankPair, Route, check_lease, pairs
from kv_transfer.transport import FlushResult, Peer, TransferMemory, Transport

log = logging.getLogger(__name__)


class TransferRank:
    """Own what one rank sends and receives. Starts the transport."""

    def __init__(
        self,
        transport: Transport,
        memory: TransferMemory,
        region_layout: RegionLayout,
        identity: WorkerIdentity,
        config: TransferConfig,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity` names every rank of this worker, and `region_layout` which one this is."""
        num_blocks = memory.blocks_per_region
        assert region_layout.num_blocks == num_blocks, (region_layout.num_blocks, num_blocks)
        self.transport, self.region_layout, self.identity = transport, region_layout, identity
        self.tp_rank, self.config = region_layout.tp_rank, config
        self.exporter_mail, self.lease_mail = Mailbox(), Mailbox()
        self.admission: Admission | None = None
        """Set on rank 0 of a worker that grants leases: every `done` is reported to it."""
        self._now_s, self._memory = now_s, memory
        self._lock = threading.Lock()
        self._handoffs: dict[HandoffId, RankHandoff] = {}
        self._tombstones = Tombstones(config.tombstone_s)
        self._can_still_land: set[HandoffId] = set()  # for ever: nothing here proves the opposite
        self._offers: dict[int, RankLease] = {}  # the memory of each rank that has reported it
        self._all_offered = threading.Event()
        self._handlers = self._handler_of_kind()
        transport.start(self._receive, self._peer_lost)
        self._offer()

    def _handler_of_kind(self) -> dict[str, Callable[[transfer_pb2.TransferMessage], None]]:
        """Message kind (the name of its field) -> handler."""
        return {
            "done": self._receive_done,
            "rank_done": self._receive_rank_done,
            "progress": self._receive_progress,
            "failed": self.lease_mail.put,
            "drained": self.lease_mail.put,
            "ack": self._receive_ack,
            "nack": self.exporter_mail.put,
            "fence": self.exporter_mail.put,
            "rank_drained": self.exporter_mail.put,
            "rank_cancel": self._receive_cancel,
            "rank_books_asked": lambda _: self._report_held(),
            "rank_books": self.exporter_mail.put,
            "rank_revoke": lambda _: self.transport.revoke_puts(self._offer),
            "rank_regions": lambda m: self._add_offer(RankLease.from_proto(m.rank_regions.lease)),
        }

    @staticmethod
    def address_of(transport: Transport, tp_rank: int) -> RankAddress:
        """Return this process as a rank of a `WorkerIdentity`."""
        return RankAddress(tp_rank, transport.address, own_identity())

    def wait_ready(self, timeout_s: float) -> bool:
        """On rank 0: wait until every rank has reported its memory. Blocks the thread."""
        return self._all_offered.wait(timeout_s)

    def rank_leases(self) -> tuple[RankLease, ...]:
        """On rank 0: the memory that each rank offers, in rank order."""
        assert self._all_offered.is_set(), "not every rank has reported its memory"
        return tuple(self._offers[rank] for rank in range(self.identity.tp_size))

    def revoke_puts(self) -> None:
        """On rank 0: close every rank's put address and open others. The lease mail gets `Revoked`
        for each."""
        self.transport.revoke_puts(self._offer)
        self._send_others(self.new_message(rank_revoke=transfer_pb2.RankRevoke()))

    def _offer(self) -> None:
        """Tell rank 0 what this rank offers."""
        mine = RankLease(self.tp_rank, self._memory.regions, self.transport.put_address)
        if self.tp_rank == 0:
            self._add_offer(mine)
            return
        regions = transfer_pb2.RankRegions(lease=mine.to_proto())
        self.send(self.identity.rank0_address, self.new_message(rank_regions=regions))

    def _add_offer(self, offer: RankLease) -> None:
        is_renewed = offer.tp_rank in self._offers
        self._offers[offer.tp_rank] = offer
        if is_renewed:
            self.lease_mail.put(Revoked())
        if len(self._offers) == self.identity.tp_size:
            self._all_offered.set()

    # --- the engine's thread: KvSink -------------------------------------------------------------

    def message(self, payload: bytes) -> None:
        """Take a lease to serve, as `Exporter.opening` encoded it."""
        opened = transfer_pb2.OpenHandoff.FromString(payload)
        lease = Lease.from_proto(opened.lease)
        handoff = RankHandoff(lease, self.region_layout.layout, {})
        try:
            handoff.lanes.update(self._lanes(lease))
        except LeaseError as error:
            handoff.error = str(error)
        with self._lock:
            if self._tombstones.holds(lease.handoff_id, self._now_s()):
                return  # cancelled before it began
            assert lease.handoff_id not in self._handoffs, lease.handoff_id
            self._handoffs[lease.handoff_id] = handoff
            self._flush_when_ready(handoff)

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        layout = self.region_layout.layout
        group = layout.group_of_layer(layer)
        is_first_layer = layer == layout.groups[group].first_layer
        with self._lock:
            for push in pushes:
                handoff = self._handoffs.get(push.handoff_id)
                if push.group != group or handoff is None or handoff.phase is not Phase.PUSHING:
                    continue
                try:
                    for lane, batch in handoff.layer_batches(layer, push):
                        self.transport.put(lane.peer, batch, partial(self._put_failed, handoff))
                        lane.has_put(batch, is_first_layer)
                except LeaseError as error:
                    handoff.error = str(error)
                self._flush_when_ready(handoff)

    def step_done(self) -> None:
        with self._lock:
            for handoff in self._handoffs.values():
                handoff.step_done()

    # --- rank 0's event loop: the exporter and the lease table -----------------------------------

    def check_lease(self, lease: Lease) -> None:
        """Raise LeaseError when the lease's memory or tables do not fit the layout."""
        check_lease(lease, self.region_layout, self._memory.regions)

    def finish(self, handoff: HandoffId, first: FirstToken) -> None:
        """Set the first token: rank 0 sends its `done` once all is pushed."""
        with self._lock:
            found = self._handoffs.get(handoff)
            if found is not None:
                found.first = first
                self._flush_when_ready(found)

    def cancel(self, handoff: HandoffId) -> None:
        """Stop on every rank. Each reports RankDrained, even for a handoff it never knew."""
        self._cancel(handoff)
        about = split_handoff_id(handoff)
        self._send_others(self.new_message(*about, rank_cancel=transfer_pb2.RankCancel()))

    def forget(self, handoff: HandoffId) -> None:
        """Drop a handoff that is over, and never open it (again)."""
        with self._lock:
            self._end(handoff)

    def is_over(self, handoff: HandoffId) -> bool:
        """Whether the handoff must not be opened (again)."""
        with self._lock:
            return self._tombstones.holds(handoff, self._now_s())

    def resend_done(self, handoff: HandoffId) -> None:
        """Resend this rank's `done` to each target that it was sent to."""
        with self._lock:
            found = self._handoffs.get(handoff)
            lanes = list(found.lanes.values()) if found is not None else []
        for lane in lanes:
            if lane.sent is not None:
                self.transport.send(self.transport.connect(lane.mail_address), lane.sent)

    def moved_at_s(self, handoff: HandoffId) -> float | None:
        """When bytes to its receiver, its own or earlier ones, last finished leaving; else None."""
        with self._lock:
            found = self._handoffs.get(handoff)
            return found.moved_at_s if found is not None else None

    def send_progress(self, lease: Lease) -> None:
        """Renew a lease at its owner."""
        progress = transfer_pb2.TransferProgress()
        message = self.new_message(lease.lease_id, lease.lease_epoch, progress=progress)
        self.send(lease.owner.rank0_address, message)

    def send(self, address: bytes, message: transfer_pb2.TransferMessage) -> None:
        self.transport.send(self.transport.connect(address), message.SerializeToString())

    def _send_others(self, message: transfer_pb2.TransferMessage) -> None:
        """On rank 0: send a message to every other rank of this worker."""
        for rank in self.identity.ranks[1:]:
            self.send(rank.transfer_address, message)

    def new_message(
        self, lease_id: str = "", lease_epoch: int = 0, **content: Any
    ) -> transfer_pb2.TransferMessage:
        """Make a message of this rank about a lease. `content`: one kind, by its field's name."""
        return transfer_pb2.TransferMessage(
            sender_worker_id=self.identity.worker_id,
            sender_incarnation=self.identity.incarnation,
            sender_rank=self.tp_rank,
            lease_id=lease_id,
            lease_epoch=lease_epoch,
            **content,
        )

    def num_open_handoffs(self) -> int:
        with self._lock:
            return len(self._handoffs)

    # --- inside: under the lock ------------------------------------------------------------------

    def _lanes(self, lease: Lease) -> dict[int, Lane]:
        layout, size = self.region_layout, len(lease.ranks)
        fed = [
            pair.target_rank
            for pair in pairs(layout.layout, layout.tp_size, size)
            if pair.source_rank == self.tp_rank
        ]
        lanes = {}
        for rank in fed:
            route = Route(layout, self._memory.regions, rank, size, lease.ranks[rank].regions)
            mail_address = lease.owner.ranks[rank].transfer_address
            self.transport.connect(mail_address)  # now, so that `done` need not wait for it
            peer = self.transport.connect(lease.ranks[rank].put_address)
            self.transport.prepare(peer, lease.ranks[rank].regions)
            lanes[rank] = Lane(peer, mail_address, route, self._done_message(lease, route.pair))
        return lanes

    def _flush_when_ready(self, handoff: RankHandoff) -> None:
        """Begin to flush once everything is pushed, or the handoff failed or was cancelled."""
        if handoff.phase is not Phase.PUSHING:
            return
        over = handoff.cancelled or handoff.error is not None
        complete = handoff.is_pushed and (self.tp_rank > 0 or handoff.first is not None)
        if not over and not complete:
            return
        handoff.phase = Phase.FLUSHING
        handoff.num_flushing = len(handoff.lanes)
        for rank, lane in handoff.lanes.items():
            if handoff.first is not None:
                fill_first_token(lane.done.done, handoff.first)
            self.transport.flush(lane.peer, partial(self._flushed, handoff, rank))
        if not handoff.lanes:
            self._drained(handoff)

    def _done_message(self, lease: Lease, pair: RankPair) -> transfer_pb2.TransferMessage:
        done = new_done(lease, pair, self.region_layout.layout, self.identity.ranks[0])
        return self.new_message(lease.lease_id, lease.lease_epoch, done=done)

    def _drained(self, handoff: RankHandoff) -> None:
        handoff.phase = Phase.DRAINED
        if self.tp_rank > 0 or handoff.cancelled or handoff.error is not None:
            self._end(handoff.lease.handoff_id)
        report = transfer_pb2.RankDrained(
            error=handoff.error or "",
            peer_lost=handoff.peer_lost,
            can_still_land=handoff.can_still_land,
            put_s=handoff.put_s,
        )
        if handoff.can_still_land:
            self._can_still_land.add(handoff.lease.handoff_id)
        about = handoff.lease.lease_id, handoff.lease.lease_epoch
        if not handoff.cancelled and handoff.error is None:
            sent = [lane.done.done for lane in handoff.lanes.values()]
            report.num_bytes = sum(done.num_bytes for done in sent)
            report.num_blocks = max((done.num_blocks for done in sent), default=0)
            if self.tp_rank == 0:
                handoff.report = self.new_message(*about, rank_drained=report)
                return
        self._report(self.new_message(*about, rank_drained=report))

    def _end(self, handoff: HandoffId) -> None:
        self._handoffs.pop(handoff, None)
        self._tombstones.bury(handoff, self._now_s())

    def _report(self, message: transfer_pb2.TransferMessage) -> None:
        """Send a message to this worker's rank 0."""
        if self.tp_rank == 0:
            self.exporter_mail.put(message)
        else:
            self.send(self.identity.rank0_address, message)

    # --- the progress thread ---------------------------------------------------------------------

    def _put_failed(self, handoff: RankHandoff, error: str) -> None:
        with self._lock:
            handoff.error = handoff.error or error
            self._flush_when_ready(handoff)

    def _flushed(self, handoff: RankHandoff, target_rank: int, result: FlushResult) -> None:
        lane = handoff.lanes[target_rank]
        with self._lock:
            handoff.put_s += result.busy_s
            if not result.is_over and handoff.has_pushed:
                handoff.can_still_land = True
            if result.error is None:
                self._moved(lane.peer)
            elif handoff.error is None:
                handoff.error = result.error
            sends = not handoff.cancelled and handoff.error is None
        if sends:
            # Outside the lock: checksums take time, and the blocks are pinned.
            if stride := self.config.checksum_stride:
                add_checksums(handoff, lane, self.region_layout, self._memory, stride)
            lane.sent = lane.done.SerializeToString()
            mail = self.transport.connect(lane.mail_address)
            self.transport.send(mail, lane.sent, expects_answer=self.tp_rank == 0)
        with self._lock:
            handoff.num_flushing -= 1
            if handoff.num_flushing == 0:
                self._drained(handoff)

    def _moved(self, peer: Peer) -> None:
        """Note that a flush to `peer` ended: the puts queued behind it are next."""
        for other in self._handoffs.values():
            lanes = other.lanes.values()
            if other.phase is Phase.FLUSHING and any(lane.peer is peer for lane in lanes):
                other.moved_at_s = self._now_s()

    def _cancel(self, handoff: HandoffId) -> None:
        with self._lock:
            found = self._handoffs.get(handoff)
            if found is not None and found.phase is not Phase.DRAINED:
                found.cancelled = True
                self._flush_when_ready(found)
                return
            self._end(handoff)
            report = transfer_pb2.RankDrained(can_still_land=handoff in self._can_still_land)
        self._report(self.new_message(*split_handoff_id(handoff), rank_drained=report))

    def _receive(self, payload: bytes) -> None:
        try:
            message = transfer_pb2.TransferMessage.FromString(payload)
        except DecodeError as error:
            log.error("cannot decode a transfer message of %d bytes: %s", len(payload), error)
            return
        handler = self._handlers.get(message.WhichOneof("message") or "")
        if handler is None:
            log.error("%s sent a transfer message of an unknown kind", message.sender_worker_id)
        else:
            handler(message)

    def _receive_progress(self, message: transfer_pb2.TransferMessage) -> None:
        """Take a writer's renewal."""
        if self.admission is not None:
            self.admission.heard(message)

    def _receive_done(self, message: transfer_pb2.TransferMessage) -> None:
        """Verify what arrived here, then let rank 0 decide: directly, or by a report to it."""
        error = why_wrong(message.done, message.sender_rank, self.region_layout, self._memory)
        if self.tp_rank == 0:
            self._decide(message, error)
            return
        report = transfer_pb2.RankDone(
            source_rank=message.sender_rank, done=message.done, error=error
        )
        message.rank_done.CopyFrom(report)  # the sender stays the writer: rank 0 checks it
        self.send(self.identity.rank0_address, message)

    def _receive_rank_done(self, message: transfer_pb2.TransferMessage) -> None:
        """On rank 0: take another rank's report about a `done`."""
        report = transfer_pb2.RankDone()
        report.CopyFrom(message.rank_done)
        message.sender_rank = report.source_rank
        message.done.CopyFrom(report.done)
        self._decide(message, report.error)

    def _decide(self, message: transfer_pb2.TransferMessage, error: str) -> None:
        if self.admission is None:
            log.error("%s sent a done, but this worker grants no leases", message.sender_worker_id)
        else:
            self.admission.done(message, error)

    def _receive_cancel(self, message: transfer_pb2.TransferMessage) -> None:
        self._cancel(handoff_id(message.lease_id, message.lease_epoch))

    def _report_held(self) -> None:
        with self._lock:  # so that a later RankDrained is also sent later
            books = transfer_pb2.RankBooks(handoffs=self._handoffs)
            self._report(self.new_message(rank_books=books))

    def _receive_ack(self, message: transfer_pb2.TransferMessage) -> None:
        """Take the receiver's `Ack`. Every `done` was sent, so this rank has drained."""
        events = [message]
        with self._lock:
            found = self._handoffs.get(handoff_id(message.lease_id, message.lease_epoch))
            if found is not None and found.report is not None:
                events.insert(0, found.report)
                found.report = None
        self.exporter_mail.put(*events)

    def _peer_lost(self, address: bytes) -> None:
        with self._lock:
            for handoff in list(self._handoffs.values()):
                if any(lane.leads_to(address) for lane in handoff.lanes.values()):
                    handoff.peer_lost = True
                    handoff.error = handoff.error or "lost the receiver"
                    self._flush_when_ready(handoff)
        event: Event = PeerLost(address)
        self.exporter_mail.put(event)
        self.lease_mail.put(event)
