"""OpenAI's request bodies, and the `GenerateRequest`s that they become.

Shapes are checked here; what values mean is checked where gRPC's requests are. Fields that nobody
knows are ignored. Fields that would change the answer and cannot be served are refused by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.errors import InvalidRequestError
from baton.v1 import common_pb2, router_pb2
from router.request.chat import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from router.request.counting import check_json
from router.request.validate import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

MAX_CHOICES = 128
_COMPLETION_TOKENS = 16
"""Of a completion whose client names no number, as OpenAI and vLLM have it."""
_OF_64_BITS = (1 << 64) - 1
_UINT32 = Field(default=None, ge=0, le=(1 << 32) - 1)
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_tokens", "min_tokens", "ignore_eos"),
)
_PLAIN = (
    *("request_id", "priority", "timeout_ms", "ttft_target_ms", "itl_target_ms", "tenant"),
    *("cache_salt", "session_id"),
)

_FAIL_FAST = Field(fail_fast=True)


def _at_most(count: int) -> Any:
    """Of a list: how long it may be. Its first item that is wrong is the only one that is told."""
    return Field(max_length=count, fail_fast=True)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class TextPart(_Part):
    type: str
    text: str | None = None
    refusal: str | None = None  # of an assistant, in place of the text


class Function(_Part):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Part):
    type: str = "function"
    function: Function


class CalledFunction(_Part):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Part):
    id: str = ""
    function: CalledFunction


class Message(_Part):
    role: str
    content: str | Annotated[list[TextPart], _at_most(MAX_PARTS)] | None = None
    tool_calls: Annotated[list[ToolCall], _at_most(MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(_Part):
    include_usage: bool | None = None


class JsonSchema(_Part):
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(_Part):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Part):
    """As vLLM has it; one of them."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], _FAIL_FAST] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class NamedFunction(_Part):
    name: str


class NamedTool(_Part):
    type: str = "function"
    function: NamedFunction


