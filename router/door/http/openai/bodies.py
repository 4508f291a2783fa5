"""OpenAI's request bodies, and the `GenerateRequest`s that they become.

Shapes are checked here; what values mean is checked where gRPC's requests are. What becomes of
fields that no body has is in `fields.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from baton.errors import InvalidRequestError
from baton.v1 import common_pb2, router_pb2
from router.door.http.openai.fields import ignored, refused
from router.request.chat import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from router.request.client_request import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from router.request.counting import check_json
from router.request.validate import ALL_THAT_FIT, MAX_BAD_WORDS

MAX_CHOICES = 128
_COMPLETION_TOKENS = 16
"""Of a completion whose client names no number, as OpenAI and vLLM have it."""
_OF_64_BITS = (1 << 64) - 1
_OLDER = Field(default=None, description="One of `structured_outputs`, under its older name.")
_UINT32 = Field(default=None, ge=0, le=(1 << 32) - 1)
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_tokens", "min_tokens", "ignore_eos"),
)
_PLAIN = (  # as in `GenerateRequest`
    *("model", "request_id", "priority", "timeout_ms", "ttft_target_ms", "itl_target_ms"),
    *("tenant", "cache_salt", "session_id", "include_stop_str_in_output", "stop_token_ids"),
    "bad_words",
)
_CONSTRAINTS = {
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    **{"json_schema": "json", "regex": "regex", "ebnf": "grammar"},
}
"""What older releases of vLLM, and SGLang, call those of `structured_outputs`."""

_KINDS = ("str", "int", "float", "bool", "dict", "list")  # as pydantic names those of a union

_BOUNDS = ("too_long", "greater_than_equal", "less_than", "less_than_equal")

_FAIL_FAST = Field(fail_fast=True)


def _at_most(count: int) -> Any:
    """Bound a list's length. Its first item that is wrong is the only one that is told."""
    return Field(max_length=count, fail_fast=True)


Int = Annotated[  # 16.0 is one, too
    int, BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
]
TokenId = Annotated[Int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], _FAIL_FAST]


