"""JSON schemas, rewritten into what the grammar's library keeps.

Clients' libraries generate much that the library refuses although nothing hangs on it, or that it
keeps in other words. Whatever fits a rewritten schema fits the one that came. Less may fit: objects
are closed, and a constant that tells objects of a `oneOf` apart is always written. What cannot be
kept is refused, with its place.

Schemas are changed in place: they are fresh from `json.loads`. Nothing recurses with their depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import combinations, product
from typing import Any

from baton.grammar import MAX_GRAMMAR_BYTES
from baton.grammar_chains import ChainError, pointed

Schema = dict[str, Any]
Place = tuple[Any, ...]
"""Where in a schema: the place around it and a key; empty: its root."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "propertyNames")
_JOINED = ("allOf", "anyOf", "oneOf", "$ref")  # schemas of the same value
_LIMITS = {"minimum": 1, "maximum": -1, "exclusiveMinimum": 1, "exclusiveMaximum": -1}
_SHAPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_MAPS, (dict,)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "required", "enum"), (list,)),
    **dict.fromkeys(("$ref", "format", "pattern"), (str,)),
    **dict.fromkeys(_LIMITS, (int, float)),
}
_UNKEPT = re.compile(
    "not|if|then|else|uniqueItems|(c|minC|maxC)ontains|dependen.*|unevaluated.*"
    r"|\$(dynamic|recursive)(Ref|Anchor)"
)
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")


class SchemaError(ValueError):
    """Why a schema is not taken, and where in it."""

    def __init__(self, place: Place, why: str) -> None:
        super().__init__(f"{pointer(place)}: {why}")


def pointer(place: Place) -> str:
    """Write a place as a JSON pointer."""
    keys = []
    while place:
        place, key = place
        keys.append(str(key).replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(keys)])


def rewrite(schema: Any, *, close: bool) -> None:
    """Change a schema to what the library keeps. Raises SchemaError."""
    if not isinstance(schema, dict):
        raise SchemaError((), "a schema is an object")
    walked = _Walked(schema)
    for node, place in walked.nodes:
        _check(node, place)
    for node, place in walked.nodes:
        walked.tell_apart(node, place)
    walked.require_constants()
    for node, place in walked.nodes:
        _round_limits(node, place)
        _spell_format(node, place)
        if "propertyNames" in node:
            _name_properties(node, (place, "propertyNames"), walked)
    if close:
        _close(walked)


