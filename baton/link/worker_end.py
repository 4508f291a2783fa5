"""The worker's end of links: its port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from baton.grpc_options import WORKER_MESSAGE_BYTES
from baton.identity.certificates import roles_of
from baton.identity.identity import Identity
from baton.identity.refusals import Refusals
from baton.link.frames import (
    AS_CALLER,
    AS_WORKER,
    CALLERS,
    MESSAGES,
    NO_CALL,
    NONCE_BYTES,
    NUMBERS,
    OTHERS_ROOM,
    Frames,
    Hello,
    Kind,
    LinkError,
    Method,
)
from baton.status import DETAILS_KEY
from baton.unfinished import Unfinished

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 5.0
"""Longest time until it is known who calls."""
_MAX_FRAME_BYTES = 2 * WORKER_MESSAGE_BYTES  # more than any request makes
_UNFINISHED_BYTES = 2 * _MAX_FRAME_BYTES  # of all links' frames that have begun to come
_ACCEPT_AGAIN_S = 1.0
_LAST_WITHIN_S = 0.5  # for what is unsent when a server stops


class CallContext:
    """What a handler may do besides answering. Methods are named as in gRPC's servicer context."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, bytes], ...] = (),
    ) -> NoReturn:
        raise LinkError(code, details, dict(trailing_metadata).get(DETAILS_KEY, b""))


Handler = Callable[[AsyncIterator[Any], CallContext], AsyncIterator[Message]]
"""Takes the caller's messages, the request first, and yields the worker's."""


@dataclass(frozen=True)
class Served:
    handler: Handler
    room: int = OTHERS_ROOM
    """Unsent bytes beyond which the handler's messages wait."""


def answers(handler: Callable[[Any, CallContext], Awaitable[Message]]) -> Served:
    """Make a method of a handler with one request and one answer."""

    async def handle(requests: AsyncIterator[Any], context: CallContext) -> AsyncIterator[Message]:
        yield await handler(await anext(requests), context)

    return Served(handle)


def streams(handler: Callable[[Any, CallContext], AsyncIterator[Message]]) -> Served:
    """Make a method of a handler with one request and any number of messages."""

    async def handle(requests: AsyncIterator[Any], context: CallContext) -> AsyncIterator[Message]:
        async with contextlib.aclosing(handler(await anext(requests), context)) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    return Served(handle)


def _close_if_ended(arrived: socket.socket, taking_in: asyncio.Task[None]) -> None:
    """Close the socket of a task that was ended before it began: nobody else does."""
    if taking_in.cancelled():
        arrived.close()


