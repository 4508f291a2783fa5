"""A gRPC call on a stream of HTTP/2.

1. Its headers name method and caller. What is wrong with them ends it at once.
2. Its request arrives, in any number of pieces. A message that is too long is refused by its
   prefix, unread.
3. The method runs in a task. It ends with an answer, writes messages, or leaves a `Feed`: from then
   on there is no task, and messages are taken from the feed whenever the stream has room.
4. A status in the trailers ends it; or its client, its deadline or the loss of the connection does.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar
from urllib.parse import quote_from_bytes

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode

from baton.errors import BatonError, InvalidRequestError
from baton.status import shortened, status_code, status_metadata
from baton.unfinished import Unfinished
from router.door.connections.credentials import confine
from router.door.grpc.call_policy import CallPolicy
from router.request.client_request import drawn_id
from router.request.counting import AT_ONCE_BYTES, check_message

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]
Metadata = Sequence[tuple[str, str | bytes]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Methods = Mapping[bytes, Handler]
"""A server's methods, by their paths."""
T = TypeVar("T")

MAX_METADATA_BYTES = 16 << 10
_PREFIX = struct.Struct(">BI")  # compressed or not; length
_MAX_QUEUED = 16  # messages of a streaming request that nobody has read yet
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_ENCODINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_ACCEPTED = (b"grpc-accept-encoding", b"identity, deflate, gzip")
_OPENING = ((b":status", b"200"), (b"content-type", b"application/grpc"), _ACCEPTED)
_PLAIN = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # in grpc-message, besides letters and digits


@dataclass(frozen=True)
class Status:
    """How a call ends."""

    code: StatusCode
    message: str = ""
    metadata: Metadata = ()

    @property
    def trailers(self) -> list[tuple[bytes, bytes]]:
        made = [(b"grpc-status", b"%d" % self.code.value[0])]
        if self.message:
            message = quote_from_bytes(self.message.encode(errors="replace"), safe=_PLAIN)
            made.append((b"grpc-message", message.encode()))
        return made + [(name.encode(), _on_wire(value)) for name, value in self.metadata]


_OK = Status(StatusCode.OK)


