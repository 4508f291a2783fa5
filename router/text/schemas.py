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
from dataclasses import dataclass
from typing import Any

from baton.grammar import MAX_GRAMMAR_BYTES
from baton.grammar_chains import ChainError, pointed

Schema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties")
_JOINED = ("allOf", "anyOf", "oneOf", "$ref")  # schemas of the same value
_LIMITS = {"minimum": 1, "maximum": -1, "exclusiveMinimum": 1, "exclusiveMaximum": -1}
_SHAPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_MAPS, (dict,)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "required", "enum"), (list,)),
    **dict.fromkeys(("$ref", "format", "pattern"), (str,)),
    **dict.fromkeys(_LIMITS, (int, float)),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_UNKEPT: tuple[str, ...] = ("not", "if", "then", "else", "contains", "minContains", "maxContains")
_UNKEPT += ("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems")
_UNKEPT += ("unevaluatedProperties", "uniqueItems", "$dynamicRef", "$dynamicAnchor")
_UNKEPT += ("$recursiveRef",)
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")


@dataclass(frozen=True)
class Place:
    """Where in a schema. It is written out only for who reads it."""

    parent: Place | None = None
    key: str = "#"

    def __truediv__(self, key: object) -> Place:
        return Place(self, str(key))

    def __str__(self) -> str:
        """As a JSON pointer."""
        keys, at = list[str](), self
        while at.parent is not None:
            keys.append(at.key.replace("~", "~0").replace("/", "~1"))
            at = at.parent
        return "/".join([at.key, *reversed(keys)])


class SchemaError(ValueError):
    """Why a schema is not taken, and where in it."""

    def __init__(self, place: Place, why: str) -> None:
        super().__init__(f"{place}: {why}")


def rewrite(schema: Any, *, close: bool) -> list[tuple[Schema, Place]]:
    """Change a schema to what the library keeps. Return all schemas in it. Raises SchemaError."""
    if not isinstance(schema, dict):
        raise SchemaError(Place(), "a schema is an object")
    walked = _Walked(schema)
    for node, place in walked.nodes:
        _check(node, place)
        _check_numbers(node, place)
    for node, place in walked.nodes:
        walked.tell_apart(node, place)
    walked.require_constants()
    for node, place in walked.nodes:
        _round_limits(node, place)
        _spell_format(node, place)
        if "propertyNames" in node:
            _name_properties(node, place / "propertyNames", walked)
    if close:
        _close(walked)
    return walked.nodes


