"""How long a grammar's chains are: rules that name rules, definitions that refer to definitions.

The library compiles a grammar by recursion along them, and one that is too long overflows its
stack, which ends the process. What nests without names is bounded by the library itself: 128 levels
of JSON, some 30 of a rule's brackets, 250 of a regular expression.

A rule, or what some `$ref` points to, counts 1, and 1 more for every 8 levels that it nests. No
chain is longer than all of them together, and their sum is what is bounded: no grammar that people
write has as many. Nothing here recurses, and all of it is linear.

What the library might read otherwise is refused: a `$ref` that is no plain pointer, two spellings
of one pointer, `$id`s beside `$ref`s, `%lark` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

MAX_RULES = 1000
_LEVELS_PER_RULE = 8


class ChainError(ValueError):
    """Why a grammar is not given to the library, in one line."""


def check_grammar(grammar: str) -> None:
    """Check what the library is given: a list of parts, or Lark alone. Raises ChainError."""
    if not grammar.lstrip().startswith("{"):
        return check_lark(grammar)
    try:
        parts = list(json.loads(grammar)["grammars"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChainError(f"not a list of grammars: {error!r}") from None
    for part in parts:
        if not isinstance(part, dict) or part.keys() - {"name", "lark_grammar", "json_schema"}:
            raise ChainError("a grammar is a JSON schema, or a text in Lark's notation")
        check_schema(part.get("json_schema"))
        check_lark(str(part.get("lark_grammar")))


def _check_sum(levels: Iterable[int]) -> None:
    """Refuse too many rules, of which each nests so many levels. Raises ChainError."""
    num_rules = sum(1 + each // _LEVELS_PER_RULE for each in levels)
    if num_rules > MAX_RULES:
        raise ChainError(
            f"it has {num_rules} rules or definitions, with 1 more for every {_LEVELS_PER_RULE}"
            f" levels that one nests; at most {MAX_RULES} are taken"
        )


# --- JSON schemas ---------------------------------------------------------------------------------


def check_schema(schema: Any) -> None:
    """Check a JSON schema, as `json.loads` reads it. Raises ChainError."""
    targets, nested = _targets(schema), dict[int, int]()
    todo = [(schema, id(schema), 0)]
    while todo:
        value, node, levels = todo.pop()
        if id(value) in targets:
            node, levels = id(value), 0
        nested[node] = max(levels, nested.get(node, 0))
        todo += [(each, node, levels + 1) for each in _within(value)]
    _check_sum(nested.values())


def _within(value: Any) -> Iterator[Any]:
    """Return the objects and lists directly within a JSON value."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (each for each in values if isinstance(each, dict | list))


def _ref(value: Any) -> str:
    ref = value.get("$ref") if isinstance(value, dict) else None
    return ref if isinstance(ref, str) else ""


def _targets(schema: Any) -> set[int]:
    """Return the identities of what `$ref`s point to. Raises ChainError."""
    found: dict[str, int] = {}
    ids, todo = {"$id"}, [schema]
    has_ids = False
    while todo:
        value = todo.pop()
        todo += _within(value)
        if isinstance(value, dict):
            if "draft-04" in str(value.get("$schema"))[:99]:
                ids.add("id")
            has_ids |= value is not schema and any(isinstance(value.get(key), str) for key in ids)
        if ref := _ref(value):
            found[ref] = id(pointed(schema, ref))
    targets = set(found.values())
    if len(targets) < len(found):
        raise ChainError("$ref: two pointers to the same are to be spelt alike")
    if found and has_ids:
        raise ChainError("$id: beside $ref only the whole schema may have one")
    return targets


def pointed(at: Any, ref: str) -> Any:
    """Return what a `$ref` points to, from its schema's root `at`. Raises ChainError."""
    root, *names = ref.split("/")
    if root != "#" or re.search("%(2f|7e)", ref, re.IGNORECASE):
        raise ChainError(f"$ref {ref[:80]!r}: only a pointer into the same schema (#/...) is taken")
    for name in names:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and key in at:
            at = at[key]
        elif isinstance(at, list) and re.fullmatch("[0-9]{1,6}", key) and int(key) < len(at):
            at = at[int(key)]
        else:
            raise ChainError(f"$ref {ref[:80]!r} points to nothing")
    return at


# --- Lark -----------------------------------------------------------------------------------------

# As the library cuts a text: another cut could hide a name.
_TOKEN = re.compile(
    r"""
    (?P<skipped> [ \t]+ | (?:\#|//)[^\n]* )
    | (?P<line> [\r\n]+ )
    | (?P<json> %(?:json|regex|llguidance) )
    | (?P<word> %[a-z]+ )
    | (?P<name> !?[_?]?[a-z][_a-z0-9\-]* | _?[A-Z][_A-Z0-9\-]* )
    | (?P<bracket> [(\[)\]] )
    | (?P<other> "(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\])+/[imslux]* | <[^<>\s]+> | @[a-zA-Z0-9_\-]+
        | 0[xX][0-9a-fA-F]+ | [+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)? | . )
    """,
    re.VERBOSE,
)


def check_lark(text: str) -> None:
    """Check a grammar in Lark's notation, with the schemas in it. Raises ChainError."""
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text):  # white space to some
        raise ChainError("control characters are not taken")
    nested, levels = [0], 0  # of each rule, and of what stands before them
    begins, position = True, 0  # a line, with a rule's name or `|`
    while match := _TOKEN.match(text, position):
        kind, token, position = match.lastgroup, match[0], match.end()
        if token == "%lark":
            raise ChainError("%lark: a grammar within a grammar is not taken")
        if kind == "json":
            position = _check_json(text, position, is_schema=token == "%json")
        elif kind == "name" and begins:
            nested.append(levels := 0)
        elif kind == "bracket":
            levels += 1 if token in "([" else -1
            nested[-1] = max(levels, nested[-1])
        begins = kind in ("line", "word") or (begins and kind == "skipped")
    _check_sum(nested)


def _check_json(text: str, position: int, *, is_schema: bool) -> int:
    """Return the end of the JSON that begins there. Raises ChainError."""
    space = re.compile(r"[ \t\r\n]*").match(text, position)
    try:
        value, end = json.JSONDecoder().raw_decode(text, space.end() if space else position)
    except (ValueError, RecursionError) as error:
        raise ChainError(f"JSON within the grammar: {error}") from None
    if is_schema:
        check_schema(value)
    return end
