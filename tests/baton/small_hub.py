"""A Hugging Face hub of one repository on this machine, and its files in a hub cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
_SMALL_BYTES = 10_000


class SmallHub:
    """Serves `files` (path to content), a revision of the repository `name`; a context manager."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        revision: str = "main",
        host: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.revision = revision
        self.files = files
        self.asked: list[str] = []
        """Paths of files that were sent."""
        self.goes_on = threading.Event()
        """While it is not set, weights stop coming half-way."""
        self.goes_on.set()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer((host, 0), handler)
        self.address = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> SmallHub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self) -> bytes:
        return json.dumps({"id": self.name, "sha": COMMIT, "siblings": []}).encode()

    def tree(self) -> bytes:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
            for path, content in self.files.items()
        ]
        return json.dumps(entries).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[SmallHub]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        file = path.removeprefix(f"/{hub.name}/resolve/{COMMIT}/")
        if path == f"/api/models/{hub.name}/revision/{hub.revision}":
            self._send(hub.commit(), "application/json")
        elif path == f"/api/models/{hub.name}/tree/{COMMIT}":
            self._send(hub.tree(), "application/json")
        elif file in hub.files:
            if self.command == "GET":
                hub.asked.append(file)
            self._send(hub.files[file], "application/octet-stream")
        else:
            self.send_error(404, path)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(content) // 2
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[:half])
            if len(content) > _SMALL_BYTES:
                self.hub.goes_on.wait()
            self.wfile.write(content[half:])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def fill_cache(cache: Path, name: str, files: Mapping[str, bytes], revision: str = "main") -> Path:
    """Lay files out as the hub's cache has them; the snapshot's folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for path, content in files.items():
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).write_bytes(content)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(COMMIT)
    return snapshot


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
