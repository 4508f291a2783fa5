"""Chats as OpenAI's API has them, as messages of the wire. What these lack is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequestError
from baton.v1 import router_pb2

Given = Mapping[str, Any]

_TEXTS = ("role", "content", "tool_call_id", "name", "reasoning_content")
_SAME = {"reasoning": "reasoning_content"}  # what vLLM calls it


def chat_of(
    messages: Sequence[Given],
    tools: Sequence[Given] | None = None,
    tool_choice: str | Given | None = None,
) -> router_pb2.ChatMessages:
    """Raises InvalidRequestError, which names the field."""
    chat = router_pb2.ChatMessages()
    for index, message in enumerate(_listed(messages, "chat")):
        _fill(chat.messages.add(), message, f"chat[{index}]")
    for index, tool in enumerate(_listed(tools or (), "tools")):
        if tool_choice != "none":
            _fill_tool(chat.tools.add(), tool, f"tools[{index}]")
    if tool_choice == "required":
        chat.tool_choice.SetInParent()
    elif isinstance(tool_choice, Mapping):
        function = _only(tool_choice, "tool_choice", "function", "name")
        chat.tool_choice.name = _text(function.get("name"), "tool_choice.function.name")
    elif tool_choice not in (None, "auto", "none"):
        raise _wrong("tool_choice", f"auto, none, required or a function, not {tool_choice!r}")
    return chat


def _fill(made: router_pb2.ChatMessage, message: Given, place: str) -> None:
    for name, value in _items(message, place):
        field, where = _SAME.get(name, name), f"{place}.{name}"
        if field == "content" and isinstance(value, list | tuple):
            for index, part in enumerate(value):
                made.parts.add(text=_text_of(part, f"{where}[{index}]"))
        elif field in _TEXTS:
            setattr(made, field, _text(value, where))
        elif field == "tool_calls":
            for index, call in enumerate(_listed(value, where)):
                _fill_call(made.tool_calls.add(), call, f"{where}[{index}]")
        elif value:
            raise _wrong(where, "not a field of messages here")
    for name in ("role", "content"):
        if message.get(name) is None and not (name == "content" and made.tool_calls):
            raise _wrong(f"{place}.{name}", "is missing")


def _text_of(part: Given, place: str) -> str:
    kind = dict(_items(part, place)).get("type")
    if kind not in ("text", "refusal"):
        raise _wrong(place, f"{kind} parts are not supported; text is")
    return _text(part.get(kind), f"{place}.{kind}")


def _fill_call(made: router_pb2.ToolCall, call: Given, place: str) -> None:
    function = _only(call, place, "function", "name", "arguments", beside=("id", "index"))
    arguments = function.get("arguments") or ""
    made.id = _text(call.get("id") or "", f"{place}.id")
    made.name = _text(function.get("name"), f"{place}.function.name")
    made.arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)


def _fill_tool(made: router_pb2.Tool, tool: Given, place: str) -> None:
    function = _only(tool, place, "function", "name", "description", "parameters", "strict")
    made.name = _text(function.get("name"), f"{place}.function.name")
    made.description = function.get("description") or ""
    if (parameters := function.get("parameters")) is not None:
        made.parameters = json.dumps(parameters)


def _only(given: Given, place: str, within: str, *known: str, beside: Sequence[str] = ()) -> Given:
    """The object `within`, which has no fields but the known ones."""
    outer = dict(_items(given, place))
    if outer.get("type", within) != within:
        raise _wrong(f"{place}.type", f"{outer['type']!r} is not supported; {within} is")
    inner = dict(_items(outer.get(within), f"{place}.{within}"))
    unknown = [name for name in outer if name not in ("type", within, *beside)]
    unknown += [f"{within}.{name}" for name in inner if name not in known]
    if unknown:
        raise _wrong(f"{place}.{unknown[0]}", "not a field that is known here")
    return inner


def _items(given: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What is None counts as absent."""
    if not isinstance(given, Mapping):
        raise _wrong(place, f"a mapping is expected, not {given!r}")
    return ((name, value) for name, value in given.items() if value is not None)


def _listed(given: Any, place: str) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        raise _wrong(place, f"a list is expected, not {given!r}")
    return given


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(place, f"a text is expected, not {value!r}")
    return value


def _wrong(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}", field=field)
