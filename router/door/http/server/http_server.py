"""The HTTP server: uvicorn on the router's own event loop, over h11.

What uvicorn leaves out is here: a limit on the time that a request may take to come in, and on what
reading it may cost; refusals in OpenAI's shape; certificates that change while it runs; and no
handling of signals.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.door.connections.acceptor import Acceptor
from router.door.connections.sharing import Allowance, Sharing
from router.door.http.server.errors import shape

_KEEP_ALIVE_S = 75  # longer than the pools of common clients and proxies keep a connection
_MAX_HEADER_BYTES, _MAX_HEADER_LINES = 32 << 10, 256
_MAX_AHEAD_BYTES = 64 << 10
_EVENTS_A_TURN, _OF_REQUEST = 32, 4  # of h11's: 20 us each
_GRACE_S = 2.0  # for the 408 of a body that comes too slowly
_STOP_WITHIN_S = 1


class _Lines(ReceiveBuffer):
    """Refuses heads and trailers of many lines: each costs h11 5 us, and a byte or two."""

    def maybe_extract_lines(self) -> Any:
        head = self._data[: self._data.find(b"\n\r\n")]
        if head.count(b"\n") > _MAX_HEADER_LINES:
            raise h11.RemoteProtocolError("too many header lines")
        return super().maybe_extract_lines()


class _H11(h11.Connection):
    """h11's, but that it finds only so many events in a turn, and counts them."""

    num_left = 0

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._receive_buffer = self.buffer = _Lines()
        self.allowance = Allowance()

    def next_event(self) -> Any:
        if self.num_left <= 0:
            return h11.NEED_DATA
        event = super().next_event()
        if event is h11.NEED_DATA or event is h11.PAUSED:
            return event
        self.num_left -= 1
        if isinstance(event, h11.Data) and self.our_state is not h11.DONE:
            self.allowance.earn(len(event.data) >> 8)
        elif isinstance(event, h11.Request):
            self.allowance.earn(_OF_REQUEST)
        return event


class _Flow(FlowControl):
    """uvicorn's, but that nothing is read while the connection waits for its turn."""

    is_waiting = False

    def wait(self) -> None:
        self.pause_reading()
        self.is_waiting = True

    def resume_reading(self) -> None:
        if not self.is_waiting:
            super().resume_reading()


class _Protocol(H11Protocol):
    """One connection. Until a request is there whole, a timer runs."""

    conn: _H11
    flow: _Flow
    arriving: asyncio.Task[None] | None = None

    def __init__(self, *, read_timeout_s: float, sharing: Sharing, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.conn = _H11(_MAX_HEADER_BYTES)
        self._sharing = sharing
        self._timeout_s = read_timeout_s + _GRACE_S
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._untime()
        self._sharing.lose(self)
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def leave(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def handle_events(self) -> None:
        """Read in a turn, now or later: there may be something."""
        if not self.flow.is_waiting and self._sharing.turns.take(self._take_turn):
            self.flow.wait()

    def _take_turn(self) -> bool:
        """Read for a turn. False: all that came is read."""
        self.flow.is_waiting = False
        if self.transport.is_closing():
            return False
        self.flow.resume_reading()
        self.conn.num_left = _EVENTS_A_TURN
        super().handle_events()
        is_whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        self._untime() if is_whole else self._time()
        is_allowed = self.conn.allowance.spend(_EVENTS_A_TURN - self.conn.num_left)
        if not is_allowed or (is_whole and len(self.conn.buffer) > _MAX_AHEAD_BYTES):
            self._sharing.note_ended("too much that is no request")
            self.transport.abort()
        elif self.conn.num_left <= 0 and not self.transport.is_closing():
            self.flow.wait()
        return self.flow.is_waiting

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._untime()  # from here on it is uvicorn's keep-alive that ends it

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too large a head."""
        body = json.dumps(shape(400, msg)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", uuid.uuid4().hex.encode()),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _time(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._timeout_s, self.leave)

    def _untime(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


class _Server(uvicorn.Server):
    """Without uvicorn's own signals and sockets."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self.started = True

    def new_connection(self) -> Any:
        made: Any = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state={})


class HttpServer:
    """Own uvicorn behind a listening socket."""

    def __init__(
        self,
        asgi: Callable[..., Any],
        listener: socket.socket,
        context: ssl.SSLContext | None,
        sharing: Sharing,
        read_timeout_s: float,
    ) -> None:
        """`context` None: plain text."""
        protocol: Any = partial(_Protocol, read_timeout_s=read_timeout_s, sharing=sharing)
        self._config = uvicorn.Config(
            asgi,
            loop="none",
            http=protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_WITHIN_S,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        self._config.load()
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self.listener = listener
        self.port: int = self.listener.getsockname()[1]
        self._server = _Server(self._config)
        self.acceptor = Acceptor(listener, sharing, self._server.new_connection)
        self.acceptor.context = context
        self._serving: asyncio.Task[None] | None = None

    def start(self, on_fault: Callable[[asyncio.Future[None]], None]) -> None:
        """Listen. `on_fault` gets its task if it ends."""
        self._serving = asyncio.create_task(self._server._serve())
        self._serving.add_done_callback(on_fault)
        self.acceptor.start()

    async def stop(self) -> None:
        """Stop; answers under way have a second to end."""
        await self.acceptor.stop()
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving})
