"""Talk to Baton: `Client` for ordinary code, `AsyncClient` for asyncio.

    with Client("127.0.0.1:7100") as client:
        for event in client.generate("Once upon a time", max_tokens=64):
            if isinstance(event, Tokens):
                print(event.text, end="")

A request survives its router: when the connection is lost the client goes on at the next address
with the request's id, seed and first unseen index, so that no token is seen twice and none is
missing. Errors are those of `baton.errors`. Leaving a stream early aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

import grpc
import grpc.aio

from baton import status
from baton.events import Event, Tokens
from baton.request_stream import Chat, GenerateOptions, RequestStream, build_request
from baton.v1 import control_pb2, router_pb2, router_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:7100"
_CALL_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 2.0
_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def _address_list(addresses: str | Sequence[str]) -> list[str]:
    listed = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found = [address.strip() for address in listed if address.strip()]
    if not found:
        raise ValueError("at least one router address is needed")
    return found


class Client:
    """Several threads may share one. Addresses: one, several, or several in one text by commas."""

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        reconnect_within_s: float = 10.0,
        call_timeout_s: float = _CALL_TIMEOUT_S,
    ) -> None:
        self._addresses = _address_list(addresses)
        self._reconnect_within_s = reconnect_within_s
        self._call_timeout_s = call_timeout_s
        self._channels = [
            grpc.insecure_channel(address, options=_CHANNEL_OPTIONS) for address in self._addresses
        ]
        # The generated stub serves both kinds of channel; its types speak of asyncio alone.
        self._stubs: list[Any] = [
            router_pb2_grpc.RouterServiceStub(cast(grpc.aio.Channel, channel))
            for channel in self._channels
        ]
        self._preferred = 0
        self._is_closed = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        chat: Chat | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[Event, None, None]:
        """Run one request; its events as they happen, ending with Finished.

        Raises a BatonError: here for a request the wire cannot carry, while iterating for all else.
        """
        return self.run(build_request(prompt, chat, token_ids, **options))

    def run(self, request: router_pb2.GenerateRequest) -> Generator[Event, None, None]:
        """As `generate`, of a message made elsewhere; it needs a request_id."""
        stream = RequestStream(
            request,
            self._addresses,
            first_address=self._preferred,
            reconnect_within_s=self._reconnect_within_s,
        )
        return self._events(stream)

    def text(
        self,
        prompt: str | None = None,
        *,
        chat: Chat | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> str:
        """The whole answer at once."""
        events = self.generate(prompt, chat=chat, token_ids=token_ids, **options)
        return "".join(event.text for event in events if isinstance(event, Tokens))

    def abort(self, request_id: str, tenant: str = "") -> None:
        self._call("Abort", router_pb2.AbortRequest(request_id=request_id, tenant=tenant))

    def models(self) -> list[router_pb2.Model]:
        return list(self._call("ListModels", router_pb2.ListModelsRequest()).models)

    def tokenize(self, text: str) -> list[int]:
        return list(self._call("Tokenize", router_pb2.TokenizeRequest(text=text)).ids)

    def explain(self, request: router_pb2.GenerateRequest) -> list[router_pb2.RouteCandidate]:
        """Where a request would go, cheapest first; books nothing."""
        message = router_pb2.ExplainRouteRequest(request=request)
        return list(self._call("ExplainRoute", message).candidates)

    def fleet(self) -> control_pb2.WatchFleetResponse:
        """The fleet as the router sees it now."""
        watch = self._stubs[self._preferred].WatchFleet(
            router_pb2.RouterServiceWatchFleetRequest(), timeout=self._call_timeout_s
        )
        try:
            return cast(router_pb2.RouterServiceWatchFleetResponse, next(watch)).fleet
        except grpc.RpcError as error:
            address = self._addresses[self._preferred]
            raise status.from_rpc_error(cast(status.RpcFailure, error), address) from error
        finally:
            watch.cancel()

    def close(self) -> None:
        self._is_closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _events(self, stream: RequestStream) -> Generator[Event, None, None]:
        while not stream.is_finished:
            failure: status.RpcFailure | None = None
            stub = self._stubs[stream.address_index]
            call = stub.Generate(stream.request(), timeout=stream.call_timeout_s())
            try:
                for response in call:
                    event = stream.absorb(response)
                    if event is not None:
                        yield event
            except grpc.RpcError as error:
                failure = cast(status.RpcFailure, error)
            except (GeneratorExit, KeyboardInterrupt):
                self._abort_quietly(stream, stub)
                raise
            finally:
                call.cancel()
            if not stream.is_finished:
                time.sleep(stream.lost(failure) * random.uniform(0.5, 1.0))
        self._preferred = stream.address_index

    def _abort_quietly(self, stream: RequestStream, stub: Any) -> None:
        request = router_pb2.AbortRequest(request_id=stream.request_id, tenant=stream.tenant)
        if not stream.is_finished and not self._is_closed:
            with contextlib.suppress(grpc.RpcError):
                stub.Abort(request, timeout=_ABORT_TIMEOUT_S)

    def _call(self, method: str, message: Any) -> Any:
        """A short call at the first address that answers."""
        failure: grpc.RpcError | None = None
        for offset in range(len(self._stubs)):
            index = (self._preferred + offset) % len(self._stubs)
            try:
                answer = getattr(self._stubs[index], method)(message, timeout=self._call_timeout_s)
            except grpc.RpcError as error:
                failure = error
                if not status.is_connection_lost(cast(status.RpcFailure, error)):
                    break
            else:
                self._preferred = index
                return answer
        assert failure is not None
        address = ", ".join(self._addresses)
        raise status.from_rpc_error(cast(status.RpcFailure, failure), address) from failure


class AsyncClient:
    """As `Client`, for one event loop; make it inside that loop."""

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        reconnect_within_s: float = 10.0,
        call_timeout_s: float = _CALL_TIMEOUT_S,
    ) -> None:
        self._addresses = _address_list(addresses)
        self._reconnect_within_s = reconnect_within_s
        self._call_timeout_s = call_timeout_s
        self._channels = [
            grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            for address in self._addresses
        ]
        self._stubs = [router_pb2_grpc.RouterServiceStub(channel) for channel in self._channels]
        self._preferred = 0

    def generate(
        self,
        prompt: str | None = None,
        *,
        chat: Chat | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Event, None]:
        """Run one request; its events as they happen, ending with Finished.

        Close the iterator (`contextlib.aclosing`) or cancel the task to abort the request.
        """
        return self.run(build_request(prompt, chat, token_ids, **options))

    def run(self, request: router_pb2.GenerateRequest) -> AsyncGenerator[Event, None]:
        """As `generate`, of a message made elsewhere; it needs a request_id."""
        stream = RequestStream(
            request,
            self._addresses,
            first_address=self._preferred,
            reconnect_within_s=self._reconnect_within_s,
        )
        return self._events(stream)

    async def text(
        self,
        prompt: str | None = None,
        *,
        chat: Chat | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> str:
        """The whole answer at once."""
        events = self.generate(prompt, chat=chat, token_ids=token_ids, **options)
        return "".join([event.text async for event in events if isinstance(event, Tokens)])

    async def abort(self, request_id: str, tenant: str = "") -> None:
        message = router_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        try:
            await self._stubs[self._preferred].Abort(message, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            address = self._addresses[self._preferred]
            raise status.from_rpc_error(_failure(error), address) from error

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _events(self, stream: RequestStream) -> AsyncGenerator[Event, None]:
        while not stream.is_finished:
            failure: status.RpcFailure | None = None
            stub = self._stubs[stream.address_index]
            call = stub.Generate(stream.request(), timeout=stream.call_timeout_s())
            try:
                async for response in call:
                    event = stream.absorb(response)
                    if event is not None:
                        yield event
            except grpc.aio.AioRpcError as error:
                failure = _failure(error)
            except (GeneratorExit, asyncio.CancelledError):
                await self._abort_quietly(stream, stub)
                raise
            finally:
                call.cancel()
            if not stream.is_finished:
                await asyncio.sleep(stream.lost(failure) * random.uniform(0.5, 1.0))
        self._preferred = stream.address_index

    async def _abort_quietly(
        self, stream: RequestStream, stub: router_pb2_grpc.RouterServiceStub
    ) -> None:
        request = router_pb2.AbortRequest(request_id=stream.request_id, tenant=stream.tenant)
        if not stream.is_finished:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Abort(request, timeout=_ABORT_TIMEOUT_S)


def _failure(error: grpc.aio.AioRpcError) -> status.RpcFailure:
    return cast(status.RpcFailure, error)
