"""The endpoints, who may call them, and how large a body may be."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import BatonError, NotFoundError
from baton.unfinished import Unfinished
from kv_transfer.block_hash import TokenIds
from router.door.api.api import Api, pieces
from router.door.connections.acceptor import is_loopback
from router.door.connections.credentials import confine
from router.door.http.anthropic import messages
from router.door.http.openai import bodies
from router.door.http.openai.answering import Answering, Asked
from router.door.http.openai.bodies import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    choices_of,
    parsed,
)
from router.door.http.openai.fields import refused
from router.door.http.openai.responses import ResponseAnswer, ResponsesBody
from router.door.http.openapi import openapi
from router.door.http.server.errors import FAULT, NEVER_RETRY, ErrorResponse, response_to, shape
from router.door.http.server.guard import Guard
from router.door.http.server.request_ids import RequestIds
from router.request.client_request import REQUEST_ID
from router.request.counting import AT_ONCE_BYTES
from router.units.router import Router

_MAX_TRACE_CHARS = 128
_SHOWN = ("X-Request-Id", "X-Baton-Ignored-Fields", "Retry-After", "X-Should-Retry")  # to browsers


class _Body:
    """A body that comes in."""

    def __init__(self, timeout_s: float) -> None:
        self.limit = asyncio.timeout(timeout_s)
        self.error: Exception = HTTPException(408, f"the body did not come within {timeout_s:g} s")

    def give_way(self, error: BatonError) -> None:
        self.error = error
        self.limit.reschedule(0.0)


class OpenAiApp:
    """Own the routes. Holds nothing of any request."""

    def __init__(self, api: Api, unfinished: Unfinished) -> None:
        self._api, self._unfinished = api, unfinished
        config = self._config = api.units.config
        self.is_ready = False
        self._created = int(time.time())
        self.routes = [
            _post("/v1/chat/completions", self._answering, ChatBody, Answering),
            _post("/v1/completions", self._answering, CompletionBody, Answering),
            _post("/v1/responses", self._answering, ResponsesBody, ResponseAnswer),
            _post("/v1/messages", self._answering, messages.MessagesBody, messages.MessageAnswer),
            _post("/v1/messages/count_tokens", self._tokenize, messages.CountBody, _counted),
            _post("/tokenize", self._tokenize, TokenizeBody, _tokenized),
            _post("/detokenize", self._tokenize, bodies.DetokenizeBody, _detokenized),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
        ]
        is_asked = api.callers is None and is_loopback(config.host.strip("[]"))
        guard = Middleware(Guard, config.http.allowed_hosts if is_asked else None)
        browsers = Middleware(
            CORSMiddleware,
            allow_origins=config.http.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_SHOWN,
        )
        answered = [guard, browsers] if config.http.origins else [guard]
        starlette = Starlette(
            routes=self.routes,
            middleware=answered,
            exception_handlers={
                BatonError: self._refuse,
                HTTPException: _not_read,
                ClientDisconnect: lambda *_: Response(status_code=400),
                Exception: lambda *_: _plain(500, FAULT),
            },
        )
        starlette.router.redirect_slashes = False
        self.asgi = RequestIds(starlette)

    # --- answers -------------------------------------------------------------------------------

    async def _answering(
        self, kind: type[Any], answer: type[Answering], request: Request
    ) -> Answering:
        tenant = self._tenant(request)
        given, made = await self._read(request, tenant, kind)
        body = given.as_chat
        if REQUEST_ID.fullmatch(body.request_id or ""):
            request.state.request_id = body.request_id
        traceparent = request.headers.get("traceparent", "")
        for each in made:
            each.traceparent = traceparent if len(traceparent) <= _MAX_TRACE_CHARS else ""
            confine(each, tenant)
            largest = self._api.limits_of(each.tenant).largest_max_tokens
            if not each.HasField("chat") and body.max_tokens is None and largest:
                each.sampling.max_tokens = min(each.sampling.max_tokens, largest)
        renamed = self._renamed(request, body)
        each_choice = choices_of(made, body.num_choices)
        asked = Asked(body, each_choice, request.state.request_id, renamed, given)
        return answer(self._api, asked)

    async def _embeddings(self, request: Request) -> Response:
        """Refuse embeddings, which are not supported yet."""
        self._tenant(request)
        return _plain(501, "embeddings are not supported by this release", "not_implemented")

    # --- the rest ------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        """List the names of the served model."""
        self._tenant(request)
        names = self._api.units.model_names
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in names]})

    async def _model(self, request: Request) -> Response:
        """Describe the served model."""
        self._tenant(request)
        name, served = request.path_params["name"], self._api.units.model_names
        if name not in served:
            problem = f"unknown model {name!r}; served here: {', '.join(served)}"
            raise NotFoundError(problem, field="model")
        return JSONResponse(self._entry(name))

    def _entry(self, name: str) -> dict[str, object]:
        """Describe a model at once, also while there are no workers yet."""
        lengths = [router.max_model_len() for router in self._api.units.routers]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": max((each for each in lengths if each), default=None),
        }

    async def _tokenize(self, kind: type[Any], answer: Any, request: Request) -> Response:
        tenant = self._tenant(request)
        _, (made,) = await self._read(request, tenant, kind)
        confine(made, tenant)
        return await self._api.tokenize(made, answer)

    async def _version(self, request: Request) -> Response:
        """Return Baton's version."""
        self._tenant(request)
        return JSONResponse({"version": importlib.metadata.version("baton-serve")})

    async def _health(self, request: Request) -> Response:
        """Tell whether the process runs."""
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Tell whether requests can be served."""
        if not self.is_ready or not self._api.units.serves:
            return _plain(503, "not ready: no worker serves, or the router leaves")
        return JSONResponse({"status": "ready"})

    async def _openapi(self, request: Request) -> Response:
        """Return this document."""
        return JSONResponse(openapi(self.routes, self._api.units.max_request_bytes))

    # --- what comes in -------------------------------------------------------------------------

    def _tenant(self, request: Request) -> str | None:
        """Return the caller's tenant; None: any. Raises UnauthenticatedError."""
        if self._api.callers is None:
            return None
        sent = request.headers.get("authorization")
        if sent is None:  # Anthropic's clients send their key apart
            key = request.headers.get("x-api-key")
            sent = f"Bearer {key}" if key else ""
        return self._api.callers.tenant_of(sent, "the header `Authorization: Bearer TOKEN`")

    async def _read(self, request: Request, tenant: str | None, kind: type[Any]) -> Any:
        """Return a body and its requests; a large one is parsed off the loop."""
        request.state.renamed = kind.renamed
        data = await self._body(request)
        if len(data) <= AT_ONCE_BYTES:
            made = parsed(kind, data)
        else:
            made = await self._api.off_loop(lambda: parsed(kind, data), tenant, len(data))
        body, requests, names = made
        if names:
            self._api.units.metrics.saw_ignored(names)
            request.state.ignored_fields = ", ".join(names)
        return body, requests

    async def _body(self, request: Request) -> bytes:
        """Read a body, but not one that says that it is too large."""
        limit = self._api.units.max_request_bytes
        too_large = HTTPException(413, f"the body has more than {limit} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        if request.headers.get("content-encoding", "identity") != "identity":
            raise refused("content-encoding", "send the body uncompressed")
        parts, size = [], 0
        body = _Body(self._config.http.read_timeout_s)
        try:
            async with body.limit:
                async for part in request.stream():
                    self._unfinished.hold(body, len(part))
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            parts.clear()  # the error's traceback holds them
            raise body.error from None
        finally:
            self._unfinished.let_go(body)
        return b"".join(parts)

    # --- what goes out -------------------------------------------------------------------------

    def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError)
        return response_to(error, getattr(request.state, "renamed", {}))

    def _renamed(self, request: Request, body: ChatBody | CompletionBody) -> dict[str, str]:
        """Return what this body calls fields of the `GenerateRequest`."""
        renamed = dict(request.state.renamed)
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        for name in body.constraints:
            renamed["response_format"] = renamed["structured_outputs"] = name
        request.state.renamed = renamed
        return renamed


def _tokenized(router: Router, ids: TokenIds) -> Response:
    listed = ",".join(",".join(map(str, piece)) for piece in pieces(ids))
    length = json.dumps(router.max_model_len())
    content = f'{{"count":{len(ids)},"max_model_len":{length},"tokens":[{listed}]}}'
    return Response(content, media_type="application/json")


def _detokenized(router: Router, ids: TokenIds) -> Response:
    return JSONResponse({"prompt": router.text.decode(ids.tolist(), shows_special=True)})


def _counted(router: Router, ids: TokenIds) -> Response:
    return JSONResponse({"input_tokens": len(ids)})


def _post(path: str, how: Callable[..., Any], *kinds: Any) -> Route:
    return Route(path, partial(how, *kinds), methods=["POST"])


def _not_read(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    ours = {
        404: f"unknown path {request.method} {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    response = _plain(error.status_code, ours.get(error.status_code, error.detail))
    response.headers.update(error.headers or {})
    return response


def _plain(status: int, message: str, code: str | None = None) -> Response:
    headers = NEVER_RETRY if status == 501 else None
    return ErrorResponse(shape(status, message, code=code), status, headers)
