"""The worker's end of links: its port, with gRPC behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from baton.grpc_options import WORKER_MESSAGE_BYTES
from baton.link.frames import (
    KEEPALIVE,
    MESSAGES,
    NUMBERS,
    OTHERS_ROOM,
    VERSION,
    Frames,
    Kind,
    LinkError,
    Method,
)
from baton.link.tls import LinkTls
from baton.status import DETAILS_KEY
from baton.unfinished import Unfinished

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 5.0
_HELLO_BYTES = 4096
_MAX_FRAME_BYTES = 2 * WORKER_MESSAGE_BYTES  # after it: more than any request makes
_UNFINISHED_BYTES = 2 * _MAX_FRAME_BYTES  # of all links' frames that have begun to come
_HTTP2 = b"PRI * HTTP/2.0"
_TLS_HANDSHAKE = b"\x16"
_ACCEPT_AGAIN_S = 1.0
_LAST_WITHIN_S = 0.5  # for what is unsent when a server stops


class CallContext:
    """What a handler may do besides answering; named as in gRPC's servicer context."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, bytes], ...] = (),
    ) -> NoReturn:
        status = dict(trailing_metadata).get(DETAILS_KEY)
        if status is None:
            status = status_pb2.Status(code=code.value[0], message=details).SerializeToString()
        raise LinkError(code, details, status)


Handler = Callable[[AsyncIterator[Any], CallContext], AsyncIterator[Message]]
"""Takes the router's messages, the request first, and yields the worker's."""


@dataclass(frozen=True)
class Served:
    handler: Handler
    room: int = OTHERS_ROOM
    """Unsent bytes beyond which its messages wait."""


def answers(handler: Callable[[Any, CallContext], Awaitable[Message]]) -> Served:
    """One request, one answer."""

    async def handle(requests: AsyncIterator[Any], context: CallContext) -> AsyncIterator[Message]:
        yield await handler(await anext(requests), context)

    return Served(handle)


def streams(handler: Callable[[Any, CallContext], AsyncIterator[Message]]) -> Served:
    """One request, any number of messages."""

    async def handle(requests: AsyncIterator[Any], context: CallContext) -> AsyncIterator[Message]:
        async with contextlib.aclosing(handler(await anext(requests), context)) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    return Served(handle)