class LinkServer:
    """Own a listening port, its connections and their calls."""

    def __init__(self, methods: Mapping[Method, Served], identity: Identity, name: str) -> None:
        """Serve as `identity`, the worker's, under `name`, its `link_name`."""
        self._methods, self.identity, self.name = methods, identity, name
        self.is_stopped = False
        self.unfinished = Unfinished(_UNFINISHED_BYTES)
        self._arriving: set[asyncio.Task[None]] = set()  # and the one that takes them in
        self._links: set[_ServedLink] = set()
        self._refusals = Refusals(log)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host.strip("[]"), port), family=family)
        listening.setblocking(False)
        accepting = self._begin(self._accept_all(listening))
        accepting.add_done_callback(lambda _: listening.close())
        number: int = listening.getsockname()[1]
        return number

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return task

    async def _accept_all(self, listening: socket.socket) -> None:
        """Take connections in, where there is TLS with the certificate of the moment."""
        while True:
            try:
                arrived, peer = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:  # too many open files, say
                log.error("no connection can be taken: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            taking_in = self._begin(self._take_in(arrived, peer[0]))
            taking_in.add_done_callback(partial(_close_if_ended, arrived))

    async def _take_in(self, arrived: socket.socket, host: str) -> None:
        loop, tls = asyncio.get_running_loop(), self.identity.tls
        context = None if tls is None else tls.now.server
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                await loop.connect_accepted_socket(lambda: _ServedLink(self), arrived, ssl=context)
        except ssl.SSLError as error:
            self.tell_refusal(host, str(error))
        except (OSError, TimeoutError) as error:
            log.debug("a connection is lost as it comes: %s", error)

    def tell_refusal(self, host: str, why: str) -> None:
        self._refusals.tell("a link", host, why)

    @property
    def num_unsent(self) -> int:
        """Return the bytes that routers have yet to take."""
        return sum(link.num_unsent for link in self._links)

    async def stop(self) -> None:
        """Let what is unsent go out, then cut every connection, and wait until its calls have
        ended."""
        self.is_stopped = True
        if self._links:
            sent = [asyncio.ensure_future(link.room(0)) for link in self._links]
            _, late = await asyncio.wait(sent, timeout=_LAST_WITHIN_S)
            for each in late:
                each.cancel()
        tasks = [task for link in list(self._links) for task in link.end()]
        for link in list(self._links):
            link.close("the worker stops")
        tasks += self._arriving
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class _ServedLink(Frames):
    """A caller's connection at its worker."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__(HELLO_WITHIN_S, server.unfinished)
        self._server = server
        self._hello = self._nonce = b""
        self._roles: Collection[str] = ()
        """The caller's; empty until they are known."""
        self._calls: dict[int, tuple[asyncio.Task[None], asyncio.Queue[Any], type[Message]]] = {}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._server._links.add(self)
        loop, why = asyncio.get_running_loop(), f"no proof within {HELLO_WITHIN_S:g} s"
        loop.call_later(HELLO_WITHIN_S, self._refuse, why)
        if self._server.is_stopped:  # accepted just before
            self.close("the worker stops")

    # --- who calls -----------------------------------------------------------------------------

    def _on_unknown(self, kind: int, payload: bytes) -> None:
        """Take a frame before it is known who sends it."""
        if kind == Kind.HELLO and not self._hello:
            try:
                self._greet(payload, Hello.read(payload))
            except ValueError as error:
                self._refuse(str(error))
        elif kind == Kind.PROOF and self._nonce:
            keys, role = self._server.identity.keys, Hello.read(self._hello).role
            assert keys is not None, "only keys make a nonce"
            if not keys.verify((role,), AS_CALLER, (self._hello, self._nonce), payload):
                return self._refuse(f"it says that it is a {role!r} and does not prove it")
            self._welcome((role,))
        elif kind != Kind.PING:
            self._refuse("it does not say who it is")
        return None

    def _greet(self, payload: bytes, hello: Hello) -> None:
        identity = self._server.identity
        if hello.worker not in ("", self._server.name):
            return self._refuse(f"it wants {hello.worker!r}, and this is {self._server.name!r}")
        self._hello = payload
        if identity.keys is not None:
            self._nonce = os.urandom(NONCE_BYTES)
            signature = identity.keys.sign(AS_WORKER, (payload, self._nonce))
            return self._send(Kind.CHALLENGE, payload=self._nonce + signature)
        shown = (hello.role,) if identity.tls is None else roles_of(self._transport)
        return self._welcome(shown)

    def _welcome(self, roles: Collection[str]) -> None:
        if not any(role in callers for role in roles for callers in CALLERS.values()):
            return self._refuse(f"its certificate names no role: {roles}")
        self._roles = roles
        self._longest_bytes = _MAX_FRAME_BYTES
        self._keepalive_s = max(0.05, Hello.read(self._hello).keepalive_s)
        self._on_tick()
        return self._send(Kind.WELCOME)

    def _refuse(self, why: str) -> None:
        """Tell a stranger and the log why it is refused, and close."""
        if self._transport is None or self._roles:
            return
        host = (self._transport.get_extra_info("peername") or ("?",))[0]
        self._server.tell_refusal(host, why)
        self._end_call(NO_CALL, LinkError(grpc.StatusCode.PERMISSION_DENIED, why))
        transport, self._transport = self._transport, None
        transport.close()
        self._on_lost(why)

    def close(self, why: str) -> None:
        if self.is_open and not self._roles and not self._server.is_stopped:
            return self._refuse(why)
        return super().close(why)

    # --- calls ---------------------------------------------------------------------------------

    def _on_frame(self, kind: int, call: int, payload: bytes) -> None:
        if not self._roles:
            return self._on_unknown(kind, payload)
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
        if method is not None and not CALLERS[method].intersection(self._roles):
            why = f"{method.name} is for {' or '.join(sorted(CALLERS[method]))} alone"
            return self._end_call(call, LinkError(grpc.StatusCode.PERMISSION_DENIED, why))
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
        self._send(Kind.END, call, bytes((0,)) if error is None else error.to_bytes())

    def _on_lost(self, why: str) -> None:
        self._server._links.discard(self)
        self.end()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def end(self) -> list[asyncio.Task[None]]:
        """Cancel its calls, as if their caller had."""
        tasks = [task for task, _, _ in self._calls.values()]
        self._calls.clear()
        for task in tasks:
            task.cancel()
        return tasks


async def _taken(messages: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await messages.get()