def _on_wire(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return base64.b64encode(value).rstrip(b"=")


class _CallEndedError(Exception):
    """Ends the call that it is raised in, with a status."""

    def __init__(self, code: StatusCode, message: str, metadata: Metadata = ()) -> None:
        super().__init__(message)
        self.status = Status(code, message, metadata)


def status_of(error: BatonError | _CallEndedError) -> Status:
    if isinstance(error, _CallEndedError):
        return error.status
    return Status(status_code(error), shortened(error).message, status_metadata(error))


def _message(deserialize: Any, data: bytes) -> Any:
    """Raises InvalidRequestError."""
    try:
        return deserialize(data)
    except DecodeError as error:
        raise InvalidRequestError(f"unreadable message: {error}") from error


def _large_message(deserialize: Any, data: bytes) -> Any:
    """Raises InvalidRequestError."""
    check_message(data, deserialize.__self__.DESCRIPTOR)
    return _message(deserialize, data)


class Feed(ABC):
    """A source of messages, which come whether or not they are read."""

    @abstractmethod
    def follow(self, on_news: Callable[[], None]) -> None:
        """Have this called whenever there is something to take. It does not call back."""

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """Tell whether `take` shall be called again, although nothing new came."""

    @abstractmethod
    def take(self) -> Sequence[Message] | None:
        """Return what is new, if anything is; None after the end. Raises BatonError."""

    @abstractmethod
    def leave(self) -> None:
        """Let go: the reader has gone. Called once."""


class Stream(Protocol):
    """A call's side of its connection."""

    unfinished: Unfinished

    def send(self, stream_id: int, data: bytes | memoryview) -> int:
        """Return how many bytes were taken; the rest has to wait for the next `pump`."""

    def send_headers(self, stream_id: int, headers: Headers, ends: bool = False) -> None: ...
    def forget(self, stream_id: int, reset: bool) -> None:
        """Forget a call that is over. `reset`: the client, which still sends, shall stop."""

    def own(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it ends."""

    def soon(self, call: Call) -> None:
        """Have `pump` called before long, once for any number of wishes."""


class Call:
    """Own one call. For a method it is its context, named as in gRPC."""

    def __init__(self, stream: Stream, stream_id: int, policy: CallPolicy) -> None:
        self._stream, self.stream_id, self._policy = stream, stream_id, policy
        self._max_bytes = self._max_received = policy.max_message_bytes
        self._loop = asyncio.get_running_loop()
        self.arrived_s = self._loop.time()
        self.is_due = False
        """Whether `pump` will be called."""
        self.is_complete = False
        """Whether the whole request is here."""
        self._received = bytearray()
        self._request: bytes | None = None
        self._requests: asyncio.Queue[bytes | None] | None = None  # of a request that streams
        self._handler: Handler | None = None
        self.request_id = ""
        """What the answer's `x-request-id` says. It may be changed until the first message."""
        self.traceparent = ""
        self.is_open = False
        """Whether anyone may make it."""
        self.tenant: str | None = None
        """The caller's; None: any."""
        self._wbits: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._feed: Feed | None = None
        self._unsent: bytes | memoryview = b""
        self._room: asyncio.Future[None] | None = None  # a writer waits for it
        self.has_opened = False
        """Whether something was sent."""
        self._refusal = b""
        self._status: Status | None = None  # to be sent after what is unsent
        self._is_over = False

    # --- the request ---------------------------------------------------------------------------

    def begin(self, headers: Headers, methods: Methods) -> None:
        fields = dict(headers)
        self.request_id = drawn_id(fields.get(b"x-request-id", b"").decode("latin-1"))
        self.traceparent = fields.get(b"traceparent", b"").decode("latin-1")
        content_type = fields.get(b"content-type", b"")
        if fields.get(b":method") != b"POST":
            return self._refuse_http(b"405")
        if content_type not in (b"application/grpc", b"application/grpc+proto"):
            return self._refuse_http(b"415")
        try:
            self._admit(fields, headers, methods)
        except (_CallEndedError, BatonError) as error:
            self.end(status_of(error))
        return None

    @property
    def is_admitted(self) -> bool:
        return self._handler is not None

    def give_way(self, error: BatonError) -> None:
        self.end(status_of(error))

    def _refuse_http(self, status: bytes) -> None:
        """End a call that no gRPC client makes, with a status of HTTP."""
        self._refusal = status
        self.end(_OK)

    def _admit(self, fields: Mapping[bytes, bytes], headers: Headers, methods: Methods) -> None:
        num_bytes = sum(len(name) + len(value) + 32 for name, value in headers)
        if num_bytes > MAX_METADATA_BYTES:
            why = f"received metadata size exceeds limit ({num_bytes} vs. {MAX_METADATA_BYTES})"
            raise _CallEndedError(StatusCode.RESOURCE_EXHAUSTED, why)
        wire_path = fields.get(b":path", b"")
        path = wire_path.decode("latin-1")
        timeout = fields.get(b"grpc-timeout")
        if timeout is not None:
            found = _TIMEOUT.fullmatch(timeout)
            if found is None:
                raise _CallEndedError(StatusCode.INTERNAL, "grpc-timeout cannot be read")
            left_s = int(found[1]) * _UNITS_S[found[2]]
            self._timer = self._loop.call_later(left_s, self._on_deadline)
        self.is_open = self._policy.is_open(path)
        if not self.is_open and self._policy.callers is not None:
            sent = fields.get(b"authorization", b"").decode("latin-1")
            self.tenant = self._policy.callers.tenant_of(sent)
        self._handler = methods.get(wire_path)
        if self._handler is None:
            raise _CallEndedError(StatusCode.UNIMPLEMENTED, "Method not found!")
        self._max_received = self._policy.max_received_bytes(self.is_open)
        encoding = fields.get(b"grpc-encoding", b"identity")
        if encoding != b"identity":
            self._wbits = _ENCODINGS.get(encoding)
            if self._wbits is None:
                why = f"grpc-encoding {encoding.decode('latin-1')} is not taken"
                raise _CallEndedError(StatusCode.UNIMPLEMENTED, why)
        if self._handler.request_streaming:
            self._requests = asyncio.Queue()
            self._run(self._handler, self._each_request())

    def on_data(self, data: bytes) -> None:
        if self._status is not None:
            return
        self._received += data
        self._stream.unfinished.hold(self, len(data))
        try:
            while (message := self._next_message()) is not None:
                self._take(message)
        except _CallEndedError as error:
            self.end(error.status)

    def _next_message(self) -> bytes | None:
        received = self._received
        if len(received) < _PREFIX.size:
            return None
        flag, length = _PREFIX.unpack_from(received)
        self._check_length(length, "Received", self._max_received)
        end = _PREFIX.size + length
        if len(received) < end:
            return None
        message = bytes(received[_PREFIX.size : end])
        del received[:end]
        if flag == 0:
            return message
        if flag != 1 or self._wbits is None:
            raise _CallEndedError(StatusCode.INTERNAL, "a message's prefix cannot be read")
        plain = self._inflated(message, self._wbits)
        self._stream.unfinished.hold(self, len(plain))
        return plain if self._status is None else None  # it may have had to give way

    def _inflated(self, message: bytes, wbits: int) -> bytes:
        """No more of it than a message may have."""
        inflating = zlib.decompressobj(wbits)
        try:
            plain = inflating.decompress(message, self._max_received + 1)
        except zlib.error as error:
            why = f"a message cannot be decompressed: {error}"
            raise _CallEndedError(StatusCode.INTERNAL, why) from error
        self._check_length(len(plain), "Received decompressed", self._max_received)
        if not inflating.eof:
            raise _CallEndedError(StatusCode.INTERNAL, "a compressed message is cut off")
        return plain

    def _check_length(self, length: int, which: str, most: int) -> None:
        if length > most:
            why = f"{which} message larger than max ({length} vs. {most})"
            raise _CallEndedError(StatusCode.RESOURCE_EXHAUSTED, why)

    def _take(self, message: bytes) -> None:
        if self._requests is not None:
            if self._requests.qsize() >= _MAX_QUEUED:
                why = "messages come faster than they are answered"
                raise _CallEndedError(StatusCode.RESOURCE_EXHAUSTED, why)
            self._requests.put_nowait(message)
        elif self._request is not None:
            raise _CallEndedError(StatusCode.INTERNAL, "more than one request message")
        else:
            self._request = message

    def on_end(self) -> None:
        """Run the method, unless it runs already: the client sends no more."""
        self.is_complete = True
        if self._status is not None:
            return
        if self._requests is None:
            self._stream.unfinished.let_go(self)
        if self._received:
            self.end(Status(StatusCode.INTERNAL, "the request is cut off"))
        elif self._requests is not None:
            self._requests.put_nowait(None)
        elif self._request is None:
            self.end(Status(StatusCode.INTERNAL, "no request message"))
        else:
            assert self._handler is not None
            data, self._request = self._request, b""
            self._run(self._handler, data)

    async def _read(self, data: bytes) -> Any:
        """Raises InvalidRequestError, PermissionDeniedError, and what `off_loop` does."""
        assert self._handler is not None
        deserialize = self._handler.request_deserializer
        if len(data) <= AT_ONCE_BYTES:
            message = _message(deserialize, data)
        else:
            api, reading = self._policy.api, functools.partial(_large_message, deserialize, data)
            message = await api.off_loop(reading, self.tenant, len(data)) if api else reading()
        confine(message, self.tenant)
        return message

    async def _each_request(self) -> AsyncIterator[Any]:
        assert self._requests is not None
        while (data := await self._requests.get()) is not None:
            if not self._received and self._requests.empty():
                self._stream.unfinished.let_go(self)
            yield await self._read(data)

    # --- the method ----------------------------------------------------------------------------

    def _run(self, handler: Handler, request: bytes | AsyncIterator[Any]) -> None:
        behaviour: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        self._task = self._loop.create_task(self._answer(behaviour, request))
        self._stream.own(self._task)

    async def _answer(self, behaviour: Any, request: bytes | AsyncIterator[Any]) -> None:
        """The outermost frame of a method: whatever it raises ends its own call alone."""
        status = _OK
        try:
            message = await self._read(request) if isinstance(request, bytes) else request
            result = behaviour(message, self)
            if hasattr(result, "__anext__"):
                async with aclosing(result):
                    async for message in result:
                        await self.write(message)
            else:
                answer = await result
                if isinstance(answer, Feed):
                    return self._follow(answer)
                if answer is not None:
                    await self.write(answer)
        except (_CallEndedError, BatonError) as error:
            status = status_of(error)
        except Exception as error:
            log.exception("a method failed")
            status = Status(StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        self.end(status)
        return None

    def _follow(self, feed: Feed) -> None:
        self._task = None
        self._feed = feed
        feed.follow(self.on_news)
        self.on_news()

    def on_news(self) -> None:
        if not self.is_due:
            self._stream.soon(self)

    async def write(self, message: Message) -> None:
        """Send a message, and return once it is on its way. One at a time."""
        self._unsent = self._framed((message,))
        self.on_news()
        while self._unsent and not self._is_over:
            self._room = self._loop.create_future()
            await self._room

    async def abort(
        self, code: StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        raise _CallEndedError(code, details, trailing_metadata)

    def _framed(self, messages: Iterable[Message]) -> bytes:
        parts: list[bytes] = []
        for message in messages:
            data = message.SerializeToString()
            if len(data) > self._max_bytes:
                self._check_length(len(data), "Sent", self._max_bytes)
            parts += (_PREFIX.pack(0, len(data)), data)
        return b"".join(parts)

    # --- what goes out -------------------------------------------------------------------------

    def pump(self) -> bool:
        """Put out what there is and has room. False: the stream is full."""
        while not self._is_over:
            if self._unsent:
                if not self._send():
                    return False
            elif self._status is not None:
                self._finish(self._status)
            elif self._feed is not None:
                has_more = self._feed.has_more
                if not self._take_news(self._feed):
                    return True
                if not has_more:
                    return not self._unsent or self._send()
            else:
                if self._room is not None and not self._room.done():
                    self._room.set_result(None)
                return True
        return True

    @property
    def _opening(self) -> Headers:
        return (*_OPENING, (b"x-request-id", self.request_id.encode()))

    def _send(self) -> bool:
        """Put out what is unsent. Tell whether all was taken."""
        if not self.has_opened:
            self.has_opened = True
            self._stream.send_headers(self.stream_id, self._opening)
        unsent = self._unsent
        num_taken = self._stream.send(self.stream_id, unsent)
        if num_taken == len(unsent):
            self._unsent = b""
            return True
        self._unsent = memoryview(unsent)[num_taken:]
        return False

    def _take_news(self, feed: Feed) -> bool:
        """Take what is new from the feed. False: nothing is."""
        try:
            messages = feed.take()
            if messages is None:
                self._status = _OK
            else:
                self._unsent = self._framed(messages)
                return bool(messages)
        except (_CallEndedError, BatonError) as error:
            self._status = status_of(error)
        return True

    # --- the end -------------------------------------------------------------------------------

    def end(self, status: Status) -> None:
        """End the call with a status, after what its method has written."""
        if self._status is None:
            self._status = status
            self._drop_input()
            self.on_news()

    def _drop_input(self) -> None:
        self._received, self._request = bytearray(), b""
        self._stream.unfinished.let_go(self)

    def _finish(self, status: Status) -> None:
        headers = status.trailers if self.has_opened else [*self._opening, *status.trailers]
        if self._refusal:
            headers = [(b":status", self._refusal)]
        self._stream.send_headers(self.stream_id, headers, ends=True)
        self.cancel()
        self._stream.forget(self.stream_id, reset=not self.is_complete)

    def _on_deadline(self) -> None:
        """End the call at once: what is unsent has no reader any more."""
        if not self._is_over:
            self._unsent = b""
            self._finish(Status(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def expire(self, before_s: float) -> None:
        """Refuse it if its request began to arrive before then, and is not there yet."""
        if not self.is_complete and self._requests is None and self.arrived_s < before_s:
            self.end(Status(StatusCode.DEADLINE_EXCEEDED, "the request does not arrive"))

    def cancel(self) -> None:
        """End it without a word: its client has gone."""
        self._is_over = True
        self._status = self._status or _OK
        self._unsent = b""
        self._drop_input()
        if self._timer is not None:
            self._timer.cancel()
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.leave()
        if self._task is not None:
            self._task.cancel()
