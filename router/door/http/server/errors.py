"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from baton.errors import (
    AlreadyExistsError,
    BatonError,
    DeadlineError,
    NoCapacityError,
    NotFoundError,
    NotResumableError,
    PoisonError,
)

FAULT = "a fault of the router's; its log has more"
NEVER_RETRY = {"X-Should-Retry": "false"}
"""Without it the openai client retries at every 409 and 5xx."""
_IN_VAIN = (AlreadyExistsError, DeadlineError, NoCapacityError, NotResumableError, PoisonError)
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OTHERS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
_NAMED = re.compile(r"^[\w.\[\]]+: ")  # what begins a message that is about a field
GIVEN = "given."  # before a field that is called as its client called it
_CONTEXT = re.compile(r"exceed the context of (\d+)")  # as `validate` words it
# Of a path in a `GenerateRequest`: how OpenAI's bodies call it.
_RENAMED = (
    (re.compile(r"^(request|sampling|chat)\."), ""),
    (re.compile(r"^token_ids(\.ids)?"), "prompt"),
    (re.compile(r"\.parts\b"), ".content"),
    (re.compile(r"^(tools\[\d+\])\.(name|parameters)$"), r"\1.function.\2"),
    (re.compile(r"^template_arguments$"), "chat_template_kwargs"),
    (re.compile(r"^(json_schema|json_object)$"), "response_format"),
    (re.compile(r"^(regex|grammar|choice)$"), "structured_outputs"),
)


def status_of(error: BatonError) -> int:
    if isinstance(error, NoCapacityError):
        return 503  # retrying soon does not help, as it does at a full queue
    return _STATUSES.get(error.grpc_status, 500)


def shape(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ErrorResponse(JSONResponse):
    """An error in OpenAI's shape; at `/v1/messages` in Anthropic's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v1/messages"):
            error = json.loads(bytes(self.body))
            self.body = self.render(shape_of_messages(self.status_code, error))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def shape_of_messages(status: int, error: dict[str, Any]) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "api_error"
    kind = _TYPES.get(status, _OTHERS.get(status, kind))
    return {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}


def shape_of(error: BatonError, renamed: Mapping[str, str]) -> dict[str, Any]:
    """`renamed`: what this endpoint calls fields of the `GenerateRequest`, by patterns."""
    param, message = error.field, error.message
    if param is not None:
        param = renamed.get(param, param)
        for pattern, name in _RENAMED:
            param = pattern.sub(name, param)
        known = (name for name in renamed if re.fullmatch(name, param))
        param = next((re.sub(name, renamed[name], param) for name in known), param)
        param = param.removeprefix(GIVEN)
        message = _NAMED.sub(lambda _: f"{param}: ", message)
    if found := _CONTEXT.search(message):  # litellm and others know it by OpenAI's words
        message = f"This model's maximum context length is {found[1]} tokens: {message}"
    return shape(status_of(error), message, param, _code(error))


def _code(error: BatonError) -> str:
    if isinstance(error, NotFoundError) and error.field == "model":
        return "model_not_found"
    if error.grpc_status == "UNAUTHENTICATED":
        return "invalid_api_key"
    if error.grpc_status == "INVALID_ARGUMENT":
        return "context_length_exceeded" if _CONTEXT.search(error.message) else "invalid_value"
    return error.reason.lower()


def response_to(error: BatonError, renamed: Mapping[str, str]) -> ErrorResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        headers["Retry-After-Ms"] = str(math.ceil(error.retry_after_s * 1e3))
    if isinstance(error, _IN_VAIN):
        headers |= NEVER_RETRY
    if error.grpc_status == "UNAUTHENTICATED":
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorResponse(shape_of(error, renamed), status_of(error), headers)
