"""Checks of a call before the service sees it: its tenant, whether its message can be read, and
whether it speaks in its caller's name. Each happens once a call. The wrapper of a streaming method
writes the answers as gRPC would, and adds no step to any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Never, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health

from baton.errors import (
    BatonError,
    InvalidRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from baton.status import abort
from baton.v1 import router_pb2
from router.door.access import Callers

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_HEALTH = f"/{health.SERVICE_NAME}/"


class Gate(grpc.aio.ServerInterceptor):
    """Refuses calls to `service` whose message is no protobuf, or holds text that is not UTF-8:
    gRPC itself would answer UNKNOWN and log a traceback. With `callers`, every call but health
    needs a token, and tenants are confined to themselves."""

    def __init__(self, service: str, callers: Callers | None) -> None:
        self._prefix = f"/{service}/"
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or method.startswith(_HEALTH):
            return handler
        tenant = None
        if self._callers is not None:
            try:
                metadata: Any = handler_call_details.invocation_metadata
                tenant = self._callers.tenant_of(metadata)
            except UnauthenticatedError as error:
                return _refusing(error)
        return _admitting(handler, tenant) if method.startswith(self._prefix) else handler


def _refusing(error: BatonError) -> Handler:
    """A handler for a method of any kind. As one that streams both ways it reads no message."""

    async def call(requests: object, context: Context) -> Never:
        await abort(context, error)

    behaviour: Any = call
    return grpc.stream_stream_rpc_method_handler(behaviour)


def _admitting(handler: Handler, tenant: str | None) -> Handler:
    """The method behind the checks of its message. `tenant` None: any."""
    assert not handler.request_streaming, "each message of such a stream would have to be checked"
    deserializer, serializer = handler.request_deserializer, handler.response_serializer
    assert deserializer is not None

    def read(data: bytes) -> Any:
        try:
            message = deserializer(data)
            confine(message, tenant)
        except DecodeError as error:
            return InvalidRequestError(f"unreadable message: {error}")
        except PermissionDeniedError as error:
            return error
        return message

    if handler.response_streaming:
        stream: Any = _writing(handler.unary_stream)
        return grpc.unary_stream_rpc_method_handler(stream, read, serializer)
    unary: Any = _answering(handler.unary_unary)
    return grpc.unary_unary_rpc_method_handler(unary, read, serializer)


def confine(message: Message, tenant: str | None) -> None:
    """Fill in the caller's tenant. Raises PermissionDeniedError if the message names another
    one."""
    if tenant is None:
        return
    match message:
        case (
            router_pb2.GenerateRequest() | router_pb2.AbortRequest() | router_pb2.TokenizeRequest()
        ):
            asked, field = message, "tenant"
        case router_pb2.ExplainRouteRequest():
            asked, field = message.request, "request.tenant"
        case _:
            return
    if asked.tenant not in ("", tenant):
        raise PermissionDeniedError(f"{field}: the token is another tenant's", field=field)
    asked.tenant = tenant


def _answering(behaviour: Any) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, BatonError):
            await abort(context, request)
        return await behaviour(request, context)

    return call


def _writing(behaviour: Any) -> Callable[[Any, Context], Awaitable[None]]:
    async def call(request: Any, context: Context) -> None:
        if isinstance(request, BatonError):
            await abort(context, request)
        async with contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return call
