"""The door's gRPC server with methods of the tests' own, and a client that speaks raw HTTP/2."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    TrailersReceived,
)

from baton.client.connections import Connection
from baton.errors import InvalidRequestError, OverloadedError
from baton.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc
from router.door.connections.acceptor import listening
from router.door.connections.sharing import Sharing
from router.door.grpc.call import Feed
from router.door.grpc.call_policy import CallPolicy
from router.door.grpc.h2_server import GrpcServer

MAX_BYTES = 1 << 16
PATH = b"/baton.v1.RouterService/"


class TokenFeed(Feed):
    """Tokens that are put in; a reader that is late gets them as one message."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._num_taken = self.num_takes = 0
        self._on_news: Callable[[], None] = lambda: None
        self._is_ended = self.is_left = False

    def put(self, *ids: int) -> None:
        self._ids += ids
        self._on_news()

    def end(self) -> None:
        self._is_ended = True
        self._on_news()

    def follow(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    @property
    def has_more(self) -> bool:
        return self._is_ended

    def take(self) -> Sequence[router_pb2.GenerateResponse] | None:
        index, self._num_taken = self._num_taken, len(self._ids)
        ids = self._ids[index:]
        if not ids:
            return None if self._is_ended else []
        self.num_takes += 1
        tokens = router_pb2.Tokens(index=index, ids=ids, text="x" * len(ids))
        return [router_pb2.GenerateResponse(tokens=tokens)]

    def leave(self) -> None:
        assert not self.is_left
        self.is_left = True


class TestedService(router_pb2_grpc.RouterServiceServicer):
    """`Generate` streams from a feed. `Tokenize` does what its text says."""

    __test__ = False

    def __init__(self) -> None:
        self.feeds: list[TokenFeed] = []
        self.num_waiting = 0

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: object
    ) -> Feed:
        self.feeds.append(TokenFeed())
        return self.feeds[-1]

    async def Tokenize(  # noqa: N802
        self, request: router_pb2.TokenizeRequest, context: Any
    ) -> router_pb2.TokenizeResponse:
        what, _, argument = request.text.partition(" ")
        if what == "wait":
            self.num_waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.num_waiting -= 1
        elif what == "refuse":
            raise InvalidRequestError(argument, field="text")
        elif what == "shed":
            raise OverloadedError("full", retry_after_s=2.5)
        elif what == "break":
            raise RuntimeError("of the test")
        elif what == "answer":
            return router_pb2.TokenizeResponse(ids=[1 << 20] * int(argument))
        return router_pb2.TokenizeResponse(ids=[len(request.text)])

    async def WatchFleet(  # noqa: N802
        self, request: control_pb2.FleetServiceWatchFleetRequest, context: Any
    ) -> AsyncIterator[control_pb2.FleetServiceWatchFleetResponse]:
        for _ in range(3):
            yield control_pb2.FleetServiceWatchFleetResponse()


class Served:
    def __init__(self, server: GrpcServer, service: TestedService) -> None:
        self.server, self.service = server, service
        self.address = f"127.0.0.1:{server.port}"

    async def feed(self) -> TokenFeed:
        """Of the first call of Generate."""
        await self.until(lambda: bool(self.service.feeds))
        return self.service.feeds[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  whatever it is, it has no event
                await asyncio.sleep(0.005)


@asynccontextmanager
async def served(context: ssl.SSLContext | None = None, **limits: Any) -> AsyncIterator[Served]:
    """Whatever a client does, no callback of the loop may fail."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    sharing = Sharing(
        limits.pop("max_connections", 100), limits.pop("max_unfinished_bytes", 1 << 20)
    )
    policy = CallPolicy(**{"max_message_bytes": MAX_BYTES, **limits})
    server = GrpcServer(policy, listening("127.0.0.1", 0, False), sharing)
    service = TestedService()  # type: ignore[abstract]
    registers: Any = server
    router_pb2_grpc.add_RouterServiceServicer_to_server(service, registers)
    control_pb2_grpc.add_FleetServiceServicer_to_server(service, registers)  # type: ignore[arg-type]
    server.start(context)
    try:
        yield Served(server, service)
    finally:
        await server.stop(0.0)
    assert not failures, failures
    assert not server.connections


def stub_of(channel: Any) -> Any:
    return Connection(0, channel).stub


def channel_to(made: Served) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(made.address, options=options)


@asynccontextmanager
async def asked(**limits: Any) -> AsyncIterator[tuple[Served, Any]]:
    """A server with grpcio's stub of it."""
    async with served(**limits) as made, channel_to(made) as channel:
        yield made, stub_of(channel)


def tokenize(text: str) -> router_pb2.TokenizeRequest:
    return router_pb2.TokenizeRequest(text=text)


def framed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


def framed_text(text: str) -> bytes:
    return framed(tokenize(text).SerializeToString())


FOUR = framed_text("four")


class RawClient:
    """A client that does what it is told, and keeps what it hears."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        config = H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.h2 = H2Connection(config)
        self.events: list[Event] = []
        self.is_lost = False

    @classmethod
    @asynccontextmanager
    async def to(cls, address: str, window: int | None = None) -> AsyncIterator[RawClient]:
        client = cls(*await asyncio.open_connection(*address.split(":")))
        if window is not None:
            client.h2.local_settings.initial_window_size = window
            client.h2.local_settings.acknowledge()
        client.h2.initiate_connection()
        client.flush()
        await client.until(lambda: bool(client.events))  # its settings
        try:
            yield client
        finally:
            client._writer.close()

    def begin(self, method: bytes = b"Tokenize", **headers: bytes) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        fields = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": PATH + method,
            b":authority": b"x",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
        }
        fields |= {
            name.replace("_", "-").replace("--", ":").encode(): value
            for name, value in headers.items()
        }
        self.h2.send_headers(stream_id, list(fields.items()))
        self.flush()
        return stream_id

    def ask(self, method: bytes = b"Generate", data: bytes = framed(b""), **headers: bytes) -> int:
        """Send a whole request."""
        stream_id = self.begin(method, **headers)
        self.h2.send_data(stream_id, data, end_stream=True)
        self.flush()
        return stream_id

    def flush(self) -> None:
        self.send(self.h2.data_to_send())

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                try:
                    data = await self._reader.read(1 << 16)
                except ConnectionError:
                    data = b""
                if not data:
                    self.is_lost = True
                    assert condition(), "the connection is lost"
                    return
                self.events += self.h2.receive_data(data)
                self.flush()

    def data(self, stream_id: int) -> bytes:
        events = self.of(DataReceived, stream_id)
        return b"".join(event.data for event in events)

    def headers(self, stream_id: int) -> dict[str, str]:
        """Of the answer, trailers included."""
        found = self.of(ResponseReceived, stream_id) + self.of(TrailersReceived, stream_id)
        return {str(name): str(value) for event in found for name, value in event.headers}

    def of(self, kind: type[Event], stream_id: int | None = None) -> list[Any]:
        found: list[Any] = [event for event in self.events if isinstance(event, kind)]
        return [one for one in found if stream_id is None or one.stream_id == stream_id]

    async def ended(self, stream_id: int) -> dict[str, str]:
        """The headers of an answer that has ended."""
        await self.until(lambda: bool(self.of(StreamEnded, stream_id)))
        return self.headers(stream_id)

    async def cut_off(self) -> int | None:
        """The code of the GOAWAY with which the server ended the connection, if it said one."""
        await self.until(lambda: self.is_lost)
        said = self.of(ConnectionTerminated)
        return said[0].error_code if said else None
