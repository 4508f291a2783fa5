"""A message that is no protobuf, or holds text that is not UTF-8, is the caller's mistake.

gRPC itself would answer UNKNOWN and log a traceback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Context = grpc.aio.ServicerContext[Any, Any]


class RefuseUnreadable(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT for messages to `service` that cannot be read."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or not method.startswith(self._prefix) or handler.request_streaming:
            return handler
        deserializer, serializer = handler.request_deserializer, handler.response_serializer
        assert deserializer is not None

        def read(data: bytes) -> Any:
            try:
                return deserializer(data)
            except DecodeError as error:
                return error

        if handler.response_streaming:
            stream: Any = _checked_stream(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(stream, read, serializer)
        unary: Any = _checked_unary(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(unary, read, serializer)


def _checked_unary(behaviour: Any) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        await _refuse(request, context)
        return await behaviour(request, context)

    return call


def _checked_stream(behaviour: Any) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        await _refuse(request, context)
        async for response in behaviour(request, context):
            yield response

    return call


async def _refuse(request: Any, context: Context) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unreadable message: {request}")
