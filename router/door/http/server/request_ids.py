"""What an HTTP request is called: in its answer's headers, its answer's id and the router's log."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.request.client_request import drawn_id


class RequestIds:
    """An ASGI application around another one: every answer has `X-Request-Id`, whatever it says.

    `request.state.request_id` is the name; it may be changed until the answer begins. What
    `request.state.ignored_fields` says is told, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = drawn_id(Headers(scope=scope).get("x-request-id", ""))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [(b"x-request-id", state["request_id"].encode())]
                if ignored := state.get("ignored_fields"):
                    named.append((b"x-baton-ignored-fields", ignored.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        await self._app(scope, receive, send_named)
