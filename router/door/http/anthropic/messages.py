"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic_core import from_json, to_json

from router.door.http.openai import translating
from router.door.http.openai.bodies import Int
from router.door.http.openai.choices import Choice, Delta, usage_of
from router.door.http.openai.fields import refused
from router.door.http.openai.translating import SEVERAL, Block, Piece, Pieces, events_of
from router.door.http.server.errors import shape_of_messages

_SWITCHES = {"enabled": True, "disabled": False}


class MessagesBody(translating.TranslatedBody):
    """Answer a chat, as Anthropic's messages."""

    messages: Annotated[list[Piece], SEVERAL]
    max_tokens: Int
    system: Pieces | None = None
    stop_sequences: Annotated[list[str], SEVERAL] | None = None
    tools: Annotated[list[dict[str, Any]], SEVERAL] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """`budget_tokens` is not kept to: `max_tokens` bounds thoughts and answer."""
    output_config: dict[Literal["format"], dict[str, Any] | None] | None = None

    renamed: ClassVar[Mapping[str, str]] = {
        r"prompt|chat|messages\[\d+\]\.(tool_|role).*": "messages",
        r"stop(\[\d+\])?": r"stop_sequences\1",
        r"response_format(.*)": r"output_config.format\1",
        r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"(tools\[\d+\]|tool_choice)\.function(.*)": r"\1\2",
    }
    unserved: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("container", "mcp_servers", "context_management"), ""),
        "continue_final_message": "",
        **dict.fromkeys(("response_format", "output_format"), "output_config.format"),
        **{"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }

    def fields(self) -> Delta:
        messages = translating.messages_of(
            self.messages, "messages", "user", "assistant", system=self.system
        )
        choice = self.tool_choice or {"type": "auto"}
        named = {"function": {"name": choice.get("name")}}
        kinds = {"auto": None, "any": "required", "tool": named, "none": "none"}
        if (kind := str(choice.get("type"))) not in kinds:
            raise refused("tool_choice", f"{kind} is not served")
        arguments = dict(self.chat_template_kwargs or {})
        if (thinking := str((self.thinking or {}).get("type", "adaptive"))) in _SWITCHES:
            arguments["enable_thinking"] = _SWITCHES[thinking]
        elif thinking != "adaptive":
            raise refused("thinking", f"{thinking} is not served")
        called = {"input_schema": "parameters"}
        tools = [{called.get(k, k): v for k, v in each.items()} for each in self.tools or ()]
        return {
            "messages": messages,
            "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": translating.tools_of(tools, None, "custom"),
            "tool_choice": kinds[kind],
            "response_format": translating.format_of((self.output_config or {}).get("format")),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "chat_template_kwargs": arguments or None,
        }


class CountBody(MessagesBody):
    """Count the tokens of a chat's prompt."""

    max_tokens: Int | None = None  # type: ignore[assignment]


# --- the answer -----------------------------------------------------------------------------------

_DELTAS = {
    "reasoning_content": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "tool_calls": ("input_json_delta", "partial_json"),
}


class MessageAnswer(translating.Translating):
    @property
    def _common(self) -> Delta:
        head = {"id": f"msg_{self._asked.request_id}", "type": "message", "role": "assistant"}
        return {**head, "model": self._head["model"]}

    def _opening(self, choices: Sequence[Choice]) -> bytes:
        num_prompt_tokens = len(choices[0].opened.parsed.token_ids)
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        message = {**self._common, "content": [], **ending}
        return events_of({"type": "message_start", "message": message})

    def _changes(self, change: str, block: Block, text: str = "") -> list[Delta]:
        more: Delta = {}
        if change == "start":
            more["content_block"] = _content(block)
        elif change == "delta":
            kind, name = _DELTAS[block.kind]
            more["delta"] = {"type": kind, name: text}
        return [{"type": f"content_block_{change}", "index": block.index, **more}]

    def _ending(self, choices: Sequence[Choice]) -> bytes:
        last, message = self._stop_last(), self._document(choices)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        ending = {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        return events_of(*last, ending, {"type": "message_stop"})

    def _failing(self, status: int, error: Delta) -> bytes:
        return events_of(shape_of_messages(status, error))

    def _document(self, choices: Sequence[Choice]) -> Delta:
        usage, stop = usage_of(choices, 1), choices[0].stop_reason
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(self._reason, "end_turn")
        is_stop = reason == "end_turn" and isinstance(stop, str)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            **self._common,
            "content": [_content(block) for block in self._blocks],
            "stop_reason": "stop_sequence" if is_stop else reason,
            "stop_sequence": stop if is_stop else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
            },
        }


def _content(block: Block) -> Delta:
    if block.kind == "reasoning_content":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    called = {"id": block.call_id, "name": block.name, "input": _input(block.text)}
    return {"type": "tool_use", **called}


def _input(text: str) -> Delta:
    """Return a call's arguments, which may be cut off; empty where they are no JSON object."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return from_json(to_json(value, inf_nan_mode="null")) if isinstance(value, dict) else {}
