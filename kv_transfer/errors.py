"""What can go wrong in a handoff.

TransferError
├── TransportError          libucp is missing or refused a call: this process cannot transfer
├── FingerprintError        the two workers' KV could differ: they never exchange any
├── LeaseError              the lease cannot be served
│   ├── LeaseServedError    it is being served, over, or fenced by its owner: not served again
│   └── WrongWriterError    it names another writer, or another incarnation of this one
└── HandoffError            the handoff began and failed, for a `Reason`
"""

from __future__ import annotations

import enum


class TransferError(Exception):
    """Base of all errors of a transfer."""


class TransportError(TransferError):
    def __init__(self, message: str, status: int | None = None) -> None:
        """Note libucp's `status`, if one of its calls failed."""
        super().__init__(message)
        self.status = status


class FingerprintError(TransferError):
    pass


class LeaseError(TransferError):
    pass


class LeaseServedError(LeaseError):
    pass


class WrongWriterError(LeaseError):
    pass


class Reason(enum.Enum):
    """Why a handoff failed. HandoffFailed carries the name on the wire."""

    PEER_LOST = "the receiver, or one of its ranks, is gone"
    RANK_LOST = "a rank of the writer is gone"
    FENCED = "the receiver ordered the writer to stop"
    NACK = "the receiver refuses the `done`"
    TIMEOUT = "no acknowledgement in time: it may or may not have been admitted"
    POST_FAILED = "a put or a flush failed"
    CANCELLED = "`cancel` was called while `finish` was waiting"


class HandoffError(TransferError):
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.message}"
