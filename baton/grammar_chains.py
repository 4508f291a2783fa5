"""How long a grammar's chains are: rules that name rules, definitions that refer to definitions.

The library compiles a grammar by recursion along them. A chain that is too long overflows its stack,
which ends the process. What a text nests without names is bounded by the library itself: 128 levels
of JSON, 250 of a regular expression, some 30 of a rule's brackets.

1. A text becomes a graph. A rule, or what some `$ref` points to, is a node. It counts 1, and 1 more
   for every 8 levels that it nests.
2. Nodes of a cycle may be entered in any order, so they count together.
3. The longest way through the graph is the chain. Nothing here recurses, and all of it is linear.

What might be read otherwise by the library is refused, since its chain is not known: a `$ref` that
is no plain pointer, two spellings of one pointer, `$id`s beside `$ref`s, `%lark` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_CHAIN = 400
_LEVELS_PER_LINK = 8


class ChainError(ValueError):
    """Why a grammar is not given to the library, in one line."""


def check_grammar(grammar: str) -> None:
    """Of what the library is given: a list of parts, or Lark alone. Raises ChainError."""
    if not grammar.lstrip().startswith("{"):
        return check_lark(grammar)
    try:
        parts = json.loads(grammar)["grammars"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChainError(f"not a list of grammars: {error!r}") from None
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, dict) or part.keys() - {"name", "lark_grammar", "json_schema"}:
            raise ChainError("a grammar is a JSON schema, or a text in Lark's notation")
        check_schema(part.get("json_schema"))
        if isinstance(text := part.get("lark_grammar"), str):
            check_lark(text)


class _Graph:
    """Nodes with how deep each nests, and which others it leads to."""

    def __init__(self) -> None:
        self._levels: dict[object, int] = {}
        self._next: dict[object, list[object]] = {}

    def add(self, node: object, levels: int, to: object = None) -> None:
        self._levels[node] = max(levels, self._levels.get(node, 0))
        self._next.setdefault(node, []).append(to)

    def check(self) -> None:
        """Tarjan's algorithm: a cycle is whole once all that it leads to is. Raises ChainError."""
        earliest: dict[object, int] = {}  # place of the earliest open node that each one reaches
        chains: dict[object, int] = {}  # from each node of a whole cycle on
        opened: list[object] = []
        for root in self._next:
            walk = [] if root in earliest else [self._enter(root, earliest, opened)]
            while walk:
                node, place, rest = walk[-1]
                to = next((to for to in rest if to in self._next and to not in chains), None)
                if to is None:
                    walk.pop()
                    if earliest[node] == place:
                        cycle = [opened.pop()]
                        while cycle[-1] != node:
                            cycle.append(opened.pop())
                        chains.update(dict.fromkeys(cycle, self._chain(cycle, chains)))
                    else:
                        above = walk[-1][0]
                        earliest[above] = min(earliest[above], earliest[node])
                elif to in earliest:
                    earliest[node] = min(earliest[node], earliest[to])
                else:
                    walk.append(self._enter(to, earliest, opened))

    def _enter(
        self, node: object, earliest: dict[object, int], opened: list[object]
    ) -> tuple[object, int, Iterator[object]]:
        earliest[node] = place = len(earliest)
        opened.append(node)
        return node, place, iter(self._next[node])

    def _chain(self, cycle: list[object], chains: dict[object, int]) -> int:
        after = max(chains.get(to, 0) for node in cycle for to in self._next[node])
        chain = after + sum(1 + self._levels[node] // _LEVELS_PER_LINK for node in cycle)
        if chain > MAX_CHAIN:
            raise ChainError(
                f"its rules or definitions lead to one another in a chain of {chain}; at most"
                f" {MAX_CHAIN} are taken"
            )
        return chain


# --- JSON schemas ---------------------------------------------------------------------------------


def check_schema(schema: Any) -> None:
    """Of a JSON schema, as `json.loads` reads it. Raises ChainError."""
    target_of = _targets(schema)
    targets = set(target_of.values())
    graph = _Graph()
    todo = [(schema, id(schema), 0)]
    while todo:
        value, node, levels = todo.pop()
        if id(value) in targets and id(value) != node:
            graph.add(node, levels, to=id(value))
            node, levels = id(value), 0
        ref = value.get("$ref") if isinstance(value, dict) else None
        graph.add(node, levels, to=target_of[ref] if isinstance(ref, str) else None)
        todo += [(each, node, levels + 1) for each in _parts(value)]
    graph.check()


def _parts(value: Any) -> Iterator[Any]:
    """The objects and lists directly within a JSON value."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (each for each in values if isinstance(each, dict | list))


def _targets(schema: Any) -> dict[str, int]:
    """The identity of what each `$ref` points to, by its text. Raises ChainError."""
    found: dict[str, int] = {}
    spelt: dict[int, str] = {}
    id_keys, has_ids = ["$id"], False
    todo = [schema]
    while todo:
        value = todo.pop()
        todo += _parts(value)
        if not isinstance(value, dict):
            continue
        if "draft-04" in str(value.get("$schema")):
            id_keys.append("id")
        has_ids |= value is not schema and any(isinstance(value.get(key), str) for key in id_keys)
        ref = value.get("$ref")
        if isinstance(ref, str) and ref not in found:
            found[ref] = target = id(_pointed(schema, ref))
            if spelt.setdefault(target, ref) != ref:
                raise ChainError(f"$ref: {ref!r} and {spelt[target]!r} are the same")
    if found and has_ids:
        raise ChainError("$id: beside $ref only the whole schema may have one")
    return found


def _pointed(schema: Any, ref: str) -> Any:
    """Raises ChainError."""
    at = schema
    names = ref.split("/")
    if names.pop(0) != "#" or re.search("%(2f|7e)", ref, re.IGNORECASE):
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

# As the library cuts a text: no other cut hides a name from it.
_TOKEN = re.compile(
    r"""
    (?P<skipped> [ \t]+ | (?:\#|//)[^\n]* )
    | (?P<line> [\r\n]+ )
    | (?P<json> %(?:json|regex|llguidance) )
    | (?P<nested> %lark )
    | (?P<statement> %[a-z]+ )
    | (?P<name> [!]?[_?]?[a-z][_a-z0-9\-]* | _?[A-Z][_A-Z0-9\-]* )
    | (?P<open> [(\[] )
    | (?P<close> [)\]] )
    | (?P<other> "(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\])+/[imslux]* | <[^<>\s]+> | @[a-zA-Z0-9_\-]+
        | 0[xX][0-9a-fA-F]+ | [+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)? | . )
    """,
    re.VERBOSE,
)


def check_lark(text: str) -> None:
    """Of a grammar in Lark's notation, with the schemas in it. Raises ChainError."""
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text):  # what is white space differs for some
        raise ChainError("control characters are not taken")
    graph, rule, levels = _Graph(), "", 0
    begins, position = True, 0  # a line, with a rule or with `|`
    while match := _TOKEN.match(text, position):
        kind, token, position = match.lastgroup, match[0], match.end()
        if kind == "nested":
            raise ChainError("%lark: a grammar within a grammar is not taken")
        if kind == "json":
            position = _check_json(text, position, is_schema=token == "%json")
        elif kind == "name":
            name = token.lstrip("!?")
            graph.add(name if begins else rule, levels, to=None if begins else name)
            rule, levels = (name, 0) if begins else (rule, levels)
        elif kind in ("open", "close"):
            levels += 1 if kind == "open" else -1
            graph.add(rule, levels)
        begins = kind in ("line", "statement") or (begins and kind == "skipped")
    graph.check()


def _check_json(text: str, position: int, *, is_schema: bool) -> int:
    """The end of the JSON that begins there. Raises ChainError."""
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        position += 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise ChainError(f"JSON within the grammar: {error}") from None
    if is_schema:
        check_schema(value)
    return end