class _Body(_Part):
    """What every body that asks for an answer may have."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], _at_most(MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], _at_most(MAX_STOP_TOKEN_IDS)] | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), le=_OF_64_BITS)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, le=(1 << 32) - 1)
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = _UINT32
    min_tokens: int | None = _UINT32
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Baton's own, as in `GenerateRequest`.
    request_id: str | None = None
    # Lower goes first, as in vLLM.
    priority: int | None = Field(default=None, ge=-(1 << 31), lt=1 << 31)
    timeout_ms: int | None = _UINT32
    ttft_target_ms: int | None = _UINT32
    itl_target_ms: int | None = _UINT32
    tenant: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None

    unserved: ClassVar[tuple[str, ...]] = ("logit_bias",)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @abstractmethod
    def requests(self) -> list[router_pb2.GenerateRequest]:
        """One for each prompt, whatever the number of choices (see `choices_of`)."""

    def request(self) -> router_pb2.GenerateRequest:
        """Without its prompt."""
        for name in self.unserved:
            if getattr(self, name):
                raise InvalidRequestError(f"{name}: not supported by this release", field=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options: only with stream: true", field="stream_options"
            )
        made = router_pb2.GenerateRequest(
            model=self.model or "", stop=_listed(self.stop), sampling=self._sampling()
        )
        for name in _PLAIN:
            if (value := getattr(self, name)) is not None:
                setattr(made, name, value)
        try:
            made.stop_token_ids.extend(self.stop_token_ids or ())
        except ValueError:
            raise _out_of_range("stop_token_ids") from None
        if self.seed is not None:
            made.seed = self.seed & _OF_64_BITS
        if self.request_id:  # it may come again, of which HTTP does not tell
            made.resume_from_index = 0
        self._constrain(made)
        return made

    def _sampling(self) -> common_pb2.SamplingParams:
        sampling = common_pb2.SamplingParams()
        for name in _SAMPLING:
            value = getattr(self, name)
            if value is not None:
                setattr(sampling, name, 0 if name == "top_k" and value == -1 else value)  # all
        return sampling

    def _constrain(self, made: router_pb2.GenerateRequest) -> None:
        wanted, other = self.response_format, self.structured_outputs
        if other is not None:
            if len(other.model_dump(exclude_none=True)) != 1 or wanted is not None:
                known = ", ".join(
                    info.alias or name for name, info in StructuredOutputs.model_fields.items()
                )
                raise InvalidRequestError(
                    f"structured_outputs: one constraint, of {known}", field="structured_outputs"
                )
            _structure(made, other)
        if wanted is None or wanted.type == "text":
            return
        if wanted.type == "json_object":
            made.json_object.SetInParent()
        elif wanted.type == "json_schema":
            schema = wanted.json_schema
            if schema is None or schema.json_schema is None:
                raise InvalidRequestError(
                    "response_format: json_schema.schema is missing", field="response_format"
                )
            made.json_schema = _json(schema.json_schema)
        else:
            raise InvalidRequestError(
                f"response_format: unknown type {wanted.type!r}", field="response_format"
            )


class ChatBody(_Body):
    messages: Annotated[list[Message], _at_most(MAX_MESSAGES)]
    max_completion_tokens: int | None = _UINT32
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=(1 << 32) - 1)
    tools: Annotated[list[Tool], _at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Annotated[list[str], _FAIL_FAST] | None = None
    audio: dict[str, Any] | None = None

    unserved: ClassVar[tuple[str, ...]] = ("logit_bias", "functions", "function_call", "audio")

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools or ())

    def requests(self) -> list[router_pb2.GenerateRequest]:
        if self.modalities and self.modalities != ["text"]:
            raise InvalidRequestError("modalities: text only", field="modalities")
        self._check_tool_choice()
        made = self.request()
        if self.max_completion_tokens is not None:
            made.sampling.max_tokens = self.max_completion_tokens
        if self.logprobs:
            made.sampling.logprobs = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequestError(
                "top_logprobs: only with logprobs: true", field="top_logprobs"
            )
        tools = self.tools if self.calls_tools else None
        made.chat.CopyFrom(chat_of(self.messages, tools, self.chat_template_kwargs))
        if isinstance(self.tool_choice, NamedTool):
            made.chat.tool_choice.name = self.tool_choice.function.name
        elif self.tool_choice == "required":
            made.chat.tool_choice.SetInParent()
            made.chat.tool_choice.is_single = self.parallel_tool_calls is False
        return [made]

    def _check_tool_choice(self) -> None:
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequestError("tool_choice: only with tools", field="tool_choice")


class CompletionBody(_Body):
    prompt: (
        str
        | Annotated[list[str], _at_most(MAX_CHOICES)]
        | Annotated[list[int], _FAIL_FAST]
        | Annotated[list[Annotated[list[int], _FAIL_FAST]], _at_most(MAX_CHOICES)]
    )
    logprobs: int | None = Field(default=None, ge=0, le=(1 << 32) - 1)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    unserved: ClassVar[tuple[str, ...]] = ("logit_bias", "echo", "suffix")

    def requests(self) -> list[router_pb2.GenerateRequest]:
        if self.best_of not in (None, self.num_choices):
            raise InvalidRequestError("best_of: only n is taken", field="best_of")
        base = self.request()
        if self.max_tokens is None:
            base.sampling.max_tokens = max(_COMPLETION_TOKENS, base.sampling.min_tokens)
        if self.logprobs is not None:
            base.sampling.logprobs = self.logprobs
        prompts = _prompts(self.prompt)
        if len(prompts) * self.num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"prompt: {len(prompts)} prompts of {self.num_choices} choices; at most "
                f"{MAX_CHOICES} in all are taken",
                field="prompt",
            )
        if base.request_id and len(prompts) > 1:
            raise InvalidRequestError("request_id: for one prompt only", field="request_id")
        made = []
        for prompt in prompts:
            request = router_pb2.GenerateRequest()
            request.CopyFrom(base)
            if isinstance(prompt, str):
                request.text = prompt
            else:
                try:
                    request.token_ids.ids.extend(prompt)
                except ValueError:
                    raise _out_of_range("prompt") from None
                request.token_ids.SetInParent()
            made.append(request)
        return made


class TokenizeBody(_Part):
    """As vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], _at_most(MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], _at_most(MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tenant: str | None = None

    def requests(self) -> list[router_pb2.TokenizeRequest]:
        made = router_pb2.TokenizeRequest(model=self.model or "", tenant=self.tenant or "")
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt: either prompt or messages", field="prompt")
        if self.messages is not None:
            made.chat.CopyFrom(chat_of(self.messages, self.tools, self.chat_template_kwargs))
        else:
            made.text = self.prompt or ""
        return [made]


def parsed(kind: type[_Body] | type[TokenizeBody], data: bytes) -> tuple[Any, list[Any]]:
    """The body, and its requests. Raises InvalidRequestError, which names the field."""
    check_json(data)
    try:
        body = kind.model_validate_json(data)
        return body, body.requests()
    except UnicodeEncodeError:
        raise InvalidRequestError("a text holds half of a surrogate pair") from None
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        first = next((each for each in errors if each["type"] == "too_long"), errors[0])
        field, problem = _field(first["loc"]), first["msg"]
        if first["type"] == "too_long":
            problem = f"at most {first['ctx']['max_length']} are taken"
        raise InvalidRequestError(
            f"{field}: {problem}" if field else problem, field=field
        ) from None


def _field(location: Sequence[str | int]) -> str | None:
    """As a path; without the names that pydantic gives to the kinds of a union."""
    path = ""
    for each in location:
        if isinstance(each, int):
            path += f"[{each}]"
        elif each in _FIELDS:
            path += f".{each}" if path else each
    return path or None


def chat_of(
    messages: list[Message], tools: list[Tool] | None, arguments: dict[str, Any] | None
) -> router_pb2.ChatMessages:
    chat = router_pb2.ChatMessages()
    for index, message in enumerate(messages):
        _add(chat, message, f"messages[{index}]")
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise InvalidRequestError(
                f"tools[{index}].type: functions only", field=f"tools[{index}].type"
            )
        function = tool.function
        parameters = "" if function.parameters is None else _json(function.parameters)
        chat.tools.add(
            name=function.name, description=function.description or "", parameters=parameters
        )
    if arguments:
        chat.template_arguments = _json(arguments)
    return chat


def _add(chat: router_pb2.ChatMessages, message: Message, field: str) -> None:
    made = chat.messages.add(
        role="system" if message.role == "developer" else message.role,
        tool_call_id=message.tool_call_id or "",
        reasoning_content=message.reasoning_content or "",
    )
    if isinstance(message.content, str):
        made.content = message.content
    for index, part in enumerate(message.content or () if not made.content else ()):
        assert isinstance(part, TextPart)
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            raise InvalidRequestError(
                f"{field}.content[{index}]: {part.type} parts are not supported; text is",
                field=f"{field}.content[{index}]",
            )
        made.parts.add(text=text)
    for call in message.tool_calls or ():
        given = call.function.arguments
        arguments = given if isinstance(given, str) else _json(given or {})
        made.tool_calls.add(id=call.id, name=call.function.name, arguments=arguments)


def _json(value: Any) -> str:
    return pydantic_core.to_json(value).decode()


def choices_of(
    requests: Iterable[router_pb2.GenerateRequest], count: int
) -> Iterator[router_pb2.GenerateRequest]:
    """`count` of each: the request itself first; each further one has the next seed. One at a time,
    since each has the whole prompt."""
    for request in requests:
        yield request
        for number in range(1, count):
            other = router_pb2.GenerateRequest()
            other.CopyFrom(request)
            if request.HasField("seed"):
                other.seed = (request.seed + number) & _OF_64_BITS
            if request.request_id:
                other.request_id = f"{request.request_id}.{number}"
            yield other


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("prompt: the prompt is empty", field="prompt")
    if isinstance(given[0], int):
        return [given]
    return list(given)


def _structure(made: router_pb2.GenerateRequest, wanted: StructuredOutputs) -> None:
    if (schema := wanted.json_schema) is not None:
        made.json_schema = schema if isinstance(schema, str) else _json(schema)
    elif wanted.regex is not None:
        made.regex = wanted.regex
    elif wanted.grammar is not None:
        made.grammar = wanted.grammar
    elif wanted.choice is not None:
        made.choice.texts.extend(wanted.choice)
        made.choice.SetInParent()
    elif wanted.json_object:
        made.json_object.SetInParent()


def _listed(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _out_of_range(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: a token id is out of range", field=field)


_FIELDS = frozenset(
    info.alias or name
    for kind in (
        *(TextPart, Function, Tool, CalledFunction, ToolCall, Message, StreamOptions, JsonSchema),
        *(
            ResponseFormat,
            StructuredOutputs,
            NamedFunction,
            NamedTool,
            ChatBody,
            CompletionBody,
            TokenizeBody,
        ),
    )
    for name, info in kind.model_fields.items()
)
