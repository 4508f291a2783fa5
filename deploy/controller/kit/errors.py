"""What can go wrong between us and an API server.

KubeError
├── NotConfiguredError       no kubeconfig and no service account, or one that cannot be read
├── UnreachableError         no whole answer: refused, reset, silent; a write may have taken effect
├── WriteRefusedError        refused here, before anything was sent: this process may not write now
└── StatusError              the API server's own answer, and its message
    ├── NotFoundError        404
    └── ConflictError        409: stale resourceVersion, precondition, another manager's field
        └── AlreadyExistsError
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class KubeError(Exception):
    """Base of all errors. Raised itself where the objects that exist do not allow a change."""


class NotConfiguredError(KubeError):
    pass


class UnreachableError(KubeError):
    pass


class WriteRefusedError(KubeError):
    pass


class StatusError(KubeError):
    """The API server's answer. `code`: the HTTP status; `reason`: the server's name for it, such as
    `Conflict`; `retry_after_s`: how long it wants to be left alone, None where it did not say."""

    def __init__(self, status: Mapping[str, Any], doing: str) -> None:
        """`status`: the fields of a `meta/v1 Status`, as far as they are there."""
        details = status.get("details") or {}
        self.code = int(status.get("code") or 0)
        self.reason = str(status.get("reason") or "")
        self.message = str(status.get("message") or self.reason or f"HTTP status {self.code}")
        self.retry_after_s: float | None = details.get("retryAfterSeconds") or None
        super().__init__(f"{doing}: {self.message} ({self.code} {self.reason})")


class NotFoundError(StatusError):
    pass


class ConflictError(StatusError):
    pass


class AlreadyExistsError(ConflictError):
    pass


_BY_CODE: Mapping[int, type[StatusError]] = {404: NotFoundError, 409: ConflictError}


def status_error(status: Mapping[str, Any], doing: str) -> StatusError:
    """Make the error that a Status stands for; `doing` says what was asked for."""
    if status.get("reason") == "AlreadyExists":
        return AlreadyExistsError(status, doing)
    return _BY_CODE.get(int(status.get("code") or 0), StatusError)(status, doing)


def each(parts: Iterable[Callable[[], object]]) -> list[KubeError]:
    """Run all parts and return what failed: a part that is refused does not stop the others."""
    failed = []
    for part in parts:
        try:
            part()
        except KubeError as error:
            failed.append(error)
    return failed
