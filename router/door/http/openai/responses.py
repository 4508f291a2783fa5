"""OpenAI's responses. Nothing is stored: a client sends the whole conversation each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from router.door.api.api import Api
from router.door.http.openai import translating
from router.door.http.openai.answering import Asked
from router.door.http.openai.bodies import Int
from router.door.http.openai.choices import Choice, Delta, usage_of
from router.door.http.openai.fields import refused
from router.door.http.openai.translating import (
    SEVERAL,
    Block,
    Piece,
    Pieces,
    events_of,
    without_type,
)


class ResponsesBody(translating.TranslatedBody):
    """Answer a chat, as OpenAI's responses."""

    input: Pieces
    """A text, or the whole conversation: nothing is stored."""
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: Annotated[list[dict[str, Any]], SEVERAL] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[Literal["format", "verbosity"], Literal["medium"] | dict[str, Any] | None] | None = (
        None
    )
    reasoning: dict[str, Any] | None = None
    """Its `effort` goes to the chat template; `summary` changes nothing."""
    metadata: dict[str, str] | None = None
    """Returned with the answer."""
    include: Annotated[list[Literal["reasoning.encrypted_content"]], SEVERAL] | None = None
    truncation: Literal["disabled"] | None = None

    renamed: ClassVar[Mapping[str, str]] = {
        r"(messages|chat)\b.*|prompt": "input",
        r"max_tokens": "max_output_tokens",
        r"reasoning_effort": "reasoning.effort",
        r"response_format(.*)": r"text.format\1",
        r"(tools\[\d+\]|tool_choice)\.(?:function|allowed_tools)(.*)": r"\1\2",
    }
    unserved: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("previous_response_id", "conversation", "background", "prompt"), ""),
        **dict.fromkeys(("max_tool_calls", "context_management"), ""),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        **{"response_format": "text.format", "messages": "input"},
        "reasoning_effort": "reasoning.effort",
    }

    def fields(self) -> Delta:
        choice: Any = None if self.tool_choice == "auto" else self.tool_choice  # also without tools
        match choice:
            case {"type": "function"}:
                choice = {"function": without_type(choice)}
            case {"type": "allowed_tools"}:
                allowed = without_type(choice)
                allowed["tools"] = translating.tools_of(allowed.get("tools"), "function") or []
                choice = {"type": "allowed_tools", "allowed_tools": allowed}
            case dict():
                raise refused("tool_choice", f"{choice.get('type')} is not served")
        said = self.input
        asked = [Piece(role="user", content=said)] if isinstance(said, str) else said
        system = self.instructions
        return {
            "messages": translating.messages_of(asked, "input", "assistant", system=system),
            "max_tokens": self.max_output_tokens,
            "tools": translating.tools_of(self.tools, "function"),
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": translating.format_of((self.text or {}).get("format")),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }


# --- the answer -----------------------------------------------------------------------------------

_TYPES: dict[str, tuple[str, str, str, Delta]] = {
    "reasoning_content": ("rs", "reasoning", "reasoning_text", {"content_index": 0}),
    "content": ("msg", "message", "output_text", {"content_index": 0, "logprobs": []}),
    "tool_calls": ("fc", "function_call", "function_call_arguments", {}),
}
_NOT_SAID: Delta = {
    **dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p")),
    **dict.fromkeys(("error", "incomplete_details", "usage", "previous_response_id")),
    **{"metadata": {}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    **{"text": {"format": {"type": "text"}}, "truncation": "disabled"},
    "reasoning": {"effort": None, "summary": None},
}
_ECHOED = {*_NOT_SAID, "user", "safety_identifier", "prompt_cache_key", "service_tier"}


class ResponseAnswer(translating.Translating):
    def __init__(self, api: Api, asked: Asked) -> None:
        super().__init__(api, asked)
        said = asked.given.model_dump(exclude_none=True, include=_ECHOED)
        said["reasoning"] = _NOT_SAID["reasoning"] | said.get("reasoning", {})
        self._num_events, self._id = 0, asked.request_id
        head = {"id": f"resp_{self._id}", "object": "response", "created_at": self._head["created"]}
        more = {"model": self._head["model"], "store": False}
        self._common: Delta = {**_NOT_SAID, **said, **head, **more}

    def _opening(self, choices: Sequence[Choice]) -> bytes:
        response = {**self._common, "status": "in_progress", "output": []}
        names = ("created", "in_progress")
        return events_of(*(self._event(name, response=response) for name in names))

    def _changes(self, change: str, block: Block, text: str = "") -> list[Delta]:
        name = _TYPES[block.kind][2]
        if change == "delta":
            return [self._of(f"{name}.delta", block, delta=text)]
        part = _part(block)
        if change == "start":
            item = self._item(block, "in_progress") | ({"content": []} if part else {})
            made = [self._event("output_item.added", output_index=block.index, item=item)]
            return made + [self._of("content_part.added", block, part=each) for each in part]
        said = {"text": block.text} if part else {"name": block.name, "arguments": block.text}
        made = [self._of(f"{name}.done", block, **said)]
        made += [self._of("content_part.done", block, part=each) for each in part]
        item = self._item(block, "completed" if self._is_whole else "incomplete")
        return [*made, self._event("output_item.done", output_index=block.index, item=item)]

    def _ending(self, choices: Sequence[Choice]) -> bytes:
        last, response = self._stop_last(), self._document(choices)
        return events_of(*last, self._event(response["status"], response=response))

    def _failing(self, status: int, error: Delta) -> bytes:
        said = {"code": "server_error", "message": error["error"]["message"]}
        more = {"status": "failed", "error": said, "output": self._items("incomplete")}
        return events_of(self._event("failed", response={**self._common, **more}))

    def _document(self, choices: Sequence[Choice]) -> Delta:
        usage = usage_of(choices, 1)
        status = "completed" if self._is_whole else "incomplete"
        thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            **self._common,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self._reason == "length"
            else None,
            "output": self._items(status),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thoughts},
                "total_tokens": usage["total_tokens"],
            },
        }

    @property
    def _is_whole(self) -> bool:
        """Tell whether its end, or what is known before it, cuts nothing off."""
        is_call = bool(self._blocks) and self._blocks[-1].kind == "tool_calls"
        return self._reason in ("", "tool_calls") or (self._reason == "stop" and not is_call)

    def _items(self, status: str) -> list[Delta]:
        """Return all items. `status` is of the last one."""
        statuses = {len(self._blocks) - 1: status}
        return [self._item(each, statuses.get(each.index, "completed")) for each in self._blocks]

    def _item(self, block: Block, status: str) -> Delta:
        item: Delta = {"id": self._item_id(block), "type": _TYPES[block.kind][1], "status": status}
        if block.kind == "tool_calls":
            called = {"call_id": block.call_id, "name": block.name}
            return {**item, **called, "arguments": block.text}
        more: Delta = {"role": "assistant"} if block.kind == "content" else {"summary": []}
        return {**item, **more, "content": _part(block)}

    def _item_id(self, block: Block) -> str:
        return f"{_TYPES[block.kind][0]}_{self._id}_{block.index}"

    def _of(self, name: str, block: Block, /, **more: Any) -> Delta:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return self._event(name, **place, **_TYPES[block.kind][3], **more)

    def _event(self, name: str, /, **more: Any) -> Delta:
        self._num_events += 1
        return {"type": f"response.{name}", "sequence_number": self._num_events - 1, **more}


def _part(block: Block) -> list[Delta]:
    """Return a block's part, of which a call has none."""
    text: Delta = {"type": _TYPES[block.kind][2], "text": block.text}
    more: Delta = {"annotations": [], "logprobs": []} if block.kind == "content" else {}
    return [] if block.kind == "tool_calls" else [text | more]
