"""A chat as its template reads it: roles and contents, tools, calls and results."""

from __future__ import annotations

import json
from typing import Any

from baton.errors import InvalidRequestError
from baton.v1 import router_pb2
from router.request.client_request import check_count, wrong
from router.request.counting import check_json
from router.text import Conversation

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES, MAX_TOOLS, MAX_CALLS, MAX_PARTS = 4096, 1024, 1024, 4096


def conversation_of(chat: router_pb2.ChatMessages) -> Conversation:
    """Check a chat. Raises InvalidRequestError; RecursionError where JSON is nested too deeply."""
    if not chat.messages:
        raise wrong("chat.messages", "give at least one message")
    check_count("chat.messages", len(chat.messages), MAX_MESSAGES)
    check_count("chat.tools", len(chat.tools), MAX_TOOLS)
    names: dict[str, str] = {}  # of tools, by the calls' ids
    messages = []
    for index, message in enumerate(chat.messages):
        field = f"chat.messages[{index}]"
        messages.append(_message(message, field, names))
        names.update((call.id, call.name) for call in message.tool_calls if call.id)
    arguments = _object(chat.template_arguments, "chat.template_arguments")
    tools = [_tool(*each) for each in enumerate(chat.tools)]
    continues = chat.continue_final_message
    opens = not (continues or chat.omit_generation_prompt)
    return Conversation(messages, tools, arguments, continues, opens)


def _message(message: router_pb2.ChatMessage, field: str, names: dict[str, str]) -> dict[str, Any]:
    if message.role not in ROLES:
        problem = f"unknown role {message.role!r}; it is one of {', '.join(ROLES)}"
        raise wrong(f"{field}.role", problem)
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _content(message, field)}
    if message.tool_calls:
        if message.role != "assistant":
            raise wrong(f"{field}.tool_calls", "only an assistant's message has them")
        check_count(f"{field}.tool_calls", len(message.tool_calls), MAX_CALLS)
        made["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id:
        raise wrong(f"{field}.tool_call_id", "only a tool's message has one")
    if name := message.name or names.get(message.tool_call_id):
        made["name"] = name
    if message.reasoning_content:
        made["reasoning_content"] = message.reasoning_content
    return made


def _content(message: router_pb2.ChatMessage, field: str) -> str:
    if message.parts and message.content:
        raise wrong(f"{field}.parts", "give either content or parts")
    check_count(f"{field}.parts", len(message.parts), MAX_PARTS)
    for index, part in enumerate(message.parts):
        if part.WhichOneof("part") != "text":
            raise wrong(f"{field}.parts[{index}]", "parts other than text are not supported")
    return "\n".join(part.text for part in message.parts) if message.parts else message.content


def _call(call: router_pb2.ToolCall) -> dict[str, Any]:
    """Take whatever a model wrote, since its conversation is to go on: arguments that are no object
    stand in one, which every template can read."""
    try:
        arguments = _object(call.arguments, "arguments") if call.arguments != "null" else {}
    except (InvalidRequestError, RecursionError):
        arguments = {"malformed": call.arguments}
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(index: int, tool: router_pb2.Tool) -> dict[str, Any]:
    if not tool.name:
        raise wrong(f"chat.tools[{index}].name", "a tool needs a name")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    parameters = _object(tool.parameters, f"chat.tools[{index}].parameters")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _object(text: str, field: str) -> dict[str, Any]:
    """Read a JSON object; an empty text is an empty one."""
    check_json(text.encode(), field)
    try:
        value = json.loads(text) if text else {}
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate
    except ValueError as error:
        raise wrong(field, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise wrong(field, "a JSON object is expected")
    return value
