"""What an HTTP request is called: in its answer's headers, its answer's id and the router's log."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.request.validate import REQUEST_ID

_MAX_GIVEN_CHARS = 64


class Naming:
    """An ASGI application around another one: every answer has `X-Request-Id`, whatever it says.

    `request.state.request_id` is the name; it may be changed until the answer begins. What
    `request.state.ignored_fields` says is told, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = _drawn(Headers(scope=scope).get("x-request-id", ""))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [(b"x-request-id", state["request_id"].encode())]
                if ignored := state.get("ignored_fields"):
                    named.append((b"x-baton-ignored-fields", ignored.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        await self._app(scope, receive, send_named)


def _drawn(given: str) -> str:
    """Until the body names the request. `given`: by the client; it may be one for several."""
    is_name = len(given) <= _MAX_GIVEN_CHARS and REQUEST_ID.fullmatch(given)
    return f"{given}-{uuid.uuid4().hex[:8]}" if is_name else uuid.uuid4().hex
