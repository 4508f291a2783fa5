"""Baton's errors as gRPC statuses, and back: google.rpc details beside code and message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from baton import errors
from baton.errors import BatonError

T = TypeVar("T")

DOMAIN = "baton.dev"
DETAILS_KEY = "grpc-status-details-bin"
_MAX_ERROR_BYTES = 500
# In the ErrorInfo of a router that shuts down: whether it has begun the request. The reason is
# UNAVAILABLE, so every client tries another router.
_SHUTTING_DOWN, _BEGUN, _NOT_BEGUN = "shutting_down", "begun", "not_begun"

_BY_REASON: dict[str, type[BatonError]] = {
    kind.reason: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BatonError) and "reason" in vars(kind)
}
_BY_REASON |= {reason: kind for kind in _BY_REASON.values() for reason in kind.kinds.values()}
# For servers and proxies that send no details.
_BY_CODE: dict[grpc.StatusCode, type[BatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.NotResumableError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
}


_NEVER_CONNECTED = ("failed to connect", "errors resolving", "dns resolution failed")
# Why a connection fails although something listens: signs in gRPC's messages, and their meaning.
_HANDSHAKES = {
    "certificate_verify_failed: ": "its certificate is not trusted",
    "certificate signature failure": "its certificate is not trusted",
    "hostname verification check failed": "its certificate is of another name",
    "wrong_version_number": "it speaks no TLS",
    "handshake failed": "the TLS handshake failed",
    "socket closed": "it ends the connection at once: it may want TLS, or a client's certificate",
}


class RpcFailure(Protocol):
    """A grpc.RpcError with these methods, as sync and asyncio calls raise it, or a LinkError."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class CallEnds(Protocol):
    """What a handler ends its call with: gRPC's servicer context, or the link's."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = ...,
        trailing_metadata: Any = ...,
    ) -> NoReturn: ...


def status_code(error: BatonError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_status]


def status_metadata(error: BatonError) -> tuple[tuple[str, bytes], ...]:
    """Make trailing metadata that carry ErrorInfo, the field at fault and when to retry."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, errors.ShuttingDownError):
        info.metadata[_SHUTTING_DOWN] = _BEGUN if error.has_begun else _NOT_BEGUN
    details = [info]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=status_code(error).value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return ((DETAILS_KEY, status.SerializeToString()),)


def shortened(error: BatonError) -> BatonError:
    """Return the error with a message that is short enough for metadata."""
    message = error.message.encode()
    if len(message) > _MAX_ERROR_BYTES:  # it quotes what the client sent
        error.message = f"{message[:_MAX_ERROR_BYTES].decode(errors='ignore')}..."
    return error


async def abort(context: CallEnds, error: BatonError) -> NoReturn:
    """End a call with the error's status and details."""
    shortened(error)
    await context.abort(status_code(error), error.message, status_metadata(error))
    raise AssertionError("abort returned")


async def first_message(
    requests: AsyncIterator[T], timeout_s: float, context: CallEnds
) -> T | None:
    """Read the first message of a caller's stream; None when it ends without one.

    After `timeout_s` without a message the call ends with a DeadlineError.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(aiter(requests), None)
    except TimeoutError:
        await abort(context, errors.DeadlineError(f"no first message within {timeout_s:g} s"))


def from_rpc_error(failure: RpcFailure, address: str = "the address") -> BatonError:
    """Make the typed error behind a failed call to `address`."""
    message = failure.details() or failure.code().name
    if is_never_connected(failure):
        if problem := _handshake_problem(message):
            return errors.HandshakeError(f"no connection to what listens at {address}: {problem}")
        return errors.UnavailableError(f"nothing listens at {address}")
    detailed = _from_details(failure, message)
    if detailed is not None:
        return detailed
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.UnavailableError(f"what listens at {address} is another service")
    if _is_too_large(failure):
        return errors.InvalidRequestError(f"the message is too large: {message}")
    return _BY_CODE.get(failure.code(), BatonError)(message)


def is_connection_lost(failure: RpcFailure) -> bool:
    """Tell whether the call broke under way, rather than being answered by a Baton router."""
    return failure.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    ) and not _status_details(failure)


def is_never_connected(failure: RpcFailure) -> bool:
    """Tell whether nothing listened at the address, or its name is unknown."""
    text = (failure.details() or "").lower()
    return is_connection_lost(failure) and any(sign in text for sign in _NEVER_CONNECTED)


def is_out_of_time(failure: RpcFailure) -> bool:
    """Tell whether the call's own timeout ended it, rather than a Baton server."""
    return failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not _status_details(failure)


def _status_details(failure: RpcFailure) -> bytes:
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return value
    return b""


def _from_details(failure: RpcFailure, message: str) -> BatonError | None:
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status_pb2.Status.FromString(_status_details(failure)).details:
        for target in (info, request, retry):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
    if info.domain != DOMAIN:
        return None
    violations = request.field_violations
    field = violations[0].field if violations else None
    has_delay = retry.HasField("retry_delay")
    retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9 if has_delay else None
    if _SHUTTING_DOWN in info.metadata:
        return errors.ShuttingDownError(
            message,
            has_begun=info.metadata[_SHUTTING_DOWN] != _NOT_BEGUN,
            field=field,
            retry_after_s=retry_after_s,
        )
    kind = _BY_REASON.get(info.reason, BatonError)
    return kind(message, field=field, retry_after_s=retry_after_s)


def _handshake_problem(message: str) -> str | None:
    """Say why no connection came about; None: nothing listens."""
    for sign, meaning in _HANDSHAKES.items():
        _, found, rest = message.lower().partition(sign)
        if found:
            why = rest.partition(":")[0]  # of a certificate: expired, self-signed ...
            return f"{meaning}: {why}" if sign.endswith(": ") else meaning
    return None


def _is_too_large(failure: RpcFailure) -> bool:
    text = failure.details() or ""
    return failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than" in text
