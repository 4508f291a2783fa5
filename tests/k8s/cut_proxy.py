"""A TCP proxy that can go silent like a firewall that has forgotten a connection: it stays open,
what is sent is acknowledged, and nothing comes through. Threads, for tests of threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 5.0


class CutProxy:
    """Own a listening port and the connections through it."""

    def __init__(self, url: str) -> None:
        """`url`: of the server that it leads to."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or 443)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_silent = False
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self.url = f"{parts.scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def silence(self) -> None:
        """Nothing passes any more, on connections that are there and on new ones."""
        with self._lock:
            self._is_silent = True
            for link in self._links:
                link.is_silent = True

    def heal(self) -> None:
        """New connections pass; those that were there in the silence never do again."""
        self._is_silent = False

    def cut(self) -> None:
        """End every connection that is there."""
        for link in self._links:
            link.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self._target, _CONNECT_TIMEOUT_S)
            except OSError:  # nobody there
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                link = _Link(client, server, self._is_silent)
                self._links.append(link)
            self._start(link.pass_on, client, server)
            self._start(link.pass_on, server, client)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()


class _Link:
    """One connection, two sockets."""

    def __init__(self, client: socket.socket, server: socket.socket, is_silent: bool) -> None:
        self._sockets = (client, server)
        self.is_silent = is_silent

    def pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                if not self.is_silent:
                    sink.sendall(piece)
            if not self.is_silent:  # an end is a message, too
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def cut_proxy(url: str) -> Iterator[CutProxy]:
    proxy = CutProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
