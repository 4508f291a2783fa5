"""A chat in another API's shape. The body becomes a `ChatBody`. Of the choice's pieces come blocks,
one after the other: thoughts, text, calls. A stream tells their changes; a whole answer holds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from pydantic_core import to_json

from router.door.api.api import Api
from router.door.http.openai.answering import Answering, Asked
from router.door.http.openai.bodies import ChatBody
from router.door.http.openai.choices import Choice, Delta
from router.door.http.openai.fields import refused
from router.door.http.server.errors import GIVEN
from router.request.chat import MAX_PARTS, ROLES

SEVERAL = Field(max_length=MAX_PARTS, fail_fast=True)
_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "refusal")
_OF_CHATS = ("n", "stream_options", "logprobs", "top_logprobs", "return_token_ids")


def _called(*names: str) -> Any:
    return Field(default=None, validation_alias=AliasChoices(*names))


class Piece(BaseModel):
    """One item of OpenAI's responses, or one turn or block of Anthropic's messages."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str = "message"
    role: str | None = None
    content: str | Annotated[list[Piece], SEVERAL] | None = _called("content", "output", "thinking")
    text: str | None = _called("text", "refusal")
    call_id: str | None = _called("call_id", "tool_use_id", "id")
    name: str = ""
    arguments: str | dict[str, Any] | None = _called("arguments", "input")

    def messages(self, field: str, within: str | None) -> list[Delta]:
        """Return it as a chat's messages. `within`: the role of what it is a part of."""
        place = f"{field}.content"
        if self.type == "message" and self.role not in ROLES:
            raise refused(f"{GIVEN}{field}.role", f"it is one of {', '.join(ROLES)}")
        match self.type:
            case "message" if isinstance(self.content, list):
                return messages_of(self.content, place, self.role, within=self.role)
            case "message":
                return [{"role": self.role, "content": texts_of(self.content, place)}]
            case "reasoning" | "thinking":
                thoughts = "\n".join(part["text"] for part in texts_of(self.content, place))
                return [{"role": "assistant", "reasoning_content": thoughts}]
            case "redacted_thinking":
                return []
            case "function_call" | "tool_use":
                function = {"name": self.name, "arguments": self.arguments}
                call = {"id": self.call_id or "", "function": function}
                return [{"role": "assistant", "tool_calls": [call]}]
            case "function_call_output" | "tool_result":
                content = texts_of(self.content, place)
                return [{"role": "tool", "tool_call_id": self.call_id, "content": content}]
        text = self.of_text(field)
        if within is None:
            raise refused(f"{GIVEN}{field}", "put the part into a message")
        return [{"role": within, "content": [text]}]

    def of_text(self, field: str) -> Delta:
        if self.type not in _TEXTS or self.text is None:
            raise refused(field, f"{self.type} is not served here; text is")
        return {"type": "text", "text": self.text}


Pieces = str | Annotated[list[Piece], SEVERAL]


def texts_of(pieces: Pieces | None, field: str) -> list[Delta]:
    """Return the parts of a chat's message."""
    if not isinstance(pieces, list):
        return [{"type": "text", "text": pieces or ""}]
    return [each.of_text(f"{field}[{index}]") for index, each in enumerate(pieces)]


def messages_of(
    pieces: list[Piece], field: str, *roles: Any, within: Any = None, system: Pieces | None = None
) -> list[Delta]:
    """Return a chat's messages. Neighbours of one of these roles, as a text and a call, are one."""
    made = [{"role": "system", "content": texts_of(system, "system")}] if system else []
    for index, piece in enumerate(pieces):
        for message in piece.messages(f"{field}[{index}]", within):
            if made and made[-1]["role"] == message["role"] in roles:
                for name in message.keys() - {"role"}:
                    made[-1][name] = made[-1].get(name, type(message[name])()) + message[name]
            else:
                made.append(message)
    return made


