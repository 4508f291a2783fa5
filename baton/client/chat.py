"""Make messages of the wire from chats as OpenAI's API has them. What the wire cannot carry is
refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from baton.errors import InvalidRequestError
from baton.v1 import router_pb2

Given = Mapping[str, Any]


def chat_of(
    messages: Sequence[Given],
    tools: Sequence[Given] | None = None,
    tool_choice: str | Given | None = None,
    template_arguments: str | Given = "",
    parallel_tool_calls: bool = True,
) -> router_pb2.ChatMessages:
    """Make the message of a chat. Raises InvalidRequestError, which names the field that is
    wrong."""
    chat, place = router_pb2.ChatMessages(), "chat"
    try:
        for index, message in enumerate(messages):
            place, made = f"chat[{index}]", chat.messages.add()
            for name, value in _message(message).items():
                place = f"chat[{index}].{'content' if name == 'parts' else name}"
                ParseDict({name: value}, made)
        place = "tools"
        for index, tool in enumerate(tools if tools and tool_choice != "none" else ()):
            place = f"tools[{index}]"
            ParseDict(_function(tool), chat.tools.add())
        place = "tool_choice"
        if tool_choice == "required":
            chat.tool_choice.SetInParent()
        elif tool_choice not in (None, "auto", "none"):
            ParseDict(_function(tool_choice), chat.tool_choice)
        place = "template_arguments"
        chat.template_arguments = in_json(template_arguments)
        place = "parallel_tool_calls"
        if parallel_tool_calls is False:
            if not chat.HasField("tool_choice"):
                raise ValueError("needs a tool_choice that forces a call")
            chat.tool_choice.is_single = True
    except (ParseError, AttributeError, KeyError, TypeError, ValueError) as error:
        problem = "not as OpenAI's API has it, or not served"
        raise InvalidRequestError(f"{place}: {problem}", field=place) from error
    return chat


def in_json(value: Any) -> str:
    """Write an object within a request as JSON text. Raises TypeError and ValueError."""
    return value if isinstance(value, str) else json.dumps(value)


def _message(given: Given) -> dict[str, Any]:
    """Make one message. An empty member counts as absent; `reasoning` is vLLM's name for
    thoughts."""
    made = {name: value for name, value in given.items() if value}
    if given.get("content") is None and "tool_calls" not in made:
        raise ValueError("its content is missing")
    if "reasoning" in made:
        made["reasoning_content"] = made.pop("reasoning")
    if isinstance(made.get("content"), list):
        parts = made.pop("content")
        made["parts"] = [{name: part[name] for name in part if name != "type"} for part in parts]
    calls = made.get("tool_calls", ())
    made["tool_calls"] = [{"id": call.get("id", ""), **_function(call)} for call in calls]
    return made


def _function(given: Any) -> dict[str, Any]:
    """Return the function that a call, a tool or a choice names."""
    if given.get("type", "function") != "function":
        raise ValueError(f"{given['type']} is not served; functions are")
    return {
        name: in_json(value)
        for name, value in given["function"].items()
        if value is not None and name != "strict"
    }
