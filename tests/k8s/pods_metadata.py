"""A cloud's metadata service for pods: all ask one address, and each is a machine of its own, known
by the address that it asks from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.cluster.metadata_server import MetadataServer


class PodsMetadata:
    """Own what each pod is told of its machine; `address` is the service's."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._machines: dict[str, MetadataServer] = {}

    def of(self, pod_ip: str) -> MetadataServer:
        with self._lock:
            return self._machines.setdefault(pod_ip, MetadataServer(self.address))

    def end(self) -> None:
        with self._lock:
            for machine in self._machines.values():
                machine.end()


@contextlib.contextmanager
def serving_pods_metadata(host: str) -> Iterator[PodsMetadata]:
    """At an address of this machine that pods reach."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            machine = served.of(str(self.client_address[0]))
            status, text, own = machine.reply(self.command, self.path, headers)
            self.send_response(status)
            for name, value in own.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer((host, 0), Handler)
    served = PodsMetadata(f"http://{host}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="metadata")
    thread.start()
    try:
        yield served
    finally:
        served.end()
        server.shutdown()
        thread.join()
        server.server_close()
