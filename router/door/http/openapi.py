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
_ERRORS = {
    "400": "A field is wrong; `error.param` names it.",
    "401": "No API key, or none that the router knows.",
    "403": "The API key is another tenant's.",
    "404": "The model is unknown.",
    "408": "The body did not come in time.",
    "409": "The request_id was used with another body.",
    "413": "The body is too large.",
    "415": "The body is not sent as application/json.",
    "421": "The Host is none that the router is called by.",
    "429": "The queue is full; Retry-After says when to ask again.",
    "500": "A fault of the router's, or a request that ended its workers.",
    "501": "Not supported.",
    "503": "No worker can serve it now.",
    "504": "The request's deadline has passed.",
}


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
            "schemas": {**_schemas(*filter(None, map(_kind, routes))), "Error": _ERROR},
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


_NULLABLE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],  # of messages it has no more
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}


def _operation(route: Route) -> dict[str, Any]:
    kind = _kind(route)
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if kind and "stream" in kind.model_fields:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    made: dict[str, Any] = {
        "summary": inspect.getdoc(kind or route.endpoint),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{status: {"description": why, "content": error} for status, why in _ERRORS.items()},
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
