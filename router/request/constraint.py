"""What a client wants its answer to be, as the grammar that workers follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.v1 import common_pb2, router_pb2
from kv_transfer.block_hash import TokenIds
from router.request.client_request import wrong
from router.text import TextModel
from router.text.grammar import (
    UNFORCED,
    Answer,
    Calls,
    GrammarError,
    Part,
    in_lark,
    of_choice,
    of_lark,
    of_regex,
    of_schema,
)


@dataclass(frozen=True)
class Constraint:
    grammar: str
    """As llguidance reads it."""
    field: str
    """The field of the client's request that it comes from."""


_ANY_OBJECT = '{"type": "object"}'
_NO_ARGUMENTS = {"properties": {}, "additionalProperties": False}
_MAX_TOOLS = 128  # each is a grammar of its own

_BODIES: dict[str, Callable[[router_pb2.GenerateRequest, bool], Part]] = {
    "json_schema": lambda request, close: of_schema(request.json_schema, close=close),
    "json_object": lambda *_: of_schema(_ANY_OBJECT),
    "regex": lambda request, _: of_regex(request.regex),
    "grammar": lambda request, _: of_lark(in_lark(request.grammar) + UNFORCED),
    "choice": lambda request, _: of_choice(request.choice.texts),
}


def is_constrained(request: router_pb2.GenerateRequest) -> bool:
    return request.WhichOneof("constraint") is not None or request.chat.HasField("tool_choice")


def constraint_of(
    request: router_pb2.GenerateRequest,
    model: TextModel,
    sampling: common_pb2.SamplingParams,
    token_ids: TokenIds,
    close_objects: bool,
) -> Constraint | None:
    """Compile the request's, if it has one, which may take a second. `sampling` is complete,
    `token_ids` are the prompt's, and `close_objects` is the router's setting.

    A tool choice goes before other constraints: there is no text then. Where the client only offers
    tools, the answer is a call or what the constraint says. Raises InvalidRequestError.
    """
    if not is_constrained(request):
        return None
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            problem = "not beside a constraint, which says where the answer ends"
            raise wrong(f"sampling.{name}", problem)
    kind = request.WhichOneof("constraint")
    is_forced = request.chat.HasField("tool_choice")
    body = None
    if kind is not None and not is_forced:
        with _naming(kind):
            body = _BODIES[kind](request, close_objects)
    field = "chat.tool_choice" if is_forced else kind or ""
    tail = token_ids[-64:].tolist()
    thinks = request.HasField("chat") and model.reasons and not model.thought_before(tail)
    with _naming(field):
        calls = _calls(request, model, close_objects)
        answer = Answer(body, calls, thinks, thinks and model.thinks_after(tail))
        return Constraint(answer.grammar(model), field)


def _calls(
    request: router_pb2.GenerateRequest, model: TextModel, close_objects: bool
) -> Calls | None:
    """Return what the answer may call; None: it may not be calls."""
    chat, choice = request.chat, request.chat.tool_choice
    is_forced, field = chat.HasField("tool_choice"), "chat.tool_choice"
    if not chat.tools:
        if not is_forced:
            return None
        raise wrong(field, "needs tools to choose from")
    assert model.tool_format is not None, "tools are refused then"
    if len(chat.tools) > _MAX_TOOLS:
        problem = f"{len(chat.tools)}; beside a constraint at most {_MAX_TOOLS}"
        raise wrong("chat.tools", problem)
    tools = []
    for index, tool in enumerate(chat.tools):
        if choice.name in ("", tool.name):
            with _naming(f"chat.tools[{index}].parameters"):
                schema = json.loads(tool.parameters or "{}") or _NO_ARGUMENTS  # read as JSON before
                schema = json.dumps({"type": "object", **schema})
                tools.append((tool.name, of_schema(schema, close=close_objects)))
    if not tools:
        raise wrong(field, f"no tool is named {choice.name!r}")
    has_marked_arguments = model.is_in_template("[ARGS]")
    return Calls(
        model.tool_format,
        tools,
        choice.is_single or bool(choice.name),
        has_marked_arguments,
        has_marked_arguments and model.is_in_template("[CALL_ID]"),
    )


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Name the field of a grammar that cannot be compiled."""
    try:
        yield
    except GrammarError as error:
        raise wrong(field, str(error)) from None
