"""The connection between a router and a worker: calls as frames on one TCP connection.

A frame is `<u32 length of the payload, u8 kind, u32 call>`, little-endian, and the payload. The
first frame is HELLO with the router's `keepalive_s`, answered by WELCOME, so that a peer whose
process stands still never counts as connected. A router begins calls (CALL: u8 method and the
request). Either side sends messages of a call. The worker ends it (END: u8 status code and a
google.rpc.Status), the router cancels it. Messages are protobuf.

Each side sends PING when it was silent for `keepalive_s`, and gives up a peer from which it has
heard nothing for twice that, however busy or gone.

Nothing waits for a task: whole frames are handed on as they are read. What is sent goes to the
socket at once, or into the transport's buffer. A sender that may fall behind looks at `room`.

The worker's gRPC server has the same port: a connection that begins with HTTP/2's preface is passed
on to it, byte by byte. Where TLS is configured (`link_tls`) a link without it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from baton.link_tls import LinkTls
from baton.status import DETAILS_KEY
from baton.v1 import worker_pb2

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<IBI")
_VERSION = b"baton link 1"
_KEEPALIVE = struct.Struct("<f")
_HTTP2 = b"PRI * HTTP/2.0"
_TLS_HANDSHAKE = b"\x16"
_LOW_BYTES, _HIGH_BYTES = 16 << 10, 64 << 10  # of the buffer: when `room` is given, and taken
MAX_FRAME_BYTES = 256 << 20
"""A longer one ends the connection: no request makes one (`max_message_bytes` bounds prompts)."""
TOKENS_ROOM, OTHERS_ROOM = 1 << 20, _HIGH_BYTES
"""Bytes unsent up to which more are taken: tokens go before all else."""
HELLO_WITHIN_S = 5.0
_ACCEPT_AGAIN_S = 1.0
_LOOK_S = 0.01
_LAST_WITHIN_S = 0.5  # for what is unsent when a server stops
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Kind(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    CALL = 3
    MESSAGE = 4
    END = 5
    CANCEL = 6
    PING = 7


class Method(enum.IntEnum):
    """What a router asks of a worker. A session ends with its connection."""

    SESSION = 1
    PREFILL = 2
    ATTACH = 3
    FOLLOW_KV = 4
    CANCEL = 5


_NUMBERS = frozenset(Method)
_MESSAGES: dict[Method, tuple[type[Message], type[Message]]] = {
    Method.SESSION: (worker_pb2.SessionRequest, worker_pb2.SessionResponse),
    Method.PREFILL: (worker_pb2.PrefillRequest, worker_pb2.PrefillResponse),
    Method.ATTACH: (worker_pb2.AttachRequest, worker_pb2.AttachResponse),
    Method.CANCEL: (worker_pb2.Cancel, worker_pb2.CancelResponse),
    Method.FOLLOW_KV: (worker_pb2.SubscribeKvRequest, worker_pb2.SubscribeKvResponse),
}


class LinkError(Exception):
    """A call's end by its worker, or by the loss of the connection (UNAVAILABLE). As gRPC's errors
    it has `code`, `details` and `trailing_metadata`."""

    def __init__(self, code: grpc.StatusCode, details: str, status: bytes = b"") -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._status = code, details, status

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((DETAILS_KEY, self._status),) if self._status else ()


class _Frames(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._has_heard = self._has_sent = True
        self._num_silent = 0  # ticks in a row
        self._tick: asyncio.TimerHandle | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._why = ""

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    # --- asyncio's callbacks -------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_BYTES, low=_LOW_BYTES)
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(self._keepalive_s / 2, self._on_tick)

    def pause_writing(self) -> None:
        self._resumed.clear()

    def resume_writing(self) -> None:
        self._resumed.set()

    def data_received(self, data: bytes) -> None:
        self._has_heard = True
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _HEADER.size:
            length, kind, call = _HEADER.unpack_from(received, at)
            if length > MAX_FRAME_BYTES:
                return self.close(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
            end = at + _HEADER.size + length
            if end > len(received):
                break
            payload = bytes(received[at + _HEADER.size : end])
            at = end
            try:
                self._on_frame(kind, call, payload)
            except (DecodeError, ValueError) as error:
                return self.close(f"a frame cannot be read: {error}")
            if self._transport is None:
                return None
        del received[:at]
        return None

    def connection_lost(self, error: Exception | None) -> None:
        if self._tick is not None:
            self._tick.cancel()
        was_open, self._transport = self._transport is not None, None
        self._resumed.set()
        if was_open:
            self._on_lost(str(error or "the other side closed the connection"))

    # --- sending -------------------------------------------------------------------------------

    def _send(self, kind: _Kind, call: int = 0, payload: bytes = b"") -> None:
        if self._transport is not None:
            self._has_sent = True
            self._transport.write(_HEADER.pack(len(payload), kind, call) + payload)

    async def room(self, num_bytes: int) -> None:
        """Return when no more than this is unsent, or the connection is lost."""
        while self.num_unsent > num_bytes:
            if self._resumed.is_set():  # below the marks at which the transport says so
                await asyncio.sleep(_LOOK_S)
            await self._resumed.wait()
            if self._transport is None:
                return

    @property
    def num_unsent(self) -> int:
        """Bytes."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self, why: str) -> None:
        """Cut the connection; what is unsent is lost."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
            self._on_lost(why)

    def _on_tick(self) -> None:
        """Twice in `keepalive_s`. Silence is counted in ticks: a process that stood still has seen
        one of them."""
        self._num_silent = 0 if self._has_heard else self._num_silent + 1
        if self._num_silent >= 4:
            return self.close(f"nothing was heard for {2 * self._keepalive_s:g} s")
        if not self._has_sent:
            self._send(_Kind.PING)
        self._has_heard = self._has_sent = False
        if self._tick is not None:
            self._tick.cancel()
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(self._keepalive_s / 2, self._on_tick)
        return None

    # --- of either side ------------------------------------------------------------------------

    def _on_frame(self, kind: int, call: int, payload: bytes) -> None:
        raise NotImplementedError

    def _on_lost(self, why: str) -> None:
        raise NotImplementedError


# --- the router's end -----------------------------------------------------------------------------


class Caller(Protocol):
    """Who made a call. Its methods run on the event loop, and none may block."""

    def on_message(self, message: Any) -> None: ...
    def on_end(self, error: LinkError | None) -> None:
        """Nothing more comes. None: the worker ended it in order."""


class Call:
    """A call that was begun."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def send(self, message: Message) -> None:
        self._link._send(_Kind.MESSAGE, self._number, message.SerializeToString())

    def cancel(self) -> None:
        """Its caller hears no more of it."""
        self._link._cancel(self._number)


