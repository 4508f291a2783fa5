"""The OpenAPI document, made from the bodies."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from router.door.anthropic.messages import CountBody, MessagesBody
from router.door.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.door.openai.responses import ResponsesBody

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
    "503": "No worker can serve it now.",
    "504": "The request's deadline has passed.",
}


@functools.lru_cache(1)
def openapi(max_bytes: int) -> dict[str, Any]:
    others = (DetokenizeBody, ResponsesBody, MessagesBody, CountBody)
    kinds = (ChatBody, CompletionBody, TokenizeBody, *others)
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": f"OpenAI-compatible serving. A body has at most {max_bytes} bytes.",
        },
        "paths": {
            "/v1/chat/completions": _post("Answer a chat", "ChatBody", streams=True),
            "/v1/completions": _post("Continue a text", "CompletionBody", streams=True),
            "/v1/responses": _post("Answer, as OpenAI's responses", "ResponsesBody", streams=True),
            "/v1/messages": _post("Answer, as Anthropic's messages", "MessagesBody", streams=True),
            "/v1/messages/count_tokens": _post("A chat's tokens", "CountBody", streams=False),
            "/v1/embeddings": {
                "post": {"summary": "Not supported yet", "responses": _responses("501")}
            },
            "/v1/models": _get("The served model", "401"),
            "/v1/models/{name}": {
                **_get("A model", "401", "404"),
                "parameters": [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            },
            "/tokenize": _post("A prompt's token ids", "TokenizeBody", streams=False),
            "/detokenize": _post("The text of token ids", "DetokenizeBody", streams=False),
            "/version": _get("Baton's version", "401"),
            "/health": _get("Whether the process runs"),
            "/ready": _get("Whether requests can be served", "503"),
            "/openapi.json": _get("This document"),
        },
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


_NULLABLE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}


def _post(summary: str, body: str, *, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = {"$ref": _REF.format(model=body)}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {
                "200": {"description": "The answer.", "content": content},
                **_responses(*_ERRORS),
            },
        }
    }


def _get(summary: str, *errors: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    ok = {"200": {"description": "It.", "content": content}}
    return {"get": {"summary": summary, "responses": {**ok, **_responses(*errors)}}}


def _responses(*statuses: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model="Error")}
    content = {"application/json": {"schema": schema}}
    return {
        status: {"description": _ERRORS.get(status, "Not supported."), "content": content}
        for status in statuses
    }