def tools_of(tools: Any, *kinds: str | None) -> Any:
    """Return a chat's tools. `kinds`: functions' types. Chats refuse what lists no objects."""
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        return tools
    for index, tool in enumerate(tools):
        if (kind := tool.get("type")) not in kinds:
            raise refused(f"tools[{index}]", f"{kind} is not served; functions are")
    return [{"function": without_type(tool)} for tool in tools] or None


def format_of(wanted: Any) -> Any:
    """Return a chat's `response_format`."""
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": without_type(wanted)}
    return wanted


def without_type(value: Delta) -> Delta:
    return {name: each for name, each in value.items() if name != "type"}


class TranslatedBody(BaseModel):
    """A chat in another API's shape. Further fields are those of a chat, such as `request_id`."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)
    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    renamed: ClassVar[Mapping[str, str]]  # how errors call fields of the chat
    unserved: ClassVar[Mapping[str, str]]  # they would change the answer; their name here, or ""

    @cached_property
    def as_chat(self) -> ChatBody:
        given = dict(self.model_extra or {})
        for name, here in {**dict.fromkeys(_OF_CHATS, ""), **self.unserved}.items():
            value = given.pop(name, None)
            if isinstance(value, dict) and not here:
                name, value = ".".join((name, *list(value)[:1])), any(value.values())
            if value and (name, value) != ("n", 1):
                raise refused(GIVEN + name, f"here it is {here}" if here else "not served here")
        own = {name: getattr(self, name) for name in TranslatedBody.model_fields}
        return ChatBody.model_validate(given | own | self.fields())

    @abstractmethod
    def fields(self) -> Delta:
        """Return its own fields as a chat's body has them."""

    def requests(self) -> Sequence[Any]:
        return self.as_chat.requests()


@dataclass
class Block:
    index: int
    kind: str
    """`reasoning_content`, `content` or `tool_calls`, as a chat's message calls it."""
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return its text; of a call, the arguments."""
        return "".join(self.pieces)


class Translating(Answering, ABC):
    """Own the answer's blocks, of which the last one grows."""

    def __init__(self, api: Api, asked: Asked) -> None:
        super().__init__(api, asked)
        self._blocks: list[Block] = []
        self._reason = ""  # as a chat's `finish_reason`

    @abstractmethod
    def _changes(self, change: str, block: Block, text: str = "") -> list[Delta]:
        """Return events of a change: `start`, `delta` (it grows by the text) or `stop`."""

    @abstractmethod
    def _document(self, choices: Sequence[Choice]) -> Delta:
        """Return the whole answer."""

    def _take(self, piece: Delta) -> list[Delta]:
        self._reason = piece["finish_reason"] or self._reason
        delta, made = piece["delta"], list[Delta]()
        said = [(kind, "", "", delta.get(kind)) for kind in ("reasoning_content", "content")]
        for call in delta.get("tool_calls", ()):
            function = {"name": "", **call["function"]}
            said.append(("tool_calls", call.get("id", ""), function["name"], function["arguments"]))
        for kind, call_id, name, text in said:
            if call_id or (text and not (self._blocks and self._blocks[-1].kind == kind)):
                made += self._stop_last()
                self._blocks.append(Block(len(self._blocks), kind, call_id, name))
                made += self._changes("start", self._blocks[-1])
            if text:
                self._blocks[-1].pieces.append(text)
                made += self._changes("delta", self._blocks[-1], text)
        return made

    def _stop_last(self) -> list[Delta]:
        return self._changes("stop", self._blocks[-1]) if self._blocks else []

    async def _whole(self, choices: Sequence[Choice]) -> Delta:
        while events := await choices[0].events():
            for piece in choices[0].take(events):
                self._take(piece)
        return self._document(choices)

    def _line(self, piece: Delta) -> bytes:
        return events_of(*self._take(piece))


def events_of(*values: Delta) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (value["type"].encode(), to_json(value)) for value in values
    )
