"""The way from pods to the API server, which listens on this machine's loopback: each pod has it on
its own. The server's certificate is one of 127.0.0.1, so that clients trust it there, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from urllib.parse import urlsplit

from tests.k8s.kubelet.kernel import Namespace, enter

_HOST, _PORT = "127.0.0.1", 443
_PIECE_BYTES = 1 << 16
_STOP_S = 5.0


ENVIRONMENT = {"KUBERNETES_SERVICE_HOST": _HOST, "KUBERNETES_SERVICE_PORT": str(_PORT)}
"""By which a pod finds it."""


class ApiGate:
    """Own the listening sockets in all pods, and a thread that passes on what comes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or 443)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="api-gate", daemon=True)
        self._thread.start()

    def open_in(self, pid: int) -> None:
        """In the network of a process; it is there on return. When the network goes nobody can
        reach it any more."""
        listener = _listener_in(pid)
        asyncio.run_coroutine_threadsafe(self._serve(listener), self._loop).result(_STOP_S)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        self._servers.append(await asyncio.start_server(self._take, sock=listener))

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError):
            try:
                server_reader, server_writer = await asyncio.open_connection(*self._target)
                there = _pass_on(reader, server_writer)
                await asyncio.gather(there, _pass_on(server_reader, writer))
            finally:
                writer.close()
        self._tasks.discard(task)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


def _listener_in(pid: int) -> socket.socket:
    """A thread is in one network for good, a socket in that of the thread that made it."""
    made: list[socket.socket] = []

    def listen() -> None:
        descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            enter(descriptor, Namespace.NETWORK)
        finally:
            os.close(descriptor)
        made.append(socket.create_server((_HOST, _PORT)))

    thread = threading.Thread(target=listen, name="api-gate-listen")
    thread.start()
    thread.join()
    return made[0]
