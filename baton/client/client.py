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

`Client` runs the coroutines of an `AsyncClient` whose every step blocks its thread. They never
wait, so they need no event loop. A loop of its own would not do: grpc.aio in a second loop of a
process disturbs the first (grpc issue 25364).

    Client("router.example:7100", tls=Tls(ca_file="ca.crt"), token=token_in("token"))
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

from baton import status
from baton.client.connections import Connection, Connections
from baton.client.credentials import Tls, Token, metadata_of
from baton.client.events import Event, Tokens
from baton.client.request_stream import GenerateOptions, RequestStream, build_request
from baton.errors import BatonError, NotFoundError, UnavailableError
from baton.grpc_options import DIRECT, sends_pings
from baton.v1 import control_pb2, router_pb2

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_ADDRESS = "127.0.0.1:7100"
_ABORT = "Abort"
"""How `Abort` is tried: one router alone may know the request, so NOT_FOUND leads to the next."""
_WATCH_FLEET = "WatchFleet"
"""How `WatchFleet` is tried: it streams, and its first message is the answer."""
_ABORT_TIMEOUT_S = 2.0
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
    """Return what opens a channel to an address. `channels`: grpc or grpc.aio. Raises
    ConfigError."""
    if tls is None:
        return lambda address: channels.insecure_channel(address, options=_CHANNEL_OPTIONS)
    options, credentials = (*_CHANNEL_OPTIONS, *tls.options()), tls.credentials()
    return lambda address: channels.secure_channel(address, credentials, options=options)


# --- for event loops ------------------------------------------------------------------------------


