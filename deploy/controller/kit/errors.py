"""What can go wrong between us and an API server.

KubeError
├── NotConfiguredError       no kubeconfig and no service account, or one that cannot be read
├── UnreachableError         no whole answer: refused, reset, silent; a write may have taken effect
├── WriteRefusedError        refused here, before anything was sent: this process may not write now
├── UnfitError               the same: what there is does not let it
└── StatusError              the API server's own answer, and what it said
    ├── BadRequestError      400
    ├── UnauthorizedError    401
    ├── ForbiddenError       403
    ├── NotFoundError        404
    ├── ConflictError        409: stale resourceVersion, precondition, another manager's field
    │   └── AlreadyExistsError
    ├── GoneError            410: the resourceVersion or the continue token is too old
    ├── InvalidError         422: `causes` name the fields
    ├── ThrottledError       429: `retry_after_s`
    └── ServerError          5xx
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cause:
    field: str
    """A path like `spec.replicas`; empty where the server named none."""
    reason: str
    message: str


class KubeError(Exception):
    """Base of all."""


class NotConfiguredError(KubeError):
    pass


class UnreachableError(KubeError):
    pass


class WriteRefusedError(KubeError):
    pass


class UnfitError(KubeError):
    pass


class StatusError(KubeError):
    """`code`: the HTTP status; `reason`: the server's word for it, such as `Conflict`;
    `retry_after_s`: how long the server wants to be left alone, None where it did not say."""

    def __init__(self, status: Mapping[str, Any], doing: str) -> None:
        """`status`: the fields of a `meta/v1 Status`, as far as they are there."""
        details = status.get("details") or {}
        self.code = int(status.get("code") or 0)
        self.reason = str(status.get("reason") or "")
        self.message = str(status.get("message") or self.reason or f"HTTP status {self.code}")
        self.retry_after_s: float | None = details.get("retryAfterSeconds") or None
        self.causes = tuple(
            Cause(cause.get("field", ""), cause.get("reason", ""), cause.get("message", ""))
            for cause in details.get("causes") or ()
        )
        super().__init__(f"{doing}: {self.message} ({self.code} {self.reason})")


class BadRequestError(StatusError):
    pass


class UnauthorizedError(StatusError):
    pass


class ForbiddenError(StatusError):
    pass


class NotFoundError(StatusError):
    pass


class ConflictError(StatusError):
    pass


class AlreadyExistsError(ConflictError):
    pass


class GoneError(StatusError):
    pass


class InvalidError(StatusError):
    pass


class ThrottledError(StatusError):
    pass


class ServerError(StatusError):
    pass


_BY_CODE: Mapping[int, type[StatusError]] = {
    400: BadRequestError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: ThrottledError,
}


def status_error(status: Mapping[str, Any], doing: str) -> StatusError:
    """The error that a Status stands for; `doing` says what was asked for."""
    code = int(status.get("code") or 0)
    if status.get("reason") == "AlreadyExists":
        return AlreadyExistsError(status, doing)
    if code >= 500:
        return ServerError(status, doing)
    return _BY_CODE.get(code, StatusError)(status, doing)


def each(parts: Iterable[Callable[[], object]]) -> list[KubeError]:
    """What failed: one that the API server refuses keeps no other from being done."""
    failed = []
    for part in parts:
        try:
            part()
        except KubeError as error:
            failed.append(error)
    return failed