class Link(_Frames):
    """Own a connection to a worker, and the calls on it."""

    def __init__(self, keepalive_s: float, tls: LinkTls | None) -> None:
        super().__init__(keepalive_s)
        self._tls = tls
        self._calls: dict[int, tuple[Caller, type[Message]]] = {}
        self._num_calls = 0
        self._welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the connection was lost."""

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        keepalive_s: float,
        timeout_s: float,
        tls: LinkTls | None = None,
    ) -> Link:
        """Connect to a worker that answers. Raises OSError where nobody listens, and
        ConnectionResetError or TimeoutError where somebody does and does not answer."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        link = cls(keepalive_s, tls)
        secure = None if tls is None else tls.context
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: link, host.strip("[]"), int(port), ssl=secure)
                link._send(_Kind.HELLO, payload=_VERSION + _KEEPALIVE.pack(keepalive_s))
                await link._welcomed
        except BaseException:
            link.close("it did not answer in time")
            raise
        return link

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._tls is not None and (why := self._tls.wrong_peer(transport)):
            self.close(why)

    def call(self, method: Method, request: Message, caller: Caller) -> Call:
        """Begin a call. If the connection is lost already, the caller hears of it at once."""
        request_type, response_type = _MESSAGES[method]
        assert isinstance(request, request_type), request
        self._num_calls += 1
        number = self._num_calls
        if self._transport is None:
            caller.on_end(LinkError(grpc.StatusCode.UNAVAILABLE, "the connection is lost"))
        else:
            self._calls[number] = (caller, response_type)
            payload = bytes((method,)) + request.SerializeToString()
            self._send(_Kind.CALL, number, payload)
        return Call(self, number)

    async def ask(self, method: Method, request: Message, timeout_s: float) -> Any:
        """The one message that answers a call. Raises LinkError; DEADLINE_EXCEEDED when none comes
        in time."""
        answer = _Answer()
        call = self.call(method, request, answer)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer.future
        except TimeoutError:
            raise LinkError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
        finally:
            call.cancel()

    def _cancel(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._send(_Kind.CANCEL, number)

    def _on_frame(self, kind: int, call: int, payload: bytes) -> None:
        if kind == _Kind.MESSAGE:
            if known := self._calls.get(call):
                caller, response_type = known
                caller.on_message(response_type.FromString(payload))
        elif kind == _Kind.END:
            if known := self._calls.pop(call, None):
                known[0].on_end(_error_of(payload))
        elif kind == _Kind.WELCOME and not self._welcomed.done():
            self._welcomed.set_result(None)

    def _on_lost(self, why: str) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(ConnectionResetError(why))
        if not self.lost.done():
            self.lost.set_result(why)
        calls, self._calls = self._calls, {}
        for caller, _ in calls.values():
            caller.on_end(LinkError(grpc.StatusCode.UNAVAILABLE, why))


class _Answer:
    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def on_message(self, message: Any) -> None:
        if not self.future.done():
            self.future.set_result(message)

    def on_end(self, error: LinkError | None) -> None:
        if not self.future.done():
            none = LinkError(grpc.StatusCode.INTERNAL, "it ended without an answer")
            self.future.set_exception(error or none)


def _error_of(payload: bytes) -> LinkError | None:
    code = _CODES.get(payload[0], grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return None
    status = payload[1:]
    return LinkError(code, status_pb2.Status.FromString(status).message, status)


# --- the worker's end -----------------------------------------------------------------------------


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


class _ServedLink(_Frames):
    """A router's connection at its worker."""

    def __init__(self, server: LinkServer, arriving: _Arriving) -> None:
        super().__init__(HELLO_WITHIN_S)
        self._server, self._arriving = server, arriving
        self._calls: dict[int, tuple[asyncio.Task[None], asyncio.Queue[Any], type[Message]]] = {}

    def _on_frame(self, kind: int, call: int, payload: bytes) -> None:
        if kind == _Kind.HELLO:
            version, keepalive = payload[: len(_VERSION)], payload[len(_VERSION) :]
            if version != _VERSION or len(keepalive) != _KEEPALIVE.size:
                return self.close(f"it speaks {payload[:40]!r}")
            self._keepalive_s = max(0.05, _KEEPALIVE.unpack(keepalive)[0])
            self._on_tick()
            return self._send(_Kind.WELCOME, payload=_VERSION)
        if kind == _Kind.CALL:
            return self._begin(call, payload)
        if known := self._calls.get(call):
            task, messages, request_type = known
            if kind == _Kind.MESSAGE:
                messages.put_nowait(request_type.FromString(payload))
            elif kind == _Kind.CANCEL:
                task.cancel()
        return None

    def _begin(self, call: int, payload: bytes) -> None:
        number = payload[0]
        method = Method(number) if number in _NUMBERS else None
        served = None if method is None else self._server._methods.get(method)
        if served is None or method is None:
            name = f"method {number}" if method is None else method.name
            error = LinkError(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here")
            return self._end_call(call, error)
        request_type, _ = _MESSAGES[method]
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
                    self._send(_Kind.MESSAGE, call, response.SerializeToString())
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
            return self._send(_Kind.END, call, bytes((0,)))
        status = dict(error.trailing_metadata()).get(DETAILS_KEY)
        if status is None:
            code = error.code().value[0]
            status = status_pb2.Status(code=code, message=error.details()).SerializeToString()
        return self._send(_Kind.END, call, bytes((error.code().value[0],)) + status)

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
