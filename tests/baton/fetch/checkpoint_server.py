"""A server of files on this machine that may cut them off, and that speaks S3's list, too."""

from __future__ import annotations

import contextlib
import hashlib
import re
import ssl
import subprocess
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Asked:
    path: str
    start: int
    """The first byte that was sent."""
    authorization: str | None


class CheckpointServer:
    """Serves `files` (path to content) at an address of this machine; a context manager. With a
    `certificate`, over TLS."""

    def __init__(
        self, files: dict[str, bytes], certificate: Path | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.files = files
        self.headers: dict[str, dict[str, str]] = {}
        """More headers, by path."""
        self.forbidden: set[str] = set()
        self.moved: dict[str, str] = {}
        """Where a path is redirected."""
        self.cuts: dict[str, list[int]] = {}
        """After how many bytes each of a path's next answers ends; -1: it stops there, and waits
        for `goes_on`, half-way."""
        self.has_versions = True
        self.part_offset = 0
        """How far from what was asked a part is said to begin."""
        self.goes_on = threading.Event()
        self.stopped = threading.Event()
        """Set when an answer waits half-way."""
        self.asked: list[Asked] = []
        handler = type("Handler", (_Handler,), {"server_": self})
        self._server = ThreadingHTTPServer((host, 0), handler)
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.address = f"{scheme}://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> CheckpointServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def paths(self) -> list[str]:
        """What was sent, in order."""
        return [asked.path for asked in self.asked]


def write_certificate(folder: Path, host: str = "127.0.0.1") -> Path:
    """A key and a certificate for an address, in one file; it vouches for itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"),
            *("-addext", f"subjectAltName=IP:{host}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_: ClassVar[CheckpointServer]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, url = self.server_, urlsplit(self.path)
        path = unquote(url.path).lstrip("/")
        query = parse_qs(url.query)
        if path in server.forbidden:
            self._refuse(403)
        elif "list-type" in query:
            self._list(path.rstrip("/"), query.get("prefix", [""])[0])
        elif path in server.moved:
            self.send_response(302)
            self.send_header("Location", server.moved[path])
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif path in server.files:
            self._send(path, server.files[path])
        else:
            self._refuse(404)

    def _send(self, path: str, content: bytes) -> None:
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        start = self._start(etag)
        if start and start >= len(content):
            self._refuse(416)
            return
        self.send_response(206 if start else 200)
        if start:
            last = len(content) - 1
            first = start + self.server_.part_offset
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        if self.server_.has_versions:
            self.send_header("ETag", etag)
        for name, value in self.server_.headers.get(path, {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.server_.asked.append(Asked(path, start, self.headers.get("Authorization")))
            self._write(path, content[start:])

    def _write(self, path: str, content: bytes) -> None:
        cuts = self.server_.cuts.get(path)
        cut = cuts.pop(0) if cuts else len(content)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[: len(content) // 2 if cut < 0 else cut])
            if cut < 0:
                self.server_.stopped.set()
                self.server_.goes_on.wait()
                self.wfile.write(content[len(content) // 2 :])
        if 0 <= cut < len(content):
            self.close_connection = True

    def _start(self, etag: str) -> int:
        """As asked for, where it is still what was asked for."""
        wanted = self.headers.get("If-Range") or self.headers.get("If-Match")
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(found.group(1)) if found and wanted == etag else 0

    def _list(self, bucket: str, prefix: str) -> None:
        start = f"{bucket}/{prefix}"
        keys = [
            path.removeprefix(f"{bucket}/")
            for path in self.server_.files
            if path.startswith(start) and "/" not in path.removeprefix(start)
        ]
        entries = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys)
        name = "http://s3.amazonaws.com/doc/2006-03-01/"
        body = f'<ListBucketResult xmlns="{name}">{entries}</ListBucketResult>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass
