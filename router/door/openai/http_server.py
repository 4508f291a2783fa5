"""The HTTP server: uvicorn on the router's own event loop, over h11.

What uvicorn leaves out is here: a limit on the time that a request may take to come in, refusals in
OpenAI's shape, certificates that change while it runs, and no handling of signals.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.config.router import RouterConfig
from router.door.openai.errors import shape

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # longer than the pools of common clients and proxies keep a connection
_MAX_HEADER_BYTES = 32 << 10
_GRACE_S = 2.0  # for the 408 of a body that comes too slowly
_STOP_WITHIN_S = 1


class _Protocol(H11Protocol):
    """One connection. Until a request is there whole, a timer runs."""

    def __init__(self, *, read_timeout_s: float, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._timeout_s = read_timeout_s + _GRACE_S
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._untime()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._time()
        else:
            self._untime()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._untime()  # from here on it is uvicorn's keep-alive that ends it

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has too large a head."""
        body = json.dumps(shape(400, msg)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _time(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._timeout_s, self._end)

    def _untime(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end(self) -> None:
        self._reading = None
        self.transport.close()


class _Server(uvicorn.Server):
    """Without uvicorn's own signals. Its sockets stay ours: it gets copies."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([self._listener.dup()])

    async def renew(self, context: ssl.SSLContext) -> None:
        """New connections get this context; those that are there keep theirs."""
        before = list(self.servers)
        self.config.ssl = context
        await super().startup([self._listener.dup()])
        for server in before:
            server.close()


class HttpServer:
    """Own the listening socket and uvicorn on it."""

    def __init__(
        self,
        asgi: Callable[..., Any],
        config: RouterConfig,
        listener: socket.socket,
        context: ssl.SSLContext | None,
    ) -> None:
        """`context` None: plain text."""
        protocol: Any = partial(_Protocol, read_timeout_s=config.http_read_timeout_s)
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
        self._config.ssl = context
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self.listener = listener
        self.port: int = self.listener.getsockname()[1]
        self._server = _Server(self._config, self.listener)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, on_fault: Callable[[asyncio.Future[None]], None]) -> None:
        """Listen. `on_fault` gets its task if it ends."""
        self._serving = asyncio.create_task(self._server._serve())
        self._serving.add_done_callback(on_fault)

    async def renew(self, context: ssl.SSLContext) -> None:
        if self._server.started:
            await self._server.renew(context)

    async def stop(self) -> None:
        """Answers under way have a second to end."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving})
        self.listener.close()
