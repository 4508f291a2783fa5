"""Chats as OpenAI's API has them, as messages of the wire. What these lack is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from baton.errors import InvalidRequestError
from baton.v1 import router_pb2

Given = Mapping[str, Any]


def chat_of(
    messages: Sequence[Given], tools: Sequence[Given] | None, choice: str | Given | None
) -> router_pb2.ChatMessages:
    """Raises InvalidRequestError, which names what is wrong."""
    chat, place = router_pb2.ChatMessages(), "chat"
    try:
        for index, message in enumerate(messages):
            place = f"chat[{index}]"
            ParseDict(_message(message), chat.messages.add())
        for index, tool in enumerate(tools if tools and choice != "none" else ()):
            place = f"tools[{index}]"
            ParseDict(_function(tool), chat.tools.add())
        place = "tool_choice"
        if choice == "required":
            chat.tool_choice.SetInParent()
        elif choice not in (None, "auto", "none"):
            ParseDict(_function(choice), chat.tool_choice)
    except (ParseError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"{place}: {error}", field=place) from error
    return chat


def _message(given: Given) -> dict[str, Any]:
    """What is empty counts as absent. `reasoning` is what vLLM calls it."""
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
    """Of a call, a tool or a choice. Objects in it are JSON texts on the wire."""
    if given.get("type", "function") != "function":
        raise ValueError(f"{given['type']} is not served; functions are")
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in given["function"].items()
        if value is not None and name != "strict"
    }
