"""Grammars of what an answer must be, as llguidance reads them.

A grammar is a list of parts. The first is what the answer follows; it names the others as `@name`.
Whether a part can be compiled is checked here without the vocabulary, so special tokens that a
client names are checked by the workers alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.grammar import MAX_GRAMMAR_BYTES, on_deep_stack, parser_limits, short, try_out
from baton.grammar_chains import ChainError, check_grammar
from router.text.reasoning import CLOSE, OPEN
from router.text.schemas import rewrite
from router.text.tools import ToolFormat

if TYPE_CHECKING:
    from router.text.text_model import TextModel

Part = dict[str, Any]

_WHITE_SPACE = " ?"  # where JSON may have any: models that are unsure write it for ever
_NUM_KEPT = 256  # a request's tools, each by itself, and the whole
_NUM_TRIED_BYTES = 100  # of a value
_TOO_WIDE = "too much may come next; have fewer optional properties or alternatives"
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/((?:\\.|[^/\\\n])+)/')
"""Texts and comments, which are to stay, or an expression."""
UNFORCED = '\n%llguidance {"no_forcing": true}'
"""The library follows what a grammar leaves no choice of, and some never end: `/b+/ /b+/ "a"`."""
_WORDS = {
    "NoExtension": "some of its values cannot be ended; look at patternProperties",
    **dict.fromkeys(("Too many items", "Current row has"), _TOO_WIDE),
}


class GrammarError(ValueError):
    """What is wrong with a grammar, in one line."""


def of_schema(schema: str, *, close: bool = True) -> Part:
    """Make a JSON schema's part. `close`: objects have only the properties listed. What would not
    be kept is refused. Raises GrammarError, as do the next ones."""
    part, problem = _of_schema(schema, close)
    if part is None:
        raise GrammarError(problem)
    return part


@functools.lru_cache(_NUM_KEPT)  # clients send the same one again and again
def _of_schema(schema: str, close: bool) -> tuple[Part | None, str]:
    """Return the part, or why there is none."""
    if len(schema) > MAX_GRAMMAR_BYTES:
        return None, f"it has {len(schema)} characters; at most {MAX_GRAMMAR_BYTES} are taken"
    try:
        value = json.loads(schema)
        rewrite(value, close=close)
        part = _schema_part(value)
        check_grammar(json.dumps({"grammars": [part]}))
        _check_size(json.dumps(part))
    except RecursionError:
        return None, "it is nested too deeply"
    except ValueError as error:
        return None, short(str(error))
    problem = _problem_at_first(part)
    return (None, f"#: {problem}") if problem else (part, "")


def _schema_part(schema: Any) -> Part:
    from llguidance import LLMatcher  # not loaded by a process that sees no constraint

    made = LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        {"whitespace_pattern": _WHITE_SPACE},
        {"lenient": False, "coerce_one_of": True},  # `rewrite` has told them apart
    )
    part: Part = json.loads(made)["grammars"][0]
    return part


def _problem_at_first(part: Part) -> str:
    """Return what the library finds wrong with how a schema's values begin."""
    import llguidance

    tokens = llguidance.LLTokenizer("byte")  # a vocabulary of single bytes

    def tried() -> str:
        grammar, limits = json.dumps({"grammars": [part]}), parser_limits()
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        return try_out(matcher, tokens.eos_tokens, _NUM_TRIED_BYTES, b'",')

    problem = on_deep_stack(tried)
    ours = next((ours for theirs, ours in _WORDS.items() if theirs in problem), "")
    return ours or problem.replace("Unsatisfiable schema", "no value fits")


def of_regex(regex: str) -> Part:
    from llguidance import LLMatcher

    return _checked(json.loads(LLMatcher.grammar_from_regex(_in_ascii(regex)))["grammars"][0])


def of_lark(grammar: str) -> Part:
    made = _LARK.sub(lambda it: f"/{_in_ascii(it[1])}/" if it[1] else it[0], grammar)
    return _checked({"lark_grammar": made})


def _in_ascii(regex: str) -> str:
    r"""Keep `\d`, `\w` and `\s` to ASCII, as vLLM does: digits of any script are no numbers."""
    from llguidance import regex_to_lark

    return str(regex_to_lark(regex, "dws"))


def in_lark(grammar: str) -> str:
    """Translate a grammar from GBNF to Lark; return any other as it is."""
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
    return of_lark("start: TEXT\nTEXT: " + " | ".join(map(_text, texts)))  # a lexeme: no bound


def _checked(part: Part) -> Part:
    check(json.dumps({"grammars": [part]}))
    return part


def check(grammar: str) -> None:
    """Check that a grammar can be compiled. Raises GrammarError."""
    _check_size(grammar)
    if problem := _problem(grammar):
        raise GrammarError(problem)


def _check_size(grammar: str) -> None:
    """Raises GrammarError."""
    if (size := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")


@functools.lru_cache(_NUM_KEPT)
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
    """These calls also have `[CALL_ID]` and an id before `[ARGS]`."""


@dataclass(frozen=True)
class Answer:
    """What is to come: maybe thoughts, then the body or calls, whichever are there."""

    body: Part | None
    calls: Calls | None
    thinks: bool = False
    is_thinking: bool = False
    """The prompt ends within its thoughts."""

    def grammar(self, model: TextModel) -> str:
        """Return the whole grammar. Raises GrammarError."""
        if self.body is not None and self.calls is None and not self.thinks:
            return json.dumps({"grammars": _spelt([self.body], model.added_tokens)})

        def marker(text: str) -> str:
            token_id = model.added_tokens.get(text)
            return _text(text) if token_id is None else f"<[{token_id}]>"

        kinds = [name for name in ("body", "calls") if getattr(self, name) is not None]
        rules, parts = [], list[Part]()
        if self.thinks:
            first = "first" if self.is_thinking else f"({marker(OPEN)} first)?"
            rules += [f"start: {first} answer", "first: thoughts /\\s{0,8}/"]
            if CLOSE not in model.added_tokens:
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
        parts = [{"lark_grammar": "\n".join(rules)}, *parts]
        whole = json.dumps({"grammars": _spelt(parts, model.added_tokens)})
        check(whole)
        return whole


def _spelt(parts: list[Part], added_tokens: Collection[str]) -> list[Part]:
    """Have texts of added tokens spelt in ordinary ones, where the parts may lead to such a text.

    Where only one text may come next the library wants the tokenizer's tokens of it, and that takes
    it for the added token, which is no text. Whether a text is within the parts is a guess: what
    expressions escape, bracket and group is compared without.
    """
    said = re.sub(r"\\+u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), json.dumps(parts))
    without = str.maketrans("", "", "\\[](){}")
    said = said.translate(without)
    found = any(text in said for each in added_tokens if (text := each.translate(without)))
    return (
        [*parts, {"lark_grammar": 'start: "x"' + UNFORCED, "name": "unforced"}] if found else parts
    )


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
    """Return a text as Lark writes it."""
    return json.dumps(text)
