"""A worker's liveness over HTTP, for probes that have no key: `GET /live`, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

_WITHIN_S = 5.0
_MAX_BYTES = 4096
_REQUESTS = (b"GET /live HTTP/1.1\r\n", b"GET /live HTTP/1.0\r\n")


@contextlib.asynccontextmanager
async def live_port(host: str, port: int, is_live: Callable[[], bool]) -> AsyncIterator[str]:
    """Serve the probe's port; yields its host:port. Raises OSError."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unread = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.closing(writer), contextlib.suppress(*unread):
            async with asyncio.timeout(_WITHIN_S):
                asked = await reader.readuntil(b"\r\n\r\n")
                status = "404 Not Found"
                if asked.startswith(_REQUESTS):
                    status = "200 OK" if is_live() else "503 Service Unavailable"
                head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                await writer.drain()

    server = await asyncio.start_server(answer, host.strip("[]"), port, limit=_MAX_BYTES)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
