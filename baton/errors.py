"""Baton's errors, and the one table that maps them to gRPC.

BatonError
├── InvalidRequestError    the caller's mistake; names the field
├── NotFoundError          unknown model, request or worker
├── AlreadyExistsError     a request_id used again with another body
├── OverloadedError        refused at admission; retry later
├── NoCapacityError        no worker can hold the request, no machine the workers; retry later
├── DeadlineError          the request's own deadline passed
├── KvTransferError        the KV could not be moved, after retries
├── WorkerLostError        workers died more often than the retry budget allows
├── PoisonError            the request ran on two workers that died
├── InUseError             what is to go is still in use
├── NotResumableError      nothing is kept any more from which to resume
├── OtherModelError        a worker loaded another model than the cluster serves
├── UnauthenticatedError   no bearer token, or none that the router knows
├── PermissionDeniedError  the token is another tenant's; names the field
├── UnavailableError       no fleet, no answer
│   ├── ShuttingDownError  the router leaves; another one goes on with the request
│   └── HandshakeError     something listens, but no connection as wanted comes about: TLS
└── ConfigError            a configuration file is wrong; names file, key and nearest valid key
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar


class BatonError(Exception):
    """Base of all errors. `reason` is the ErrorInfo reason, `grpc_status` a grpc.StatusCode
    name."""

    reason: str = "INTERNAL"
    grpc_status: ClassVar[str] = "INTERNAL"
    kinds: ClassVar[Mapping[str, str]] = {}
    """Fields of a `GenerateRequest` that have a reason of their own."""

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        top = re.match(r"(?:request\.)?(\w*)", field or "")
        self.reason = self.kinds.get(top[1] if top else "", self.reason)
        self.retry_after_s = retry_after_s


class InvalidRequestError(BatonError):
    """The caller's mistake: INVALID_REQUEST, or the reason of its field's kind."""

    reason, grpc_status = "INVALID_REQUEST", "INVALID_ARGUMENT"
    kinds: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prompt", "text", "chat", "token_ids"), "INVALID_PROMPT"),
        **dict.fromkeys(("sampling", "seed", "stop", "stop_token_ids"), "INVALID_SAMPLING"),
        **dict.fromkeys(("bad_words", "allowed_token_ids"), "INVALID_SAMPLING"),
        **dict.fromkeys(("json_schema", "regex", "grammar", "choice"), "INVALID_CONSTRAINT"),
    }


class NotFoundError(BatonError):
    reason, grpc_status = "NOT_FOUND", "NOT_FOUND"


class AlreadyExistsError(BatonError):
    reason, grpc_status = "ALREADY_EXISTS", "ALREADY_EXISTS"


class OverloadedError(BatonError):
    reason, grpc_status = "OVERLOADED", "RESOURCE_EXHAUSTED"


class NoCapacityError(BatonError):
    reason, grpc_status = "NO_CAPACITY", "RESOURCE_EXHAUSTED"


class DeadlineError(BatonError):
    reason, grpc_status = "DEADLINE", "DEADLINE_EXCEEDED"


class KvTransferError(BatonError):
    reason, grpc_status = "KV_TRANSFER_FAILED", "UNAVAILABLE"


class WorkerLostError(BatonError):
    reason, grpc_status = "WORKER_LOST", "UNAVAILABLE"


class PoisonError(BatonError):
    reason, grpc_status = "POISON", "ABORTED"


class InUseError(BatonError):
    reason, grpc_status = "IN_USE", "FAILED_PRECONDITION"


class NotResumableError(BatonError):
    reason, grpc_status = "NOT_RESUMABLE", "FAILED_PRECONDITION"


class OtherModelError(BatonError):
    reason, grpc_status = "OTHER_MODEL", "FAILED_PRECONDITION"


class UnauthenticatedError(BatonError):
    reason, grpc_status = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDeniedError(BatonError):
    reason, grpc_status = "PERMISSION_DENIED", "PERMISSION_DENIED"


class UnavailableError(BatonError):
    reason, grpc_status = "UNAVAILABLE", "UNAVAILABLE"


class ShuttingDownError(UnavailableError):
    """The router leaves: on the wire an UnavailableError with a mark. `has_begun`: the request may
    run on at its workers, where the next router finds it."""

    def __init__(
        self,
        message: str,
        *,
        has_begun: bool,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.has_begun = has_begun


class HandshakeError(UnavailableError):
    reason = "HANDSHAKE"


class ConfigError(BatonError):
    reason, grpc_status = "CONFIG", "INVALID_ARGUMENT"
