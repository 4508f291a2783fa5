"""The errors Baton tells its callers, and the one table that maps them to gRPC and HTTP.

BatonError
├── InvalidRequestError    the caller's mistake; names the field
├── NotFoundError          unknown model, request or worker
├── AlreadyExistsError     a request_id used again with another body
├── OverloadedError        refused at admission; retry later
├── NoCapacityError        no worker can hold the request; retry later
├── DeadlineError          the request's own deadline passed
├── KvTransferError        the KV could not be moved, after retries
├── WorkerLostError        workers died more often than the retry budget allows
├── PoisonError            the request ran on two workers that died
├── NotResumableError      nothing is kept any more from which to resume
├── UnavailableError       no fleet, or the server is shutting down
└── ConfigError            a configuration file is wrong; names file, key and nearest valid key
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of all. `reason` is the ErrorInfo reason, `grpc_status` a grpc.StatusCode name."""

    reason: ClassVar[str] = "INTERNAL"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequestError(BatonError):
    reason, grpc_status, http_status = "INVALID_PROMPT", "INVALID_ARGUMENT", 400


class NotFoundError(BatonError):
    reason, grpc_status, http_status = "NOT_FOUND", "NOT_FOUND", 404


class AlreadyExistsError(BatonError):
    reason, grpc_status, http_status = "ALREADY_EXISTS", "ALREADY_EXISTS", 409


class OverloadedError(BatonError):
    reason, grpc_status, http_status = "OVERLOADED", "RESOURCE_EXHAUSTED", 429


class NoCapacityError(BatonError):
    reason, grpc_status, http_status = "NO_CAPACITY", "RESOURCE_EXHAUSTED", 503


class DeadlineError(BatonError):
    reason, grpc_status, http_status = "DEADLINE", "DEADLINE_EXCEEDED", 504


class KvTransferError(BatonError):
    reason, grpc_status, http_status = "KV_TRANSFER_FAILED", "UNAVAILABLE", 502


class WorkerLostError(BatonError):
    reason, grpc_status, http_status = "WORKER_LOST", "UNAVAILABLE", 502


class PoisonError(BatonError):
    reason, grpc_status, http_status = "POISON", "ABORTED", 500


class NotResumableError(BatonError):
    reason, grpc_status, http_status = "NOT_RESUMABLE", "FAILED_PRECONDITION", 410


class UnavailableError(BatonError):
    reason, grpc_status, http_status = "UNAVAILABLE", "UNAVAILABLE", 503


class ConfigError(BatonError):
    reason, grpc_status, http_status = "CONFIG", "INVALID_ARGUMENT", 400