class _Part(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="allow",  # `fields` judges what is not listed
        use_attribute_docstrings=True,  # for OpenAPI
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    """What a body calls fields of its request: their patterns, and its names."""

    @property
    def as_chat(self) -> _Part:
        """Return the chat that the body of another API becomes; any other is its own."""
        return self


class TextPart(_Part):
    type: str
    text: str | None = None
    refusal: str | None = None
    """Of an assistant, in place of the text."""


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
    reasoning: str | None = None
    """The same as `reasoning_content`, which goes before it."""
    name: str | None = None
    refusal: str | None = None
    """In place of the content."""


class StreamOptions(_Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(_Part):
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(_Part):
    type: str
    json_schema: JsonSchema | None = None

    def constraint(self) -> tuple[str, Any]:
        schema = self.json_schema and self.json_schema.json_schema
        if self.type == "json_object" and schema is None:
            return self.type, True
        if self.type == "json_schema" and schema is not None:
            return "json", schema
        problem = f"{self.type!r}: give text, json_object, or json_schema with a schema"
        raise refused("response_format", problem)


class StructuredOutputs(_Part):
    """What the answer must fit: one of these, under vLLM's names."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], _FAIL_FAST] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraint(self) -> tuple[str, Any]:
        known = {info.alias or name: name for name, info in type(self).model_fields.items()}
        every = ((name, getattr(self, field)) for name, field in known.items())
        given = [(name, value) for name, value in every if value is not None and value is not False]
        if len(given) != 1:
            raise refused("structured_outputs", f"give exactly one of {', '.join(known)}")
        return given[0]


class NamedFunction(_Part):
    name: str


class NamedTool(_Part):
    type: str = "function"
    function: NamedFunction


class AllowedTools(_Part):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], _at_most(MAX_TOOLS)]


class AllowedToolsChoice(_Part):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class _Templated(_Part):
    """What the chat template reads beside messages and tools."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    documents: Annotated[list[dict[str, Any]], _FAIL_FAST] | None = None
    """Documents for the chat template."""
    reasoning_effort: str | None = None
    """A variable of the chat template, as `enable_thinking`: false where it is `none`."""
    add_generation_prompt: bool | None = None
    """False: the prompt does not open the assistant's turn."""
    continue_final_message: bool | None = None
    """The answer continues the last message."""

    def chat(self, messages: list[Message], tools: list[Tool] | None) -> router_pb2.ChatMessages:
        if self.continue_final_message and self.add_generation_prompt:
            raise refused("continue_final_message", "cannot be combined with add_generation_prompt")
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        if effort is not None:  # as vLLM has it
            given |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        given |= self.chat_template_kwargs or {}
        return router_pb2.ChatMessages(
            messages=[_message(each, f"messages[{i}]") for i, each in enumerate(messages)],
            tools=[_tool(each, f"tools[{i}]") for i, each in enumerate(tools or ())],
            template_arguments=_json(given) if given else "",
            continue_final_message=bool(self.continue_final_message),
            omit_generation_prompt=self.add_generation_prompt is False,
        )


class _Body(_Part):
    """What every body that asks for an answer may have."""

    model: str | None = None
    n: Int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """Answers to each prompt, with the seeds `seed`, `seed` + 1 and so on."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], _at_most(MAX_STOP_STRINGS)] | None = None
    """Texts that end the answer, which leaves them out."""
    stop_token_ids: Annotated[list[TokenId], _at_most(MAX_STOP_TOKEN_IDS)] | None = None
    """Ids that end the answer, besides end-of-sequence ids."""
    seed: Int | None = Field(default=None, ge=-(1 << 63), le=_OF_64_BITS)
    """Drawn where it is missing. The same seed and body give the same tokens."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = Field(default=None, ge=-1, le=(1 << 32) - 1)
    """Tokens to sample from, the likeliest ones; -1 and 0: all."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: Int | None = _UINT32
    """Missing: 16 for a completion; for a chat the tenant's default, or what fits."""
    min_tokens: Int | None = _UINT32
    """The answer does not end before it has so many tokens."""
    ignore_eos: bool | None = None
    """End-of-sequence tokens do not end the answer."""
    logit_bias: dict[str, float] | None = None
    """From token ids to what is added to their logits, -100 to 100."""
    allowed_token_ids: TokenIds | None = None
    """No other tokens are sampled."""
    bad_words: Annotated[list[str], _at_most(MAX_BAD_WORDS)] | None = None
    """Texts that are never sampled."""
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1, lt=ALL_THAT_FIT)
    """Keep so many of the prompt's last tokens; -1: as many as fit beside `max_tokens`."""
    skip_special_tokens: bool | None = None
    """False: the text shows special tokens."""
    include_stop_str_in_output: bool | None = None
    """Leave what ended the answer in its text."""
    return_token_ids: bool | None = None
    """Return the ids of the prompt's and the answer's tokens, too."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = _OLDER
    guided_regex: str | None = _OLDER
    guided_choice: Annotated[list[str], _FAIL_FAST] | None = _OLDER
    guided_grammar: str | None = _OLDER
    json_schema: dict[str, Any] | str | None = _OLDER
    regex: str | None = _OLDER
    ebnf: str | None = _OLDER
    request_id: str | None = None
    """Names the request. The same id and body again attach to it; another body is refused."""
    priority: Int | None = Field(default=None, ge=-(1 << 31), lt=1 << 31)
    """Among the tenant's requests: lower goes first."""
    timeout_ms: Int | None = _UINT32
    """The request ends with 504 after so many milliseconds."""
    ttft_target_ms: Int | None = _UINT32
    """Wanted milliseconds until the first token; metrics count whether they are met."""
    itl_target_ms: Int | None = _UINT32
    """Wanted median of milliseconds between tokens; metrics count whether it is met."""
    tenant: str | None = None
    """Whose request it is. Missing: the API key's tenant."""
    cache_salt: str | None = None
    """Cached prompts are shared only among requests of the same salt."""
    session_id: str | None = None
    """A conversation: its requests prefer the worker that has its cache."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def constraints(self) -> list[str]:
        """Name the fields that say what its answer must be: one at most, if they are right."""
        named = [*_CONSTRAINTS, "structured_outputs", "response_format"]
        if self.response_format is not None and self.response_format.type == "text":
            named.pop()
        return [name for name in named if getattr(self, name) is not None]

    @abstractmethod
    def requests(self) -> list[router_pb2.GenerateRequest]:
        """Return one for each prompt, whatever the number of choices (see `choices_of`)."""

    def request(self, **more: Any) -> router_pb2.GenerateRequest:
        """Make a request with these fields besides those that all bodies have."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "needs stream: true")
        for token in self.logit_bias or ():
            if not (token.isdecimal() and len(token) <= 10 and int(token) < 1 << 32):
                raise refused("logit_bias", f"{token!r} is no token id")
        sampling: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING}
        sampling["logit_bias"] = {int(key): bias for key, bias in (self.logit_bias or {}).items()}
        if self.top_k == -1:  # all
            sampling["top_k"] = 0
        kept, ids = self.truncate_prompt_tokens or 0, self.allowed_token_ids
        return router_pb2.GenerateRequest(
            **{name: getattr(self, name) for name in _PLAIN},
            **self._constraint(),
            stop=self.stops,
            sampling=common_pb2.SamplingParams(**sampling),
            seed=None if self.seed is None else self.seed & _OF_64_BITS,
            show_special_tokens=self.skip_special_tokens is False,
            truncate_prompt_tokens=ALL_THAT_FIT if kept < 0 else kept,
            allowed_token_ids=None if ids is None else router_pb2.TokenIds(ids=ids),
            # A named request may come again, of which HTTP does not tell.
            resume_from_index=0 if self.request_id else None,
            **more,
        )

    def _constraint(self) -> dict[str, Any]:
        named = self.constraints
        if len(named) > 1:
            raise refused(named[1], f"cannot be combined with {named[0]}: give one constraint")
        if not named:
            return {}
        value, kind = getattr(self, named[0]), _CONSTRAINTS.get(named[0])
        if kind is None:
            kind, value = value.constraint()
        match kind:
            case "json":
                return {"json_schema": value if isinstance(value, str) else _json(value)}
            case "choice":
                return {"choice": router_pb2.Choice(texts=value)}
            case "json_object":
                return {"json_object": router_pb2.JsonObject()}
        return {kind: value}


