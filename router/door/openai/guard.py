"""What is refused of an HTTP request before anything looks at it."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.door.listening import is_loopback
from router.door.openai.errors import shape


class Guard:
    """An ASGI application before another one."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        """`hosts`: other names than loopback's; None: who calls needs a token, or is elsewhere.

        Without tokens a developer's loopback is open to any web page that the developer's browser
        shows: it could call by a name of its own that leads here, or send what needs no preflight.
        """
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refused = self._framing(headers)
        if refused is None and self._hosts is not None:
            refused = self._host(headers) or self._content(scope["method"], headers)
        await (refused or self._app)(scope, receive, send)

    def _framing(self, headers: Headers) -> JSONResponse | None:
        """Two lengths, of which a proxy may believe the other one (RFC 9112, 6.1)."""
        if "content-length" not in headers or "transfer-encoding" not in headers:
            return None
        message = "content-length: not beside transfer-encoding"
        return JSONResponse(shape(400, message), 400, {"connection": "close"})

    def _host(self, headers: Headers) -> JSONResponse | None:
        given = headers.get("host", "")
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            name = ""
        if is_loopback(name) or name in (self._hosts or ()):
            return None
        message = f"host: {given!r} is neither loopback nor in router.allowed_hosts"
        return JSONResponse(shape(421, message, "host"), 421)

    def _content(self, method: str, headers: Headers) -> JSONResponse | None:
        given = headers.get("content-type", "")
        if method != "POST" or given.partition(";")[0].strip().lower() == "application/json":
            return None
        message = f"content-type: {given!r}; send 'Content-Type: application/json' (curl: -H)"
        return JSONResponse(shape(415, message, "content-type"), 415)