class AsyncClient(contextlib.AbstractAsyncContextManager["AsyncClient"]):
    """The client for asyncio, with `Client`'s methods. Make it inside the loop that uses it."""

    _channels: ClassVar[Any] = grpc.aio
    _event: ClassVar[Any] = asyncio.Event

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        reconnect_within_s: float = 10.0,
        call_timeout_s: float = 10.0,
    ) -> None:
        """Take one router address, several, or several in one text with commas between them.
        Without `tls` the connection is plain text, in which others on the way could read a `token`.
        Raises ConfigError for files that cannot be read."""
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        self._addresses = [address.strip() for address in listed if address.strip()]
        if not self._addresses:
            raise ValueError("at least one router address is needed")
        self._connections = Connections(self._addresses, _connector(self._channels, tls))
        self._preferred = 0
        self._token, self._closed = token, self._event()
        self._reconnect_within_s, self._call_timeout_s = reconnect_within_s, call_timeout_s

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Run one request and yield its events as they happen, ending with Finished.

        Close the iterator (`contextlib.aclosing`) or cancel the task to abort the request.
        """
        return self.run(build_request(prompt, **options))

    def run(self, request: router_pb2.GenerateRequest) -> AsyncGenerator[Event, None]:
        """Run a message that was made elsewhere, and yield its events. It needs a request_id."""
        stream = RequestStream(
            request,
            self._addresses,
            first_address=self._preferred,
            reconnect_within_s=self._reconnect_within_s,
        )
        return self._events(stream)

    async def text(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> str:
        """Run one request and return its whole text."""
        events = self.generate(prompt, **options)
        return "".join([event.text async for event in events if isinstance(event, Tokens)])

    async def abort(self, request_id: str, tenant: str = "") -> None:
        message = router_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        await self._ask(_ABORT, message)

    async def models(self) -> list[router_pb2.Model]:
        answer = await self._ask("ListModels", router_pb2.ListModelsRequest())
        return list(answer.models)

    async def tokenize(self, text: str, tenant: str = "") -> list[int]:
        answer = await self._ask("Tokenize", router_pb2.TokenizeRequest(text=text, tenant=tenant))
        return list(answer.ids)

    async def explain(self, request: router_pb2.GenerateRequest) -> router_pb2.ExplainRouteResponse:
        """Say where a request would go, the cheapest place first. Nothing is booked."""
        message = router_pb2.ExplainRouteRequest(request=request)
        answer: router_pb2.ExplainRouteResponse = await self._ask("ExplainRoute", message)
        return answer

    async def fleet(self) -> control_pb2.WatchFleetResponse:
        """Return the fleet as the router sees it now."""
        answer = await self._ask(_WATCH_FLEET, control_pb2.FleetServiceWatchFleetRequest())
        fleet: control_pb2.WatchFleetResponse = answer.fleet
        return fleet

    async def close(self) -> None:
        self._closed.set()
        for channel in self._connections.close():
            await self._close_channel(channel)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        """Raise UnavailableError once the client is closed."""
        if self._closed.is_set():
            raise UnavailableError("the client is closed")

    async def _events(self, stream: RequestStream) -> AsyncGenerator[Event, None]:
        async with contextlib.AsyncExitStack() as used:
            connection = self._connections.current(stream.address_index)
            try:
                while not stream.is_finished:
                    self._check_open()
                    await used.aclose()
                    connection = self._connections.current(stream.address_index)
                    connection = await used.enter_async_context(self._using(connection))
                    failure: status.RpcFailure | None = None
                    metadata = metadata_of(self._token)
                    call = connection.stub.Generate(
                        stream.request(), timeout=stream.call_timeout_s(), metadata=metadata
                    )
                    try:
                        async for response in self._responses(call):
                            event = stream.absorb(response)
                            if event is not None:
                                yield event
                    except grpc.RpcError as error:
                        failure = cast(status.RpcFailure, error)
                    finally:
                        call.cancel()
                    if not stream.is_finished:
                        await self._pause(self._lost(stream, connection, failure))
                self._answered(connection)
            finally:
                if not stream.is_finished and not self._closed.is_set():
                    await self._abandon(stream, connection)

    def _lost(
        self, stream: RequestStream, connection: Connection, failure: status.RpcFailure | None
    ) -> float:
        """Handle a stream's failure. No other request begins at a router that shuts down."""
        pause_s = stream.lost(failure)
        if stream.was_sent_away:
            self._preferred = stream.address_index
            self._connections.leave(connection)
        return pause_s

    def _answered(self, connection: Connection) -> None:
        """Ask this router first from now on, unless it shuts down."""
        if self._connections.current(connection.address_index) is connection:
            self._preferred = connection.address_index

    async def _abandon(self, stream: RequestStream, connection: Connection) -> None:
        """Abort a request whose caller has left, first at the router that it was last sent to."""
        abort = router_pb2.AbortRequest(request_id=stream.request_id, tenant=stream.tenant)
        with contextlib.suppress(BatonError):
            await self._try(_ABORT, abort, connection, _ABORT_TIMEOUT_S)

    async def _ask(self, method: str, message: Any) -> Any:
        """Make a short call and return its answer."""
        first = self._connections.current(self._preferred)
        return await self._try(method, message, first, self._call_timeout_s)

    async def _try(self, method: str, message: Any, first: Connection, timeout_s: float) -> Any:
        """Ask one router after the other until one answers, each for `timeout_s` at most."""
        self._check_open()
        turn = self._connections.in_turn(first, with_left=method == _ABORT)
        for connection in turn:
            try:
                answer = await self._answer_of(method, message, connection, timeout_s)
            except grpc.RpcError as error:
                failure = cast(status.RpcFailure, error)
                problem = self._problem(failure, timeout_s)
                goes_on = (
                    isinstance(problem, UnavailableError)
                    or status.is_connection_lost(failure)
                    or (method == _ABORT and isinstance(problem, NotFoundError))
                )
                if not goes_on or connection is turn[-1]:
                    raise problem from error
                self._check_open()
            else:
                if answer is None:
                    address = self._addresses[connection.address_index]
                    raise UnavailableError(
                        f"the router at {address} ended its answer before it began"
                    )
                self._answered(connection)
                return answer
        raise AssertionError("the last router's failure is raised")

    async def _answer_of(
        self, method: str, message: Any, connection: Connection, timeout_s: float
    ) -> Any:
        async with self._using(connection) as connection:
            ask, metadata = getattr(connection.stub, method), metadata_of(self._token)
            call = ask(message, timeout=timeout_s, metadata=metadata)
            if method != _WATCH_FLEET:
                return await self._answer(call)
            try:
                return await anext(aiter(self._responses(call)), None)
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def _using(self, connection: Connection) -> AsyncIterator[Connection]:
        """Keep a connection open for a call. A connection that has ended is replaced by its
        successor. Raises UnavailableError where the call fails since the client is closed."""
        connection = self._connections.begin(connection)
        try:
            yield connection
        except (ValueError, grpc.aio.UsageError):  # gRPC's, for a channel that is closed
            self._check_open()
            raise
        except asyncio.CancelledError:
            # Closing a channel ends its calls as if their task were cancelled, which it is not.
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                self._check_open()
            raise
        finally:
            unused = self._connections.end(connection)
            if unused is not None:
                await self._close_channel(unused)

    def _problem(self, failure: status.RpcFailure, timeout_s: float) -> BatonError:
        listed = ", ".join(self._addresses)
        if status.is_out_of_time(failure):
            return UnavailableError(f"no answer from {listed} within {timeout_s:g} s")
        return status.from_rpc_error(failure, listed)

    # --- the steps that wait ----------------------------------------------------------------------

    def _responses(self, call: Any) -> AsyncIterator[Any]:
        return aiter(call)

    async def _answer(self, call: Any) -> Any:
        return await call

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 may lose a cancel
                await self._closed.wait()

    async def _close_channel(self, channel: Any) -> None:
        await channel.close()


