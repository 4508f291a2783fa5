"""A TCP proxy that can go silent like a host that hangs (connections stay, nothing passes), strand
its connections like a host that vanished and came back, or cut them all and take new ones."""

from __future__ import annotations

import asyncio


class Proxy:
    """Own a listening port and what passes through it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._is_taking = True
        self.address = ""

    @classmethod
    async def to(cls, target: str) -> Proxy:
        proxy = cls(target)
        await proxy.start()
        return proxy

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def strand(self) -> None:
        """Present connections get no further byte, and do not learn of it; new ones serve."""
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()

    def lead_to(self, target: str) -> None:
        """New connections, as behind a Service of which one pod leaves; old ones stay."""
        self._target = target

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        self._writers.add(writer)
        try:
            other_reader, other_writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:  # the target has gone
            writer.transport.abort()
            return
        self._writers.add(other_writer)
        if writer.transport.is_closing() or not self._is_taking:
            writer.transport.abort()
            other_writer.transport.abort()
            return
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        open_ = self._open
        try:
            while data := await source.read(1 << 16):
                await open_.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return
        finally:
            sink.close()

    async def close(self) -> None:
        assert self._server is not None
        self._is_taking = False
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()
        await asyncio.sleep(0)  # aborted transports close in the loop's next round
