"""An HTTP server that answers as an API server must not, but a proxy or a bad day may: what a real
one cannot be brought to do on demand."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kubernetes.client import Configuration

from deploy.controller.kit.connection import Connection, Timeouts
from deploy.controller.kit.kube import Kube


class Exchange(BaseHTTPRequestHandler):
    """One request, and what the script answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits for the acknowledgement of its headers
    server: _Server
    body: bytes

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query))

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"

    def answer(
        self, body: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """`body`: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self, *events: Mapping[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            self.send_piece(json.dumps(event).encode() + b"\n")

    def send_piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def hang(self) -> None:
        """Say nothing more, until the test is over."""
        self.server.is_over.wait()
        self.close_connection = True

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.script(self)

    do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests look at `requests`."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Callable[[Exchange], None]) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.script = script
        self.requests: list[str] = []
        self.num_connections = 0
        self.is_over = threading.Event()

    def get_request(self) -> tuple[Any, Any]:
        self.num_connections += 1
        return super().get_request()


@contextlib.contextmanager
def scripted(script: Callable[[Exchange], None]) -> Iterator[_Server]:
    server = _Server(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def kube_of(server: _Server, read_s: float = 5.0) -> Kube:
    configuration = Configuration(host=f"http://127.0.0.1:{server.server_port}")
    configuration.proxy = None  # whatever the environment says
    return Kube(Connection(configuration), "test", Timeouts(connect_s=5.0, read_s=read_s))
