"""A model's chat template, rendered the way transformers renders it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError, InvalidRequestError
from router.text.token_search import TokenSearch

# Unicode noncharacters: never part of a text that is meant for interchange.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_CUT = "\ufffe "  # a noncharacter too; templates that strip a text take the space
_MAX_CHARS = 256 << 20  # of a chat's text
# What a template does to messages it was not written for, however it is raised.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Conversation:
    """What a template reads, in the shapes of OpenAI's and transformers' messages and tools."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    continue_final_message: bool = False
    add_generation_prompt: bool = True


_OWN_ARGUMENTS = {"messages", "tools", "add_generation_prompt"}


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """Unlike jinja2's own filter, leaves <, > and & as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """Render messages to the text a model was trained on.

    Special tokens in a message's content stay ordinary text: a client cannot close its turn and
    open another one by writing `<|im_end|>`. Each one is broken by an invisible mark before
    rendering; the encoder takes the mark out again once the template's own special tokens are
    distinguished (see `SegmentEncoder`).
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], guarded_tokens: Sequence[str]
    ) -> None:
        """`guarded_tokens`: texts of the special tokens; raises ConfigError on bad syntax."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        except _REFUSALS as error:
            raise ConfigError(f"chat template: cannot be compiled: {error!r}") from error
        self._special_tokens = dict(special_tokens)
        self._guarded = TokenSearch([token for token in guarded_tokens if len(token) > 1])

    def render(self, conversation: Conversation) -> tuple[str, str | None]:
        """Return the text up to where the assistant goes on, and the mark in it, if one was needed.

        Raises InvalidRequestError when the template refuses the messages.
        """
        own = conversation.arguments.keys() & (_OWN_ARGUMENTS | self._special_tokens.keys())
        if own:
            raise InvalidRequestError(
                f"template_arguments: {min(own)} is the router's to give",
                field="chat.template_arguments",
            )
        messages = conversation.messages
        if conversation.continue_final_message:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + _CUT}]
        values = {
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
            "messages": messages,
            "tools": conversation.tools or None,
            **conversation.arguments,
        }
        mark = self._choose_mark(list(_texts(values)))
        if mark is not None:
            values = self._guard_all(values, mark)
        try:
            text = "".join(_bounded(self._template.generate(**self._special_tokens, **values)))
            text = _up_to_cut(text) if conversation.continue_final_message else text
        except _REFUSALS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", field="chat"
            ) from error
        return text, mark

    def _choose_mark(self, texts: Sequence[str]) -> str | None:
        if not any(self._guarded.first(text) for text in texts):
            return None
        for mark in _MARKS:
            if not any(mark in text for text in texts):
                return mark
        raise InvalidRequestError(
            "special tokens beside every Unicode noncharacter cannot be kept apart", field="chat"
        )

    def _guard_all(self, value: Any, mark: str) -> Any:
        """Return a value with every text in it guarded."""
        match value:
            case str():
                return self._guard(value, mark)
            case Mapping():
                return {
                    self._guard(key, mark): self._guard_all(each, mark)
                    for key, each in value.items()
                }
            case list() | tuple():
                return [self._guard_all(each, mark) for each in value]
        return value

    def _guard(self, content: str, mark: str) -> str:
        """Break every special token after its first character; tokens may overlap."""
        start = 0
        pieces = []
        while match := self._guarded.first(content, start):
            pieces.append(content[start : match.start() + 1])
            start = match.start() + 1
        pieces.append(content[start:])
        return mark.join(pieces)


def _up_to_cut(text: str) -> str:
    """Cut after the final message, and strip it if the template does, as transformers does."""
    before, found, after = text.rpartition(_CUT.strip())
    if not found:
        raise jinja2.TemplateError("it does not show the final message, which is to be continued")
    return before if after.startswith(" ") else before.rstrip()


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > _MAX_CHARS:
            raise jinja2.TemplateError(f"its text is longer than {_MAX_CHARS} characters")
        yield piece


def _texts(value: Any) -> Iterator[str]:
    """Yield every text within a value."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, each in value.items():
                yield key
                yield from _texts(each)
        case list() | tuple():
            for each in value:
                yield from _texts(each)
