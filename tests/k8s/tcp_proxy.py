"""A TCP proxy of threads, which can also go silent like a firewall that has forgotten a connection:
it stays open, what is sent is acknowledged, and nothing comes through."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 5.0


class TcpProxy:
    """Own listening sockets and the connections through them."""

    def __init__(self, url: str) -> None:
        """`url`: of the server that it leads to."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or 443)
        self._is_silent = False
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._links: list[_Link] = []
        self._accepting: list[threading.Thread] = []
        self._passing: list[threading.Thread] = []

    def listen(self, listener: socket.socket) -> None:
        """On one more socket, which it owns from now on."""
        self._listeners.append(listener)
        self._accepting.append(_started(self._accept, listener))

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
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._accepting:
            thread.join()
        self.cut()
        for thread in self._passing:
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
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
                self._passing.append(_started(link.pass_on, client, server))
                self._passing.append(_started(link.pass_on, server, client))


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


def _started(work: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


class CutProxy(TcpProxy):
    """One that listens on loopback, at `url`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{urlsplit(url).scheme}://127.0.0.1:{listener.getsockname()[1]}"
        self.listen(listener)


@contextlib.contextmanager
def cut_proxy(url: str) -> Iterator[CutProxy]:
    proxy = CutProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