def within(node: Schema, place: Place) -> Iterator[tuple[Any, Place]]:
    """Yield the schemas directly within one, each with its place."""
    for key, value in node.items():
        if key in _MAPS:
            yield from ((each, ((place, key), name)) for name, each in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((each, ((place, key), index)) for index, each in enumerate(value))
        elif key in _SINGLE:
            yield value, (place, key)


class _Walked:
    """All schemas in one, and what follows from them."""

    def __init__(self, root: Schema) -> None:
        """Raises SchemaError."""
        self.nodes: list[tuple[Schema, Place]] = []
        self._targets: dict[str, Any] = {}  # of `$ref`s
        self._constants: list[tuple[Schema, str]] = []
        self._num_compared = 0
        todo: list[tuple[Any, Place]] = [(root, ())]
        seen = set[int]()
        while todo:
            node, place = todo.pop()
            if isinstance(node, bool) or id(node) in seen:
                continue
            if not isinstance(node, dict):
                raise SchemaError(place, "a schema is an object or a boolean")
            seen.add(id(node))
            for key in _SHAPES.keys() & node.keys():
                if not isinstance(node[key], _SHAPES[key]):
                    raise SchemaError((place, key), "JSON of another type is expected")
            self.nodes.append((node, place))
            if (ref := node.get("$ref")) is not None:
                try:
                    self._targets[ref] = pointed(root, ref)
                except ChainError as error:
                    raise SchemaError((place, "$ref"), str(error)) from None
                todo.append((self._targets[ref], (place, "$ref")))
            todo += within(node, place)

    def members(self, node: Schema, keys: Iterable[str] = _JOINED) -> list[Schema]:
        """Return the schemas of the same value as `node`, directly within it."""
        members = [self._targets[node["$ref"]]] if "$ref" in node and "$ref" in keys else []
        members += [each for key in keys if key != "$ref" for each in node.get(key, ())]
        return [each for each in members if isinstance(each, dict)]

    def parts(self, node: Any) -> list[Schema]:
        """Return what a value must fit at once: a schema, what it refers to, its `allOf`."""
        parts, todo = list[Schema](), [node]
        while todo and len(parts) < 64:
            at = todo.pop()
            if isinstance(at, dict) and all(at is not each for each in parts):
                parts.append(at)
                todo += self.members(at, ("$ref", "allOf"))
        return parts

    def tell_apart(self, node: Schema, place: Place) -> None:
        """Check that no value fits two schemas of a `oneOf`: the library takes it as `anyOf`."""
        found, todo = list[tuple[int, list[Schema]]](), [*enumerate(node.get("oneOf", ()))]
        for i, option in todo:  # it grows
            parts = self.parts(option)
            nested = [part[key] for part in parts for key in ("anyOf", "oneOf") if key in part]
            if nested and len(todo) < 200:
                todo += [(i, each) for each in nested[0]]
            elif option is not False:
                found.append((i, parts + self.parts(node)))
        for (i, one), (j, other) in combinations(found, 2):
            if i != j and (self._num_compared > 50_000 or not self._exclude(one, other)):
                why = f"a value might fit both its schemas {i} and {j}"
                raise SchemaError((place, "oneOf"), f"{why}; use anyOf, or a constant in each")

    def require_constants(self) -> None:
        """Have the constants written that tell objects apart, once all are told apart."""
        for part, key in self._constants:
            if key not in part.get("required", ()):
                part["required"] = [*part.get("required", ()), key]

    def _exclude(self, one: list[Schema], other: list[Schema]) -> bool:
        """Whether certainly no value fits all of both."""
        if not (kinds := _kinds(one) & _kinds(other)) or _differ(one, other):
            return True
        every = [*one, *other] if kinds == {"object"} else []
        must = {name for part in every for name in part.get("required", ())}
        may = {name for part in every for name in part.get("properties", ())}
        for name in sorted(must | may):
            for (part, mine), (their, theirs) in product(
                _property(one, name), _property(other, name)
            ):
                self._num_compared += 1
                left, right = self.parts(mine), self.parts(theirs)
                if name in must and (
                    mine is False or theirs is False or not _kinds(left) & _kinds(right)
                ):
                    return True
                if _differ(left, right):
                    self._constants += [] if name in must else [(part, name), (their, name)]
                    return True
        return False


def _property(parts: Iterable[Schema], name: str) -> Iterator[tuple[Schema, Any]]:
    """Yield the schemas that an object's property must fit, each with the part that says so."""
    for part in parts:
        if name in part.get("properties", ()):
            yield part, part["properties"][name]
        elif "additionalProperties" in part and "patternProperties" not in part:
            yield part, part["additionalProperties"]


def _kinds(parts: Iterable[Schema]) -> set[str]:
    """Return the types of JSON that parts leave possible."""
    kinds = set(_TYPES) - {"integer"}
    for part in parts:
        if "type" in part:
            kinds &= {"number" if name == "integer" else name for name in _types(part)}
        if (values := _literals(part)) is not None:
            kinds &= {_kind(value) for value in values}
    return kinds


def _types(part: Schema) -> list[Any]:
    return part["type"] if isinstance(part["type"], list) else [part["type"]]


def _kind(value: Any) -> str:
    if isinstance(value, bool):  # an integer too, to Python
        return "boolean"
    kinds = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _literals(part: Schema) -> list[Any] | None:
    """Return the values that a schema lists. None: anything may come."""
    values: list[Any] | None = part.get("enum")
    return [part["const"]] if "const" in part else values


def _differ(one: Iterable[Schema], other: Iterable[Schema]) -> bool:
    """Whether both leave plain constants, and no common one."""
    sets = []
    for parts in (one, other):
        lists = [values for part in parts if (values := _literals(part)) is not None]
        plain = (each for each in lists if not any(isinstance(v, dict | list) for v in each))
        sets += [{(_kind(value), value) for value in values} for values in [*plain][:1]]
    return len(sets) == 2 and sets[0].isdisjoint(sets[1])


# --- single keywords ------------------------------------------------------------------------------

_EXACT, _LARGEST = 1 << 53, (1 << 63) - 1024  # the library reads floats, and writes 64 bits


def _check(node: Schema, place: Place) -> None:
    """Drop what says nothing; refuse what would not be kept. Raises SchemaError."""
    if node.get("uniqueItems") is False or node.get("maxItems") in (0, 1):
        node.pop("uniqueItems", None)
    if node.get("unevaluatedProperties") is False and not node.keys() & {*_JOINED}:
        node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
    for key in node:
        if _UNKEPT.fullmatch(key):
            raise SchemaError((place, key), "would not be kept; leave it out")
    if "type" in node and not all(name in _TYPES for name in _types(node)):
        why = f"{node['type']!r} is none of {', '.join(_TYPES)}"
        raise SchemaError((place, "type"), why)
    if not all(isinstance(name, str) for name in node.get("required", ())):
        raise SchemaError((place, "required"), "a list of names is expected")
    for value in (todo := list(_literals(node) or ())):  # it grows
        todo += value if isinstance(value, list) else ()
        todo += value.values() if isinstance(value, dict) else ()
        if isinstance(value, int) and abs(value) > _EXACT and _inward(value, 1) != value:
            raise SchemaError(place, f"{value} is beyond 2^53 and cannot be kept exactly")


def _inward(limit: int, sign: int) -> int:
    """Return the nearest whole float from a limit on (sign 1), or up to it (-1)."""
    limit = max(-_LARGEST, min(limit, _LARGEST))
    near = float(limit)
    return int(near if (int(near) - limit) * sign >= 0 else math.nextafter(near, sign * math.inf))


def _round_limits(node: Schema, place: Place) -> None:
    """Beyond 2^53 a limit moves inward, to what is kept exactly. Raises SchemaError."""
    for key, sign in _LIMITS.items():
        if abs(limit := node.get(key, 0)) <= _EXACT:
            continue
        if sign * limit > _LARGEST or not math.isfinite(limit):
            raise SchemaError((place, key), f"{limit} is beyond 64 bits")
        near = _inward(int(limit) + sign * key.startswith("exclusive"), sign)
        del node[key]
        name = key.removeprefix("exclusive").lower()
        node[name] = sign * max(sign * near, sign * node.get(name, near))


_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-V[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
_BASE64 = "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$"
_SPELT: dict[str, Schema] = {
    **{f"uuid{n}": {"pattern": _UUID.replace("V", str(n))} for n in range(1, 9)},
    **{name: {"pattern": _BASE64.replace("_-", "+/")} for name in ("base64", "byte")},
    "base64url": {"pattern": _BASE64},
    "idn-email": {"pattern": r"^[^\s@]+@[^\s@]+$"},
    "multi-host-uri": {"pattern": r"^[A-Za-z][A-Za-z0-9+.-]*:[^\s]+$"},
}
_IP = re.compile("ip(v4|v6|vany)(address|network|interface)")
_KEPT = re.compile("date-time|time|date|duration|email|hostname|ipv4|ipv6|uuid|uri")
_ANNOTATIONS = re.compile(
    "password|binary|((file|directory)-)?path|uri-(template|reference)|regex|json-(string|pointer)"
    "|html|markdown|u?int(8|16|32|64)|float|double|decimal"
)


def _spell_format(node: Schema, place: Place) -> None:
    """Spell out a format that the library does not know. Raises SchemaError."""
    if _KEPT.fullmatch(name := node.get("format", "date")):
        return
    del node["format"]
    if _ANNOTATIONS.fullmatch(name) or "string" not in _kinds([node]):
        return
    added = _SPELT.get(name)
    if match := _IP.fullmatch(name):
        kinds = ("ipv4", "ipv6") if match[1] == "vany" else (f"ip{match[1]}",)
        added = {"anyOf": [{"format": kind} for kind in kinds]}
    if added is None:
        raise SchemaError((place, "format"), f"{name!r} is not known; leave it out")
    if added.keys() & node.keys():
        added = {"allOf": [*node.get("allOf", ()), added]}
    node.update(added)


_NAME_PATTERNS = {
    "uuid": _UUID.replace("V[0-9a-fA-F]{3}-[89abAB]", "[0-9a-fA-F]{4}-[0-9a-fA-F]"),
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}
_SAYS_NOTHING = {"type", "title", "description", "$ref", "allOf", "default", "examples", "$id"}


def _name_properties(node: Schema, place: Place, walked: _Walked) -> None:
    """Turn `propertyNames` into properties, or a pattern of them. Raises SchemaError."""
    parts = walked.parts(names := node.pop("propertyNames"))
    for part in parts:
        _spell_format(part, place)
    if names is False or "string" not in _kinds(parts):
        raise SchemaError(place, "no name fits it")
    match [(key, part[key]) for part in parts for key in part.keys() - _SAYS_NOTHING]:
        case []:
            return
        case [("const" | "enum" as key, value)]:
            listed, pattern = value if key == "enum" else [value], None
        case [("minLength", least)]:
            listed, pattern = [], rf"^[\s\S]{{{least},}}$"
        case [("pattern", pattern)]:
            listed = []
        case [("format", name)] if name in _NAME_PATTERNS:
            listed, pattern = [], _NAME_PATTERNS[name]
        case _:
            raise SchemaError(place, "one list or pattern of names is kept, nothing else")
    others, own = node.get("additionalProperties", True), node.get("properties", {})
    if "patternProperties" in node or (pattern and own):
        raise SchemaError(place, "would not be kept beside these properties; leave it out")
    if len(listed) * len(str(others)) > MAX_GRAMMAR_BYTES:
        raise SchemaError(place, "too many names for so large a schema")
    node["properties"] = {name: own.get(name, others) for name in listed if isinstance(name, str)}
    node["patternProperties"] = {pattern: others} if pattern else {}
    node["additionalProperties"] = False


def _close(walked: _Walked) -> None:
    """Close objects that list properties and say nothing of others.

    Where several schemas speak of one object (`allOf`, or beside `$ref`) all of them stay open:
    each would exclude the others' properties.
    """
    words = {"properties", "additionalProperties", "patternProperties"}
    beside, todo = set[int](), list[Schema]()
    for node, _ in walked.nodes:
        groups = [[each] for each in walked.members(node, ("allOf",))]
        groups += [walked.members(node, (key,)) for key in _JOINED[1:]]
        speaking = [any(each.keys() & {*words, *_JOINED} for each in group) for group in groups]
        if sum(speaking) + bool(node.keys() & words) > 1:
            todo.append(node)
    while todo:
        if id(node := todo.pop()) not in beside:
            beside.add(id(node))
            todo += walked.members(node)
    for node, _ in walked.nodes:
        if "properties" in node and "additionalProperties" not in node and id(node) not in beside:
            unlisted = [name for name in node.get("required", ()) if name not in node["properties"]]
            node["properties"].update(dict.fromkeys(unlisted, True))
            node["additionalProperties"] = False
