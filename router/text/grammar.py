"""Grammars of what an answer must be, as llguidance reads them.

A grammar is a list of parts. The first is what the answer follows; it names the others as `@name`.
Whether a part can be compiled is checked here without the vocabulary, so special tokens that a
client names are checked by the workers alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.grammar import MAX_GRAMMAR_BYTES, on_deep_stack, parser_limits, short
from baton.grammar_chains import ChainError, check_grammar
from router.text.reasoning import CLOSE, OPEN
from router.text.tools import ToolFormat

Part = dict[str, Any]

_WHITE_SPACE = " ?"  # where JSON may have any: models that are unsure write it for ever
_NUM_KEPT = 256  # a request's tools, each by itself, and the whole


class GrammarError(ValueError):
    """What is wrong with a grammar, in one line."""


def of_schema(schema: str) -> Part:
    """A JSON value. Keywords that the library does not know are refused, for they would not be
    kept. Raises GrammarError, as do the next ones."""
    from llguidance import LLMatcher  # not loaded by a process that sees no constraint

    try:
        made = LLMatcher.grammar_from_json_schema(
            schema, {"whitespace_pattern": _WHITE_SPACE}, {"lenient": False}
        )
    except ValueError as error:
        raise GrammarError(short(str(error))) from None
    return _checked(json.loads(made)["grammars"][0])


def of_regex(regex: str) -> Part:
    from llguidance import LLMatcher

    return _checked(json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0])


def of_lark(grammar: str) -> Part:
    return _checked({"lark_grammar": grammar})


def in_lark(grammar: str) -> str:
    """From GBNF; what is none, as it is."""
    if not re.search(r"^[ \t]*[\w-]+[ \t]*::=", grammar, re.MULTILINE):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:  # its time grows with the number of rules times the length
        if grammar.count("::=") > 200 or len(grammar) > 64 << 10 or re.search(r"\\[uU]0", grammar):
            raise ValueError(r"too long, or with \u0, in place of which the character is taken")
        return str(gbnf_to_lark(grammar)).removeprefix("%llguidance {}\n")
    except Exception as error:  # the library raises no narrower class
        raise GrammarError(short(f"GBNF: {error}")) from error


def of_choice(texts: Sequence[str]) -> Part:
    if not texts or not all(texts):
        raise GrammarError("at least one text is needed, and none may be empty")
    return of_lark("start: " + " | ".join(map(_text, texts)))


def _checked(part: Part) -> Part:
    check(json.dumps({"grammars": [part]}))
    return part


def check(grammar: str) -> None:
    """Raises GrammarError."""
    if (size := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
    if problem := _problem(grammar):
        raise GrammarError(problem)


@functools.lru_cache(_NUM_KEPT)  # clients send the same one again and again
def _problem(grammar: str) -> str:
    from llguidance import LLMatcher

    try:
        check_grammar(grammar)
    except ChainError as error:
        return short(str(error))
    is_wrong, problems = on_deep_stack(
        lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    )
    return short(problems[0]) if is_wrong else ""


# --- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """Calls of tools, in the format that the model writes them."""

    tool_format: ToolFormat
    tools: Sequence[tuple[str, Part]]
    """Name and arguments of each."""
    is_single: bool
    has_marked_arguments: bool = False
    """Mistral's newer format: `[TOOL_CALLS]f[ARGS]{...}`, in place of a list."""
    has_marked_id: bool = False
    """And `[CALL_ID]` with an id before `[ARGS]`."""


@dataclass(frozen=True)
class Answer:
    """What is to come: maybe thoughts, then the body or calls, whichever are there."""

    body: Part | None
    calls: Calls | None
    thinks: bool = False
    is_thinking: bool = False
    """The prompt ends within its thoughts."""

    def grammar(self, special_token_id: Callable[[str], int | None]) -> str:
        """Raises GrammarError."""
        if self.body is not None and self.calls is None and not self.thinks:
            return json.dumps({"grammars": [self.body]})

        def marker(text: str) -> str:
            token_id = special_token_id(text)
            return _text(text) if token_id is None else f"<[{token_id}]>"

        kinds = [name for name in ("body", "calls") if getattr(self, name) is not None]
        rules, parts = [], list[Part]()
        if self.thinks:
            begun = "thoughts" if self.is_thinking else f"({marker(OPEN)} thoughts)?"
            rules += [f"start: {begun} /\\s{{0,8}}/ answer"]
            if special_token_id(CLOSE) is None:
                rules += [f"thoughts[suffix={_text(CLOSE)}]: /(.|\\n)*/"]
            else:
                rules += [f"thoughts: /(.|\\n)*/ {marker(CLOSE)}"]
        else:
            rules += ["start: answer"]
        rules += [f"answer: {' | '.join(kinds)}"]
        if self.body is not None:
            rules += ["body: @the_body"]
            parts += [{**self.body, "name": "the_body"}]
        if self.calls is not None:
            rules += _call_rules(self.calls, marker)
            parts += [{**part, "name": f"p{i}"} for i, (_, part) in enumerate(self.calls.tools)]
        whole = json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})
        check(whole)
        return whole


def _call_rules(calls: Calls, marker: Callable[[str], str]) -> list[str]:
    key = "parameters" if calls.tool_format == "llama3" else "arguments"
    names = [name for name, _ in calls.tools]
    heads = [
        _text(json.dumps({"name": name}, ensure_ascii=False)[:-1] + f', "{key}": ')
        for name in names
    ]
    rules = [f'f{i}: {head} @p{i} "}}"' for i, head in enumerate(heads)]
    match calls.tool_format:
        case "llama3":  # its models make one call at a time
            one, between, around = "call", None, ("", "")
        case "hermes":
            one = f'{marker("<tool_call>")} "\\n" call "\\n" {marker("</tool_call>")}'
            between, around = '"\\n"', ("", "")
        case "mistral" if calls.has_marked_arguments:
            id_ = f"{marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/" if calls.has_marked_id else ""
            rules = [
                f"f{i}: {_text(name)} {id_} {marker('[ARGS]')} @p{i}"
                for i, name in enumerate(names)
            ]
            one, between, around = f"{marker('[TOOL_CALLS]')} call", "", ("", "")
        case "mistral":
            one, between, around = "call", '", "', (f'{marker("[TOOL_CALLS]")} "["', '"]"')
    more = "" if calls.is_single or between is None else f"({between} one)*"
    return [
        f"calls: {around[0]} one {more} {around[1]}",
        f"one: {one}",
        f"call: {' | '.join(f'f{i}' for i in range(len(names)))}",
        *rules,
    ]


def _text(text: str) -> str:
    """As Lark writes a text."""
    return json.dumps(text)
