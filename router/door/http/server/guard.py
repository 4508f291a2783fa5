"""What is refused of an HTTP request before anything looks at it."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.door.connections.acceptor import is_loopback
from router.door.http.server.errors import ErrorResponse, shape


class Guard:
    """An ASGI application that refuses requests before another one sees them."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        """`hosts`: names in `Host` that are taken besides loopback's, so that no web page in a
        developer's browser can call by a name of its own; None: any, and any type of body."""
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = self._wrong(scope["method"], Headers(scope=scope))
        app = self._app
        if wrong is not None:
            status, field, why = wrong
            content = shape(status, f"{field}: {why}", field)
            app = ErrorResponse(content, status, {"connection": "close"})
        await app(scope, receive, send)

    def _wrong(self, method: str, headers: Headers) -> tuple[int, str, str] | None:
        """Return status, header and what is wrong with it; None: nothing is."""
        if "content-length" in headers and "transfer-encoding" in headers:  # RFC 9112, 6.1
            return 400, "content-length", "may not stand beside transfer-encoding"
        if self._hosts is None:
            return None
        try:
            host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        except ValueError:
            host = ""
        if not is_loopback(host) and host not in self._hosts:
            return 421, "host", f"{host!r} is neither loopback nor in router.http.allowed_hosts"
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return 415, "content-type", f"{kind!r}; send 'Content-Type: application/json'"
        return None
