"""What has arrived at one rank of the receiver: a writer's `done` is verified, and then decided on.

Every rank verifies what was pushed to it; rank 0's `Admission` decides, which the other ranks
reach by telling their rank 0 what they have found. It hears of renewals too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton.v1 import transfer_pb2
from kv_transfer.admission import Admission
from kv_transfer.layout import RegionLayout
from kv_transfer.rank_done import why_wrong
from kv_transfer.transport import TransferMemory

log = logging.getLogger(__name__)


class RankArrivals:
    """Takes the messages of writers, and of this worker's other ranks, on the progress thread."""

    def __init__(
        self,
        region_layout: RegionLayout,
        memory: TransferMemory,
        rank0_address: bytes | None,
        send: Callable[[bytes, transfer_pb2.TransferMessage], None],
    ) -> None:
        """`rank0_address` is None on rank 0."""
        self.admission: Admission | None = None
        """On the rank 0 of a worker that gives leases: what a `done` is reported to."""
        self._region_layout, self._memory = region_layout, memory
        self._rank0_address, self._send = rank0_address, send

    def progress(self, message: transfer_pb2.TransferMessage) -> None:
        """A writer renews its lease."""
        if self.admission is not None:
            self.admission.heard(message)

    def done(self, message: transfer_pb2.TransferMessage) -> None:
        """Verify what has arrived here, then let rank 0 decide: this rank, or the one we tell."""
        done, source_rank = message.done, message.sender_rank
        error = why_wrong(done, source_rank, self._region_layout, self._memory)
        if self._rank0_address is None:
            self._decide(message, source_rank, done, error)
            return
        report = transfer_pb2.TransferMessage()
        report.CopyFrom(message)  # the sender stays the writer: rank 0 checks it
        report.rank_done.source_rank = source_rank
        report.rank_done.done.CopyFrom(done)
        report.rank_done.error = error
        self._send(self._rank0_address, report)

    def rank_done(self, message: transfer_pb2.TransferMessage) -> None:
        """On rank 0: another rank has verified what has arrived there."""
        report = message.rank_done
        self._decide(message, report.source_rank, report.done, report.error)

    def _decide(
        self,
        message: transfer_pb2.TransferMessage,
        source_rank: int,
        done: transfer_pb2.TransferDone,
        error: str,
    ) -> None:
        if self.admission is None:
            log.error("a done from %s, but nothing is leased here", message.sender_worker_id)
        else:
            self.admission.done(message, source_rank, done, error)
