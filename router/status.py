"""Baton's errors as gRPC statuses with google.rpc details."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton.errors import BatonError

DOMAIN = "baton.dev"


def status_of(error: BatonError) -> status_pb2.Status:
    """Code and message, ErrorInfo always, RetryInfo and BadRequest where they apply."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    code = code_pb2.Code.Value(error.grpc_status)
    return status_pb2.Status(code=code, message=error.message, details=packed)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """End the call with the error's status and details."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
