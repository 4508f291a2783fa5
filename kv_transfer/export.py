"""One handoff as rank 0 of the writer sees it: who has drained, what is waited for, how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.v1 import transfer_pb2
from kv_transfer.clock import Timer
from kv_transfer.errors import HandoffError
from kv_transfer.lease import FirstToken, Lease, Receipt


@dataclass(eq=False)
class Export:
    """Owned by the exporter, and changed on its event loop only."""

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