def within(node: Schema, place: Place) -> Iterator[tuple[Any, Place]]:
    """The schemas directly within one."""
    for key, value in node.items():
        if key in _MAPS:
            yield from ((each, place / key / name) for name, each in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((each, place / key / index) for index, each in enumerate(value))
        elif key in (*_SINGLE, "propertyNames"):
            yield value, place / key


class _Walked:
    """All schemas in one, and what follows from them."""

    def __init__(self, root: Schema) -> None:
        """Raises SchemaError."""
        self.nodes: list[tuple[Schema, Place]] = []
        self._targets: dict[str, Any] = {}  # of `$ref`s
        self._constants: list[tuple[Schema, str]] = []
        self._num_steps = 0
        todo: list[tuple[Any, Place]] = [(root, Place())]
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
                    raise SchemaError(place / key, "JSON of another type is expected")
            self.nodes.append((node, place))
            if (ref := node.get("$ref")) is not None:
                try:
                    self._targets[ref] = pointed(root, ref)
                except ChainError as error:
                    raise SchemaError(place / "$ref", str(error)) from None
                todo.append((self._targets[ref], Place(key=ref)))
            todo += within(node, place)

    def members(self, node: Schema, keys: Iterable[str] = _JOINED) -> list[Schema]:
        """Schemas of the same value as `node`, directly within it."""
        members = [self._targets[node["$ref"]]] if "$ref" in node and "$ref" in keys else []
        members += [each for key in keys if key != "$ref" for each in node.get(key, ())]
        return [each for each in members if isinstance(each, dict)]

    def parts(self, node: Any) -> list[Schema]:
        """What a value must fit at once: a schema, what it refers to, those of its `allOf`."""
        parts, todo = list[Schema](), [node]
        while todo and len(parts) < 64:
            at = todo.pop()
            if isinstance(at, dict) and all(at is not each for each in parts):
                parts.append(at)
                todo += self.members(at, ("$ref", "allOf"))
        return parts

    def tell_apart(self, node: Schema, place: Place) -> None:
        """Check that no value fits two schemas of a `oneOf`: the library takes it as `anyOf`."""
        options, common = node.get("oneOf", ()), self.parts(node)
        self._num_steps = 0
        for i, one in enumerate(options):
            for j in range(i + 1, len(options)):
                if not self._exclude(one, options[j], common, depth=0):
                    why = f"a value might fit both its schemas {i} and {j}"
                    raise SchemaError(place / "oneOf", f"{why}; use anyOf, or a constant in each")

    def require_constants(self) -> None:
        """Have the constants written that tell objects apart, once all are told apart."""
        for part, key in self._constants:
            if key not in part.get("required", ()):
                part["required"] = [*part.get("required", ()), key]

    def _exclude(self, one: Any, other: Any, common: list[Schema], depth: int) -> bool:
        """Whether certainly no value fits both. All within `common` is said of both."""
        self._num_steps += 1
        if one is False or other is False:
            return True
        if depth > 4 or self._num_steps > 50_000:
            return False
        left, right = self.parts(one), self.parts(other)
        kinds = _kinds([*left, *common]) & _kinds([*right, *common])
        values, others = _constants(left), _constants(right)
        if not kinds or (values is not None and others is not None and values.isdisjoint(others)):
            return True
        for parts, beside in ((left, other), (right, one)):
            for options in (part[key] for part in parts for key in _JOINED[1:3] if key in part):
                if all(self._exclude(each, beside, common, depth + 1) for each in options):
                    return True
        return kinds == {"object"} and self._differ(left, right, depth)

    def _differ(self, left: list[Schema], right: list[Schema], depth: int) -> bool:
        """Of objects: whether some property cannot be the same, and one of them must have it."""
        must = {name: None for part in (*left, *right) for name in part.get("required", ())}
        may = {name: None for part in (*left, *right) for name in part.get("properties", ())}
        for name in may | must:
            for part, value in _property(left, name):
                for their_part, theirs in _property(right, name):
                    constants = _constants(self.parts(value)), _constants(self.parts(theirs))
                    if name not in must and None in constants:
                        continue
                    if self._exclude(value, theirs, [], depth + 1):
                        self._constants += [] if name in must else [(part, name)]
                        self._constants += [] if name in must else [(their_part, name)]
                        return True
        return False


def _property(parts: Iterable[Schema], name: str) -> Iterator[tuple[Schema, Any]]:
    """The schemas that an object's property must fit, each with the part that says so."""
    for part in parts:
        if name in part.get("properties", ()):
            yield part, part["properties"][name]
        elif "additionalProperties" in part and "patternProperties" not in part:
            yield part, part["additionalProperties"]


def _kinds(parts: Iterable[Schema]) -> set[str]:
    """The types of JSON that parts leave possible."""
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
    """None: anything may come."""
    values: list[Any] | None = part.get("enum")
    return [part["const"]] if "const" in part else values


def _constants(parts: Iterable[Schema]) -> set[tuple[str, Any]] | None:
    """The plain values that parts leave possible; None: others, too."""
    for values in map(_literals, parts):
        if values is not None and not any(isinstance(each, dict | list) for each in values):
            return {(_kind(each), each) for each in values}
    return None


# --- single keywords ------------------------------------------------------------------------------


def _check(node: Schema, place: Place) -> None:
    """Drop what says nothing; refuse what would not be kept. Raises SchemaError."""
    for key in _COUNTS:
        if isinstance(count := node.get(key), float) and count.is_integer():
            node[key] = int(count)
    if node.get("uniqueItems") is False or node.get("maxItems") in (0, 1):
        node.pop("uniqueItems", None)
    if "unevaluatedProperties" in node and not node.keys() & {*_JOINED}:
        node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
    for key in _UNKEPT:
        if key in node:
            raise SchemaError(place / key, "would not be kept; leave it out")
    if "type" in node and not all(name in _TYPES for name in _types(node)):
        raise SchemaError(place / "type", f"{node['type']!r} is none of {', '.join(_TYPES)}")
    if not all(isinstance(name, str) for name in node.get("required", ())):
        raise SchemaError(place / "required", "a list of names is expected")


def _check_numbers(node: Schema, place: Place) -> None:
    """Of constants. Raises SchemaError."""
    todo = list(_literals(node) or ())
    while todo:
        value = todo.pop()
        todo += value if isinstance(value, list) else ()
        todo += value.values() if isinstance(value, dict) else ()
        if isinstance(value, int) and abs(value) > _EXACT and _inward(value, 1) != value:
            raise SchemaError(place, f"{value} is beyond 2^53 and cannot be kept exactly")


_EXACT, _LARGEST = 1 << 53, (1 << 63) - 1024  # the library reads floats, and writes 64 bits


def _inward(limit: int, sign: int) -> int:
    """The nearest whole float from there on (sign 1), or up to there (-1)."""
    limit = max(-_LARGEST, min(limit, _LARGEST))
    near = float(limit)
    return int(near if (int(near) - limit) * sign >= 0 else math.nextafter(near, sign * math.inf))


def _round_limits(node: Schema, place: Place) -> None:
    """Beyond 2^53 a limit moves inward, to what is kept exactly. Raises SchemaError."""
    for key, sign in _LIMITS.items():
        if abs(limit := node.get(key, 0)) <= _EXACT:
            continue
        if sign * limit > _LARGEST or not math.isfinite(limit):
            raise SchemaError(place / key, f"{limit} is beyond 64 bits")
        near = _inward(int(limit) + sign * key.startswith("exclusive"), sign)
        if key.startswith("exclusive"):
            del node[key]
        name = key.removeprefix("exclusive").lower()
        node[name] = sign * max(sign * near, sign * node.get(name, near))


_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-V[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
_BASE64 = "^(X{4})*(X{2}==|X{3}=)?$"
_PATTERNS = {
    **{f"uuid{version}": _UUID.replace("V", str(version)) for version in range(1, 9)},
    **dict.fromkeys(("base64", "byte"), _BASE64.replace("X", "[A-Za-z0-9+/]")),
    "base64url": _BASE64.replace("X", "[A-Za-z0-9_-]"),
    "json-pointer": "^(/([^~/]|~[01])*)*$",
    "uri-reference": r"^[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]*$",
    **dict.fromkeys(("iri", "multi-host-uri"), r"^[A-Za-z][A-Za-z0-9+.-]*:[^\s]+$"),
    "idn-email": r"^[^\s@]+@[^\s@]+$",
}
_NARROWER = {
    **dict.fromkeys(("ipv4network", "ipv4interface"), ("ipv4",)),
    **dict.fromkeys(("ipv6network", "ipv6interface"), ("ipv6",)),
    **dict.fromkeys(("ipvanyaddress", "ipvanynetwork", "ipvanyinterface"), ("ipv4", "ipv6")),
    **{"idn-hostname": ("hostname",), "url": ("uri",)},
}
_KEPT = re.compile("date-time|time|date|duration|email|hostname|ipv4|ipv6|uuid|uri")
_ANNOTATIONS = re.compile(
    "password|binary|((file|directory)-)?path|uri-template|regex|json-string|html|markdown|textarea"
    "|u?int(8|16|32|64)|float|double|decimal"
)


def _spell_format(node: Schema, place: Place) -> None:
    """Formats that the library does not know. Raises SchemaError."""
    name = node.get("format", "date")
    if _KEPT.fullmatch(name):
        return
    del node["format"]
    if _ANNOTATIONS.fullmatch(name) or "string" not in _kinds([node]):
        return
    if name in _PATTERNS:
        added: Schema = {"pattern": _PATTERNS[name]}
    elif name in _NARROWER:
        added = {"anyOf": [{"format": each} for each in _NARROWER[name]]}
    else:
        raise SchemaError(place / "format", f"{name!r} is not known; leave it out")
    if added.keys() & node.keys():
        node["allOf"] = [*node.get("allOf", ()), added]
    else:
        node.update(added)


_NAME_PATTERNS = {
    "uuid": _UUID.replace("V[0-9a-fA-F]{3}-[89abAB]", "[0-9a-fA-F]{4}-[0-9a-fA-F]"),
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}
_SAYS_NOTHING = {"type", "title", "description", "$ref", "allOf", "default", "examples", "$id"}


def _name_properties(node: Schema, place: Place, walked: _Walked) -> None:
    """Names are listed, or follow a pattern. Raises SchemaError."""
    parts = walked.parts(names := node.pop("propertyNames"))
    for part in parts:
        _spell_format(part, place)
    pairs = [(key, part[key]) for part in parts for key in part.keys() - _SAYS_NOTHING]
    said = dict(pairs)
    if names is False or "string" not in _kinds(parts):
        raise SchemaError(place, "no name fits it")
    if not said:
        return
    others, own, listed = node.get("additionalProperties", True), node.get("properties"), None
    if len(pairs) == 1 and said.keys() <= {"const", "enum"}:
        listed = [each for each in _literals(said) or () if isinstance(each, str)]
        if len(listed) * len(str(others)) > MAX_GRAMMAR_BYTES:
            raise SchemaError(place, "too many names for so large a schema")
        node["properties"] = {name: (own or {}).get(name, others) for name in listed}
    elif len(pairs) == len(said) and said.keys() <= {"minLength", "maxLength"}:
        pattern = rf"^[\s\S]{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$"
    elif len(pairs) == 1 and ("pattern" in said or said.get("format") in _NAME_PATTERNS):
        pattern = said["pattern"] if "pattern" in said else _NAME_PATTERNS[said["format"]]
    else:
        raise SchemaError(place, f"a list or a pattern is kept, not {', '.join(sorted(said))}")
    if "patternProperties" in node or (listed is None and own):
        raise SchemaError(place, "would not be kept beside these properties; leave it out")
    if listed is None:
        node["patternProperties"] = {pattern: others}
    node["additionalProperties"] = False


def _close(walked: _Walked) -> None:
    """Objects that list properties and say nothing of others have no others.

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