class LinkServer:
    """Own a listening port, its connections and their calls."""

    def __init__(self, methods: Mapping[Method, Served], tls: LinkTls | None = None) -> None:
        """`tls`: then links without it are refused. gRPC stays as it is."""
        self._methods, self.tls = methods, tls
        self._server: asyncio.Server | None = None
        self._grpc = ""
        self.is_stopped = False
        self.unfinished = Unfinished(_UNFINISHED_BYTES)
        self._accepting: asyncio.Task[None] | None = None  # where there is TLS
        self._arriving: set[asyncio.Task[None]] = set()
        self._connections: set[_Arriving] = set()

    async def start(self, host: str, port: int, grpc_address: str) -> int:
        """Listen; the port. `grpc_address`: `unix:PATH` or host:port of the worker's gRPC server.
        Raises OSError."""
        loop = asyncio.get_running_loop()
        self._grpc = grpc_address
        if self.tls is None:
            self._server = await loop.create_server(self._accept, host.strip("[]"), port)
            number: int = self._server.sockets[0].getsockname()[1]
            return number
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host.strip("[]"), port), family=family)
        listening.setblocking(False)
        self._accepting = loop.create_task(self._accept_all(listening))
        self._accepting.add_done_callback(lambda _: listening.close())
        number = listening.getsockname()[1]
        return number

    def _accept(self) -> asyncio.Protocol:
        return _Arriving(self, is_secure=False)

    async def _accept_all(self, listening: socket.socket) -> None:
        """Where there is TLS: a connection's first byte says whether it begins with a handshake,
        and is read by whoever serves it."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                arrived, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, say
                log.error("no connection can be taken: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            task = loop.create_task(self._take_in(arrived))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _take_in(self, arrived: socket.socket) -> None:
        assert self.tls is not None
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(arrived, readable.set)
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                await readable.wait()
            loop.remove_reader(arrived)
            is_secure = arrived.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE
            context = self.tls.context if is_secure else None
            made = partial(_Arriving, self, is_secure)
            await loop.connect_accepted_socket(made, arrived, ssl=context)
        except TimeoutError:  # it says nothing: a probe
            loop.remove_reader(arrived)
            arrived.close()
        except ssl.SSLError as error:
            log.warning("a link is refused: %s", error)
        except OSError as error:
            log.debug("a connection is lost as it comes: %s", error)
        except asyncio.CancelledError:
            loop.remove_reader(arrived)
            arrived.close()
            raise

    @property
    def num_unsent(self) -> int:
        """Bytes that routers have yet to take."""
        return sum(one.served.num_unsent for one in self._connections if one.served is not None)

    async def stop(self) -> None:
        """Let what is unsent go out, then cut every connection, and wait until its calls have
        ended."""
        self.is_stopped = True
        if self._server is not None:
            self._server.close()
        served = [one.served for one in self._connections if one.served is not None]
        if served:
            sent = [asyncio.ensure_future(link.room(0)) for link in served]
            _, late = await asyncio.wait(sent, timeout=_LAST_WITHIN_S)
            for each in late:
                each.cancel()
        tasks = [task for one in list(self._connections) for task in one.end()]
        tasks += [*self._arriving, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class _Arriving(asyncio.Protocol):
    """A connection until its first bytes show what it is."""

    def __init__(self, server: LinkServer, is_secure: bool) -> None:
        self._server, self._is_secure = server, is_secure
        self._transport: Any = None
        self._first = b""
        self._limit: asyncio.TimerHandle | None = None
        self.served: _ServedLink | None = None
        self._passing: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server._connections.add(self)
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(HELLO_WITHIN_S, transport.abort)
        if self._server.is_stopped:  # accepted just before
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._first += data
        if _HTTP2.startswith(self._first[: len(_HTTP2)]):
            if len(self._first) < len(_HTTP2):
                return
            self._end_limit()
            self._transport.pause_reading()
            work = _pass_on(self._transport, self._first, self._server._grpc)
            self._passing = asyncio.create_task(work)
            self._passing.add_done_callback(lambda _: self._server._connections.discard(self))
        elif refusal := self._refusal():
            log.warning("a link is refused: %s", refusal)
            self._transport.abort()
        else:
            self._end_limit()
            served = self.served = _ServedLink(self._server, self)
            self._transport.set_protocol(served)
            served.connection_made(self._transport)
            served.data_received(self._first)

    def _refusal(self) -> str:
        tls = self._server.tls
        if tls is None:
            return ""
        return tls.wrong_peer(self._transport) if self._is_secure else "it has no TLS"

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        self._end_limit()
        self._server._connections.discard(self)

    def end(self) -> list[asyncio.Task[None]]:
        """The tasks that end with it."""
        tasks = [] if self._passing is None else [self._passing]
        if self.served is not None:
            tasks += self.served.end()
        for task in tasks:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()
        return tasks


async def _pass_on(transport: Any, first: bytes, address: str) -> None:
    """Copy bytes both ways until either side has none."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        if address.startswith("unix:"):
            inner = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            inner = await asyncio.open_connection(host, int(port))
    except OSError as error:
        log.warning("the gRPC server at %s does not answer: %s", address, error)
        transport.abort()
        return
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    reader.feed_data(first)
    transport.resume_reading()
    outer = asyncio.StreamWriter(transport, protocol, reader, loop)
    copies = [
        asyncio.create_task(_copy(reader, inner[1])),
        asyncio.create_task(_copy(inner[0], outer)),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        for writer in (inner[1], outer):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(64 << 10):
            writer.write(data)
            await writer.drain()


class _ServedLink(Frames):
    """A router's connection at its worker."""

    def __init__(self, server: LinkServer, arriving: _Arriving) -> None:
        super().__init__(HELLO_WITHIN_S, server.unfinished)
        self._max_frame_bytes = _HELLO_BYTES
        self._server, self._arriving = server, arriving
        self._calls: dict[int, tuple[asyncio.Task[None], asyncio.Queue[Any], type[Message]]] = {}

    def _on_frame(self, kind: int, call: int, payload: bytes) -> None:
        if kind == Kind.HELLO:
            version, keepalive = payload[: len(VERSION)], payload[len(VERSION) :]
            if version != VERSION or len(keepalive) != KEEPALIVE.size:
                return self.close(f"it speaks {payload[:40]!r}")
            self._max_frame_bytes = _MAX_FRAME_BYTES
            self._keepalive_s = max(0.05, KEEPALIVE.unpack(keepalive)[0])
            self._on_tick()
            return self._send(Kind.WELCOME, payload=VERSION)
        if kind == Kind.CALL:
            return self._begin(call, payload)
        if known := self._calls.get(call):
            task, messages, request_type = known
            if kind == Kind.MESSAGE:
                messages.put_nowait(request_type.FromString(payload))
            elif kind == Kind.CANCEL:
                task.cancel()
        return None

    def _begin(self, call: int, payload: bytes) -> None:
        number = payload[0]
        method = Method(number) if number in NUMBERS else None
        served = None if method is None else self._server._methods.get(method)
        if served is None or method is None:
            name = f"method {number}" if method is None else method.name
            error = LinkError(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here")
            return self._end_call(call, error)
        request_type, _ = MESSAGES[method]
        messages: asyncio.Queue[Any] = asyncio.Queue()
        messages.put_nowait(request_type.FromString(payload[1:]))
        task = asyncio.create_task(self._serve(call, served, messages), name=f"link:{method.name}")
        self._calls[call] = (task, messages, request_type)
        task.add_done_callback(lambda _: self._calls.pop(call, None))  # cancelled before it began
        return None

    async def _serve(self, call: int, served: Served, messages: asyncio.Queue[Any]) -> None:
        error: LinkError | None = None
        try:
            responses = served.handler(_taken(messages), CallContext())
            async with contextlib.aclosing(responses) as sent:  # type: ignore[type-var]
                async for response in sent:
                    self._send(Kind.MESSAGE, call, response.SerializeToString())
                    if self.num_unsent > served.room:
                        await self.room(served.room)
        except LinkError as ended:
            error = ended
        except asyncio.CancelledError:
            error = LinkError(grpc.StatusCode.CANCELLED, "cancelled")
            raise
        except Exception as fault:
            log.exception("a call on the link failed")
            error = LinkError(grpc.StatusCode.UNKNOWN, repr(fault))
        finally:
            if self._calls.pop(call, None) is not None:
                self._end_call(call, error)

    def _end_call(self, call: int, error: LinkError | None) -> None:
        if error is None:
            return self._send(Kind.END, call, bytes((0,)))
        status = dict(error.trailing_metadata()).get(DETAILS_KEY)
        if status is None:
            code = error.code().value[0]
            status = status_pb2.Status(code=code, message=error.details()).SerializeToString()
        return self._send(Kind.END, call, bytes((error.code().value[0],)) + status)

    def _on_lost(self, why: str) -> None:
        self._server._connections.discard(self._arriving)
        self.end()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def end(self) -> list[asyncio.Task[None]]:
        """Cancel its calls, as if the router had."""
        tasks = [task for task, _, _ in self._calls.values()]
        self._calls.clear()
        for task in tasks:
            task.cancel()
        return tasks


async def _taken(messages: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await messages.get()