class ChatBody(_Body, _Templated):
    """Answer a chat."""

    renamed = {"prompt|chat": "messages", "sampling.logprobs": "top_logprobs"}
    messages: Annotated[list[Message], _at_most(MAX_MESSAGES)]
    max_completion_tokens: Int | None = _UINT32
    """The same as `max_tokens`, and goes before it."""
    logprobs: bool | None = None
    top_logprobs: Int | None = _UINT32
    tools: Annotated[list[Tool], _at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | AllowedToolsChoice | None = None
    """`required` or a function: the answer is calls alone, which keep to the parameters."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""

    @property
    def offered(self) -> list[Tool]:
        """Return the tools that its answer may call; the model sees no others."""
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            names = {each.function.name for each in choice.allowed_tools.tools}
            return [tool for tool in tools if tool.function.name in names]
        return [] if choice == "none" else tools

    def requests(self) -> list[router_pb2.GenerateRequest]:
        choice, offered = self.tool_choice, self.offered
        if choice not in (None, "none") and not offered:
            raise refused("tool_choice", "needs tools to choose from")
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "needs logprobs: true")
        made = self.request(chat=self.chat(self.messages, offered))
        if self.max_completion_tokens is not None:
            made.sampling.max_tokens = self.max_completion_tokens
        if self.logprobs:
            made.sampling.logprobs = self.top_logprobs or 0
        if isinstance(choice, AllowedToolsChoice):
            choice = choice.allowed_tools.mode
        if isinstance(choice, NamedTool):
            made.chat.tool_choice.name = choice.function.name
        elif choice == "required":
            made.chat.tool_choice.SetInParent()
            made.chat.tool_choice.is_single = self.parallel_tool_calls is False
        return [made]


class CompletionBody(_Body):
    """Continue a text."""

    renamed = {"text": "prompt"}
    prompt: (
        str
        | Annotated[list[str], _at_most(MAX_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], _at_most(MAX_CHOICES)]
    )
    """A text, token ids, or several of either."""
    logprobs: Int | None = _UINT32
    """Return log-probabilities of so many likeliest tokens at each position."""
    echo: bool | None = None
    """The answer begins with the prompt."""
    prompt_logprobs: Int | None = _UINT32
    """Return log-probabilities of the prompt's tokens; not streamed."""
    add_special_tokens: bool | None = None
    """False: the tokenizer adds none to the prompt."""

    def requests(self) -> list[router_pb2.GenerateRequest]:
        if self.stream and self.prompt_logprobs is not None:
            raise refused("prompt_logprobs", "cannot be combined with stream: true")
        prompts = prompts_of(self.prompt)
        if len(prompts) * self.num_choices > MAX_CHOICES:
            asked = f"{len(prompts)} prompts of {self.num_choices} choices"
            raise refused("prompt", f"{asked}; at most {MAX_CHOICES} in all are taken")
        if self.request_id and len(prompts) > 1:
            raise refused("request_id", "names a single prompt; several are given")
        base = self.request(omit_special_tokens=self.add_special_tokens is False)
        if self.max_tokens is None:
            base.sampling.max_tokens = max(_COMPLETION_TOKENS, base.sampling.min_tokens)
        if self.logprobs is not None:
            base.sampling.logprobs = self.logprobs
        of_prompt = [self.prompt_logprobs, self.logprobs if self.echo else None]
        if wanted := [each for each in of_prompt if each is not None]:
            base.sampling.prompt_logprobs = max(wanted)
        if self.echo and self.max_tokens == 0:  # the first token is computed, and left out
            base.sampling.max_tokens = 1
        made = []
        for prompt in prompts:
            is_text = isinstance(prompt, str)
            given: dict[str, Any] = {"text": prompt} if is_text else {"token_ids": {"ids": prompt}}
            made.append(router_pb2.GenerateRequest(**given))
            made[-1].MergeFrom(base)
        return made


class TokenizeBody(_Templated):
    """Return a prompt's token ids, as vLLM has it."""

    renamed = {"text": "prompt", "chat": "messages"}
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], _at_most(MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], _at_most(MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    tenant: str | None = None

    def requests(self) -> list[router_pb2.TokenizeRequest]:
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "give either prompt or messages")
        prompt: dict[str, Any] = {"text": self.prompt}
        if self.messages is not None:
            prompt = {"chat": self.chat(self.messages, self.tools)}
        bare = self.add_special_tokens is False
        prompt |= {"model": self.model or "", "tenant": self.tenant or ""}
        return [router_pb2.TokenizeRequest(**prompt, omit_special_tokens=bare)]


