"""The OpenAPI document, made from the routes and their bodies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

_REF = "#/components/schemas/{model}"
_FAILED = "An error. The documentation's page openai.md says when each status comes."


class ErrorDetail(BaseModel):
    """What is wrong. At `/v1/messages` errors have neither `param` nor `code`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    error: ErrorDetail


def openapi(routes: Sequence[Route], max_bytes: int) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": f"OpenAI-compatible serving. A body has at most {max_bytes} bytes.",
        },
        "paths": {route.path_format: _operation(route) for route in routes},
        "components": {
            "schemas": _schemas(Error, *filter(None, map(_kind, routes))),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


@functools.cache
def _schemas(*kinds: type[BaseModel]) -> dict[str, Any]:
    _, made = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    return made["$defs"]  # type: ignore[no-any-return]


def _kind(route: Route) -> type[BaseModel] | None:
    """Return the model of its body, if it has one."""
    kind: type[BaseModel] | None = next(iter(getattr(route.endpoint, "args", ())), None)
    return kind


def _operation(route: Route) -> dict[str, Any]:
    kind = _kind(route)
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if kind and "stream" in kind.model_fields:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": _REF.format(model=Error.__name__)}}}
    made: dict[str, Any] = {
        "summary": inspect.getdoc(kind or route.endpoint),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": _FAILED, "content": error},
        },
    }
    if kind:
        schema = {"$ref": _REF.format(model=kind.__name__)}
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if names := route.param_convertors:
        place = {"in": "path", "required": True, "schema": {"type": "string"}}
        made["parameters"] = [{"name": name, **place} for name in names]
    return {"post" if "POST" in (route.methods or ()) else "get": made}
