"""Talk to Baton: `Client` for ordinary code, `AsyncClient` for asyncio.

    with Client("127.0.0.1:7100") as client:
        for event in client.generate("Once upon a time", max_tokens=64):
            if isinstance(event, Tokens):
                print(event.text, end="")

A request survives its router. When the connection is lost, is silent for seconds, or the router
shuts down, the client continues at the next address with the request's id, seed and first unseen
index. So no token is seen twice and none is missing. After a router that shut down it opens a new
connection even to the same address, which may stand for several routers. A short call goes to the
next address when one does not answer. Errors are those of `baton.errors`. Leaving a stream early
aborts its request.

    Client("router.example:7100", tls=Tls(ca_file="ca.crt"), token=token_in("token"))
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

from baton import status
from baton.client import routers as calls
from baton.client.credentials import Tls, Token, metadata_of
from baton.client.events import Event, Tokens
from baton.client.request_stream import GenerateOptions, RequestStream, build_request
from baton.client.routers import REFUSED_BY_GRPC, Call, Connection, Routers, Tries
from baton.errors import BatonError
from baton.grpc_options import DIRECT, sends_pings
from baton.v1 import control_pb2, router_pb2

T = TypeVar("T")
C = TypeVar("C")

DEFAULT_ADDRESS = "127.0.0.1:7100"
_MAX_MESSAGE_BYTES = 64 << 20
_KEEPALIVE_S = 5.0  # a router whose host hangs is given up within twice this
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels to one address would share a connection, even one that is given up.
    ("grpc.use_local_subchannel_pool", 1),
    *sends_pings(_KEEPALIVE_S, when_idle=False),
    *DIRECT,
)


def _connector(channels: Any, tls: Tls | None) -> Callable[[str], Any]:
    """Opens a channel to an address, of `channels` grpc or grpc.aio. Raises ConfigError."""
    if tls is None:
        return lambda address: channels.insecure_channel(address, options=_CHANNEL_OPTIONS)
    options, credentials = (*_CHANNEL_OPTIONS, *tls.options()), tls.credentials()
    return lambda address: channels.secure_channel(address, credentials, options=options)


class _AnyClient(Generic[C]):
    _channels: ClassVar[Any]
    """grpc or grpc.aio."""
    _event: ClassVar[Any]

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        reconnect_within_s: float = 10.0,
        call_timeout_s: float = 10.0,
    ) -> None:
        """`addresses`: one, several, or several in one text by commas. `tls` None: plain text, in
        which others on the way could read a `token`. Raises ConfigError for files that cannot be
        read."""
        connect = _connector(self._channels, tls)
        self._routers: Routers[C] = Routers(addresses, reconnect_within_s, call_timeout_s, connect)
        self._token, self._closed = token, self._event()


class Client(_AnyClient[grpc.Channel]):
    """Several threads may share one."""

    _channels: ClassVar[Any] = grpc
    _event: ClassVar[Any] = threading.Event

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Event, None, None]:
        """Run one request and yield its events as they happen, ending with Finished. `prompt`, or
        instead of it the option `chat` or `token_ids`.

        Raises a BatonError: here for a request the wire cannot carry, while iterating for all else.
        """
        return self.run(build_request(prompt, **options))

    def run(self, request: router_pb2.GenerateRequest) -> Generator[Event, None, None]:
        """As `generate`, of a message made elsewhere; it needs a request_id."""
        return self._events(self._routers.stream(request))

    def text(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> str:
        """The whole answer at once."""
        events = self.generate(prompt, **options)
        return "".join(event.text for event in events if isinstance(event, Tokens))

    def abort(self, request_id: str, tenant: str = "") -> None:
        self._call(calls.abort(request_id, tenant))

    def models(self) -> list[router_pb2.Model]:
        return self._call(calls.models())

    def tokenize(self, text: str, tenant: str = "") -> list[int]:
        return self._call(calls.tokenize(text, tenant))

    def explain(self, request: router_pb2.GenerateRequest) -> router_pb2.ExplainRouteResponse:
        """Where a request would go, cheapest first; books nothing."""
        return self._call(calls.explain(request))

    def fleet(self) -> control_pb2.WatchFleetResponse:
        """The fleet as the router sees it now."""
        return self._call(calls.fleet())

    def close(self) -> None:
        channels = self._routers.close()
        self._closed.set()
        for channel in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, stream: RequestStream) -> Generator[Event, None, None]:
        routers = self._routers
        with contextlib.ExitStack() as used:
            connection = routers.connections.current(stream.address_index)
            try:
                while not stream.is_finished:
                    routers.check_open()
                    used.close()
                    connection = routers.connections.current(stream.address_index)
                    connection = used.enter_context(self._using(connection))
                    failure: status.RpcFailure | None = None
                    metadata = metadata_of(self._token)
                    call = connection.stub.Generate(
                        stream.request(), timeout=stream.call_timeout_s(), metadata=metadata
                    )
                    try:
                        for response in call:
                            event = stream.absorb(response)
                            if event is not None:
                                yield event
                    except grpc.RpcError as error:
                        failure = cast(status.RpcFailure, error)
                    finally:
                        call.cancel()
                    if not stream.is_finished:
                        self._closed.wait(routers.lost(stream, connection, failure))
                routers.answered(connection)
            finally:
                self._abandon(stream, connection)

    def _abandon(self, stream: RequestStream, connection: Connection[grpc.Channel]) -> None:
        tries = self._routers.abandon(stream, connection)
        if tries is not None:
            with contextlib.suppress(BatonError):
                self._try(tries)

    @contextlib.contextmanager
    def _using(self, connection: Connection[grpc.Channel]) -> Iterator[Connection[grpc.Channel]]:
        """Keep a connection open for a call. A connection that has ended is replaced by its
        successor."""
        connection = self._routers.connections.begin(connection)
        try:
            yield connection
        except REFUSED_BY_GRPC:
            self._routers.check_open()
            raise
        finally:
            unused = self._routers.connections.end(connection)
            if unused is not None:
                unused.close()

    def _call(self, call: Call[T]) -> T:
        return self._try(self._routers.tries(call))

    def _try(self, tries: Tries[T, grpc.Channel]) -> T:
        while True:
            try:
                with self._using(tries.connection) as connection:
                    answer = getattr(connection.stub, tries.call.method)(
                        tries.call.message,
                        timeout=tries.timeout_s,
                        metadata=metadata_of(self._token),
                    )
                    if tries.call.takes_first:
                        answer = self._first(answer)
            except grpc.RpcError as error:
                tries.failed(error)
            else:
                return tries.answered(answer)

    @staticmethod
    def _first(stream: Any) -> Any:
        try:
            return next(stream, None)
        finally:
            stream.cancel()


class AsyncClient(_AnyClient[grpc.aio.Channel]):
    """As `Client`, method for method, for one event loop; make it inside that loop."""

    _channels: ClassVar[Any] = grpc.aio
    _event: ClassVar[Any] = asyncio.Event

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Run one request and yield its events as they happen, ending with Finished.

        Close the iterator (`contextlib.aclosing`) or cancel the task to abort the request.
        """
        return self.run(build_request(prompt, **options))

    def run(self, request: router_pb2.GenerateRequest) -> AsyncGenerator[Event, None]:
        """As `generate`, of a message made elsewhere; it needs a request_id."""
        return self._events(self._routers.stream(request))

    async def text(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> str:
        """The whole answer at once."""
        events = self.generate(prompt, **options)
        return "".join([event.text async for event in events if isinstance(event, Tokens)])

    async def abort(self, request_id: str, tenant: str = "") -> None:
        await self._call(calls.abort(request_id, tenant))

    async def models(self) -> list[router_pb2.Model]:
        return await self._call(calls.models())

    async def tokenize(self, text: str, tenant: str = "") -> list[int]:
        return await self._call(calls.tokenize(text, tenant))

    async def explain(self, request: router_pb2.GenerateRequest) -> router_pb2.ExplainRouteResponse:
        """Where a request would go, cheapest first; books nothing."""
        return await self._call(calls.explain(request))

    async def fleet(self) -> control_pb2.WatchFleetResponse:
        """The fleet as the router sees it now."""
        return await self._call(calls.fleet())

    async def close(self) -> None:
        channels = self._routers.close()
        self._closed.set()
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _events(self, stream: RequestStream) -> AsyncGenerator[Event, None]:
        routers = self._routers
        async with contextlib.AsyncExitStack() as used:
            connection = routers.connections.current(stream.address_index)
            try:
                while not stream.is_finished:
                    routers.check_open()
                    await used.aclose()
                    connection = routers.connections.current(stream.address_index)
                    connection = await used.enter_async_context(self._using(connection))
                    failure: status.RpcFailure | None = None
                    metadata = metadata_of(self._token)
                    call = connection.stub.Generate(
                        stream.request(), timeout=stream.call_timeout_s(), metadata=metadata
                    )
                    try:
                        async for response in call:
                            event = stream.absorb(response)
                            if event is not None:
                                yield event
                    except grpc.aio.AioRpcError as error:
                        failure = cast(status.RpcFailure, error)
                    finally:
                        call.cancel()
                    if not stream.is_finished:
                        pause_s = routers.lost(stream, connection, failure)
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(pause_s):
                                await self._closed.wait()
                routers.answered(connection)
            except asyncio.CancelledError as error:
                self._raise_if_closed(error)
                raise
            finally:
                await self._abandon(stream, connection)

    async def _abandon(
        self, stream: RequestStream, connection: Connection[grpc.aio.Channel]
    ) -> None:
        tries = self._routers.abandon(stream, connection)
        if tries is not None:
            with contextlib.suppress(BatonError):
                await self._try(tries)

    @contextlib.asynccontextmanager
    async def _using(
        self, connection: Connection[grpc.aio.Channel]
    ) -> AsyncIterator[Connection[grpc.aio.Channel]]:
        connection = self._routers.connections.begin(connection)
        try:
            yield connection
        except REFUSED_BY_GRPC:
            self._routers.check_open()
            raise
        finally:
            unused = self._routers.connections.end(connection)
            if unused is not None:
                await unused.close()

    async def _call(self, call: Call[T]) -> T:
        return await self._try(self._routers.tries(call))

    async def _try(self, tries: Tries[T, grpc.aio.Channel]) -> T:
        while True:
            try:
                async with self._using(tries.connection) as connection:
                    answer = getattr(connection.stub, tries.call.method)(
                        tries.call.message,
                        timeout=tries.timeout_s,
                        metadata=metadata_of(self._token),
                    )
                    answer = await (self._first(answer) if tries.call.takes_first else answer)
            except grpc.aio.AioRpcError as error:
                tries.failed(error)
            except asyncio.CancelledError as error:
                self._raise_if_closed(error)
                raise
            else:
                return tries.answered(answer)

    def _raise_if_closed(self, error: BaseException) -> None:
        """Closing the client ends its calls as if their task were cancelled, which it is not."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling():
            self._routers.check_open()

    @staticmethod
    async def _first(stream: Any) -> Any:
        try:
            return await anext(aiter(stream), None)
        finally:
            stream.cancel()
