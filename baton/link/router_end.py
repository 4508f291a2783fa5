"""The caller's end of a link: a router's, or an operator's."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from baton.identity.certificates import roles_of
from baton.identity.identity import Identity
from baton.link.frames import (
    AS_CALLER,
    AS_WORKER,
    MAX_FRAME_BYTES,
    MESSAGES,
    NO_CALL,
    NONCE_BYTES,
    Frames,
    Hello,
    Kind,
    LinkError,
    Method,
)

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class LinkRefusedError(ConnectionRefusedError):
    """The listener is not the worker that is meant, or does not take this caller."""


class Caller(Protocol):
    """The code that made a call. Its methods run on the event loop, and none may block."""

    def on_message(self, message: Any) -> None: ...
    def on_end(self, error: LinkError | None) -> None:
        """Hear that nothing more comes. None: the worker ended the call in order."""


class Call:
    """A call that was begun."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def send(self, message: Message) -> None:
        self._link._send(Kind.MESSAGE, self._number, message.SerializeToString())

    def cancel(self) -> None:
        """Cancel the call; its caller hears no more of it."""
        self._link._cancel(self._number)


class Link(Frames):
    """Own a connection to a worker, and the calls on it."""

    def __init__(self, keepalive_s: float, identity: Identity, worker: str = "") -> None:
        super().__init__(keepalive_s)
        self._identity = identity
        nonce = os.urandom(NONCE_BYTES)
        self._hello = Hello(keepalive_s, nonce, identity.role, worker).to_bytes()
        self._has_proved = identity.keys is None
        """Whether the worker has, where it must."""
        self._calls: dict[int, tuple[Caller, type[Message]]] = {}
        self._num_calls = 0
        self._welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the connection was lost."""

    @classmethod
    async def connect(
        cls,
        address: str,
        identity: Identity,
        *,
        keepalive_s: float,
        timeout_s: float,
        worker: str = "",
    ) -> Link:
        """Connect to a worker that answers, and that takes this caller. `worker`: its `link_name`.

        Raises OSError where nobody listens, LinkRefusedError where somebody else does, or refuses,
        and ConnectionResetError or TimeoutError where somebody does and does not answer.
        """
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        link = cls(keepalive_s, identity, worker)
        secure = None if identity.tls is None else identity.tls.now.client
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: link, host.strip("[]"), int(port), ssl=secure)
                link._send(Kind.HELLO, payload=link._hello)
                await link._welcomed
        except BaseException:
            link.close("it did not answer in time")
            raise
        return link

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._identity.tls is not None and "worker" not in roles_of(transport):
            self._leave("its certificate does not name baton:worker")

    def call(self, method: Method, request: Message, caller: Caller) -> Call:
        """Begin a call. If the connection is lost already, the caller hears of it at once."""
        request_type, response_type = MESSAGES[method]
        assert isinstance(request, request_type), request
        self._num_calls += 1
        number = self._num_calls
        if self._transport is None:
            caller.on_end(LinkError(grpc.StatusCode.UNAVAILABLE, "the connection is lost"))
        else:
            self._calls[number] = (caller, response_type)
            payload = bytes((method,)) + request.SerializeToString()
            self._send(Kind.CALL, number, payload)
        return Call(self, number)

    async def ask(self, method: Method, request: Message, timeout_s: float) -> Any:
        """Make a call and return its one answer. Raises LinkError; DEADLINE_EXCEEDED when none
        comes in time."""
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
            self._send(Kind.CANCEL, number)

    def _on_frame(self, kind: int, call: int, payload: bytes) -> None:
        if kind == Kind.MESSAGE:
            if known := self._calls.get(call):
                caller, response_type = known
                caller.on_message(response_type.FromString(payload))
        elif kind == Kind.END and call == NO_CALL:
            self._leave(f"it refuses the link: {_error_of(payload)}")
        elif kind == Kind.END:
            if known := self._calls.pop(call, None):
                known[0].on_end(_error_of(payload))
        elif not self._welcomed.done():
            self._on_unproved(kind, payload)

    def _on_unproved(self, kind: int, payload: bytes) -> None:
        keys = self._identity.keys
        if kind == Kind.CHALLENGE:
            parts = (self._hello, payload[:NONCE_BYTES])
            if keys is None:
                return self._leave("it wants keys, and this side has none (internal.identity)")
            if not keys.verify(("worker",), AS_WORKER, parts, payload[NONCE_BYTES:]):
                return self._leave("it is no worker of this cluster")
            self._has_proved = True
            return self._send(Kind.PROOF, payload=keys.sign(AS_CALLER, parts))
        if kind == Kind.WELCOME:
            if not self._has_proved:
                return self._leave("it does not prove that it is a worker of this cluster")
            self._longest_bytes = MAX_FRAME_BYTES
            self._welcomed.set_result(None)
        return None

    def _leave(self, why: str) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(LinkRefusedError(why))
        self.close(why)

    def _on_lost(self, why: str) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(ConnectionResetError(why))
        if not self.lost.done():
            self.lost.set_result(why)
        calls, self._calls = self._calls, {}
        for caller, _ in calls.values():
            caller.on_end(LinkError(grpc.StatusCode.UNAVAILABLE, why))


async def ask_once(
    address: str,
    identity: Identity,
    method: Method,
    request: Message,
    timeout_s: float,
    worker: str = "",
) -> Any:
    """Ask one question on a link of its own, and return the answer. Raises what `connect` and `ask`
    do."""
    link = await Link.connect(
        address, identity, keepalive_s=timeout_s, timeout_s=timeout_s, worker=worker
    )
    try:
        return await link.ask(method, request, timeout_s)
    finally:
        link.close("it was asked")


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
