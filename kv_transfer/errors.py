"""What can go wrong in a handoff.

TransferError
├── TransportError          libucp is missing or refused a call: this process cannot transfer
├── FingerprintError        the two workers' KV could differ: they never exchange any
├── LeaseError              the lease cannot be served
│   ├── LeaseFencedError    its owner has fenced it (tombstone): never served any more
│   ├── LeaseServedError    already being served: another router asked for it before
│   └── WrongWriterError    it names another writer, or another incarnation of this one
└── HandoffError            the handoff began and failed; nothing will be admitted for it
    ├── PeerLostError       the receiver, or one of its ranks, is gone
    ├── RankLostError       a rank of the writer is gone
    ├── FencedError         the receiver ordered the writer to stop
    ├── NackError           the receiver refuses the `done`
    ├── HandoffTimeoutError no acknowledgement in time: it may or may not have been admitted
    ├── PostFailedError     a put or a flush failed
    └── CancelledHandoffError  `cancel` was called while `finish` was waiting
"""

from __future__ import annotations

from typing import ClassVar


class TransferError(Exception):
    """Base of all."""


class TransportError(TransferError):
    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: libucp's status, if one of its calls failed."""
        super().__init__(message)
        self.status = status


class FingerprintError(TransferError):
    pass


class LeaseError(TransferError):
    pass


class LeaseFencedError(LeaseError):
    pass


class LeaseServedError(LeaseError):
    pass


class WrongWriterError(LeaseError):
    pass


class HandoffError(TransferError):
    """`reason` is what HandoffFailed carries on the wire."""

    reason: ClassVar[str] = "POST_FAILED"


class PeerLostError(HandoffError):
    reason = "PEER_LOST"


class RankLostError(HandoffError):
    reason = "RANK_LOST"


class FencedError(HandoffError):
    reason = "FENCED"


class NackError(HandoffError):
    reason = "NACK"


class HandoffTimeoutError(HandoffError):
    reason = "TIMEOUT"


class PostFailedError(HandoffError):
    reason = "POST_FAILED"


class CancelledHandoffError(HandoffError):
    reason = "CANCELLED"