class DetokenizeBody(_Part):
    """Return the text of token ids, as vLLM has it."""

    renamed = {r"prompt(.*)": r"tokens\1"}
    model: str | None = None
    tokens: TokenIds
    tenant: str | None = None

    def requests(self) -> list[router_pb2.GenerateRequest]:
        ids = router_pb2.TokenIds(ids=self.tokens)
        model, tenant = self.model or "", self.tenant or ""
        return [router_pb2.GenerateRequest(model=model, tenant=tenant, token_ids=ids)]


def parsed(kind: type[Any], data: bytes) -> tuple[Any, list[Any], list[str]]:
    """Return the body, its requests and the fields that were ignored. Raises InvalidRequestError,
    which names the field."""
    check_json(data)
    try:
        body = kind.model_validate_json(data)
        names = ignored(body, body.as_chat, SERVED)
        return body, body.requests(), names
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
        # Of a union's errors, the one that gets furthest is of the kind that was meant.
        first = max(of_field, key=lambda each: (each["type"] in _BOUNDS, len(each["loc"])))
        field, problem = _field(first["loc"]), first["msg"]
        if first["type"] == "too_long":
            problem = f"at most {first['ctx']['max_length']} are taken"
        raise InvalidRequestError(
            f"{field}: {problem}" if field else problem, field=field
        ) from None


def _field(location: Sequence[str | int]) -> str | None:
    """Return a location as a path, without names that pydantic gives to the kinds of a union."""
    path = ""
    for each in location:
        if isinstance(each, int):
            path += f"[{each}]"
        elif each.isidentifier() and each.islower() and each not in _KINDS:
            path += f".{each}" if path else each
    return path or None


def _tool(tool: Tool, field: str) -> router_pb2.Tool:
    if tool.type != "function":
        raise refused(f"{field}.type", "only functions are served")
    function = tool.function
    parameters = "" if function.parameters is None else _json(function.parameters)
    return router_pb2.Tool(
        name=function.name, description=function.description or "", parameters=parameters
    )


def _message(message: Message, field: str) -> router_pb2.ChatMessage:
    made = router_pb2.ChatMessage(
        role=message.role,
        tool_call_id=message.tool_call_id or "",
        reasoning_content=message.reasoning_content or message.reasoning or "",
        name=message.name or "",
    )
    content = message.refusal if message.content is None else message.content
    if isinstance(content, str):
        made.content = content
    for index, part in enumerate(content if isinstance(content, list) else ()):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            problem = f"{part.type} parts are not supported; text is"
            raise refused(f"{field}.content[{index}]", problem)
        made.parts.add(text=text)
    for call in message.tool_calls or ():
        given = call.function.arguments
        arguments = given if isinstance(given, str) else _json(given or {})
        made.tool_calls.add(id=call.id, name=call.function.name, arguments=arguments)
    return made


def _json(value: Any) -> str:
    return pydantic_core.to_json(value).decode()


def choices_of(
    requests: Iterable[router_pb2.GenerateRequest], count: int
) -> Iterator[router_pb2.GenerateRequest]:
    """Yield `count` of each: the request, then ones of the next seeds. One at a time, since
    each has the whole prompt."""
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


def prompts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    """Return the prompts, each a text or token ids."""
    if not given:
        raise refused("prompt", "the prompt is empty")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


SERVED = frozenset(ChatBody.model_fields) | frozenset(CompletionBody.model_fields)