# --- for threads ----------------------------------------------------------------------------------


def _now(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a step of the client did not block")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Make a method of `Client` of one of `AsyncClient`."""

    @functools.wraps(method)
    def call(self: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return _now(method(self._client, *arguments, **options))

    return call


def _drawn(events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
    try:
        while (event := _now(cast(Any, anext(events, None)))) is not None:
            yield event
    finally:
        _now(events.aclose())


class _Blocking:
    """Iterate over a call that blocks."""

    def __init__(self, call: Iterator[Any]) -> None:
        self._call = call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._call)
        except StopIteration:
            raise StopAsyncIteration from None


class _BlockingClient(AsyncClient):
    _channels: ClassVar[Any] = grpc
    _event: ClassVar[Any] = threading.Event

    def _responses(self, call: Any) -> AsyncIterator[Any]:
        return _Blocking(call)

    async def _answer(self, call: Any) -> Any:
        return call

    async def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    async def _close_channel(self, channel: Any) -> None:
        channel.close()


class Client(contextlib.AbstractContextManager["Client"]):
    """The client for ordinary code. Several threads may share one."""

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        reconnect_within_s: float = 10.0,
        call_timeout_s: float = 10.0,
    ) -> None:
        """Take what `AsyncClient` takes."""
        self._client = _BlockingClient(
            addresses,
            tls=tls,
            token=token,
            reconnect_within_s=reconnect_within_s,
            call_timeout_s=call_timeout_s,
        )

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Event, None, None]:
        """Run one request and yield its events as they happen, ending with Finished. `prompt`, or
        instead of it the option `chat` or `token_ids`.

        Raises a BatonError: here for a request the wire cannot carry, while iterating for all else.
        """
        return self.run(build_request(prompt, **options))

    def run(self, request: router_pb2.GenerateRequest) -> Generator[Event, None, None]:
        """Run a message that was made elsewhere, and yield its events. It needs a request_id."""
        return _drawn(self._client.run(request))

    text = _blocking(AsyncClient.text)
    abort = _blocking(AsyncClient.abort)
    models = _blocking(AsyncClient.models)
    tokenize = _blocking(AsyncClient.tokenize)
    explain = _blocking(AsyncClient.explain)
    fleet = _blocking(AsyncClient.fleet)
    close = _blocking(AsyncClient.close)

    def __exit__(self, *_: object) -> None:
        self.close()
