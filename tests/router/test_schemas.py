"""Rewritten schemas: what they let a model say fits the schema that the client sent."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from router.text.grammar import GrammarError, of_schema

BYTES = LLTokenizer("byte")
(END,) = BYTES.eos_tokens


def matcher(schema: Any, *, close: bool = True) -> LLMatcher:
    part = of_schema(json.dumps(schema), close=close)
    return LLMatcher(BYTES, json.dumps({"grammars": [part]}), log_level=0)


def fits(schema: Any, value: Any, *, close: bool = True) -> bool:
    made = matcher(schema, close=close)
    return made.consume_tokens([*json.dumps(value).encode()]) and made.is_accepting()


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def tagged(tag: Any, **properties: Any) -> dict[str, Any]:
    """As pydantic writes one whose tag has a default."""
    made = an_object(kind={"const": tag, "default": tag}, **properties)
    return made | {"required": [*properties]}


A, B, NUMBER = an_object(a={"type": "string"}), an_object(b={"type": "string"}), {"type": "number"}
UUID = "00000000-0000-{}000-8000-000000000000"
NAMES = {"$defs": {"C": {"enum": ["r", "g"], "title": "C", "type": "string"}}}
SERVED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (A, [{"a": "x"}], [{"a": "x", "b": 1}, {}]),
    (A | {"additionalProperties": NUMBER}, [{"a": "x", "b": 1}], [{"a": "x", "b": "1"}]),
    (A | {"unevaluatedProperties": True}, [{"a": "x", "b": 1}], []),
    (an_object(a=A), [{"a": {"a": "x"}}], [{"a": {"a": "x", "b": 1}}]),
    (A | {"patternProperties": {"^x-": NUMBER}}, [{"a": "", "x-b": 1}], [{"a": "", "b": 1}]),
    ({"properties": {"a": {}}, "required": ["b"]}, [{"a": 1, "b": 1}], [{"b": 1, "c": 1}]),
    ({"type": "object"}, [{"a": 1}], []),
    ({"allOf": [A, B]}, [{"a": "x", "b": "x"}, {"a": "", "b": "", "c": 1}], [{"a": "x"}]),
    ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, [{"a": "x"}], [{"a": "x", "b": 1}]),
    ({"anyOf": [A, {"type": "null"}]}, [{"a": "x"}, None], [{"a": "x", "b": 1}]),
    (A | {"unevaluatedProperties": False}, [{"a": "x"}], [{"a": "x", "b": 1}]),
    ({"items": NUMBER, "uniqueItems": False}, [[1, 1]], [["x"]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1.0}, [[1]], [[1, 1]]),
    ({"propertyNames": {"type": "string"}, "additionalProperties": NUMBER}, [{"a": 1}], [{"": ""}]),
    (
        NAMES | {"propertyNames": {"$ref": "#/$defs/C"}, "additionalProperties": NUMBER},
        [{"r": 1}, {"r": 1, "g": 2}],
        [{"b": 1}, {"r": "x"}],
    ),
    ({"type": "object", "propertyNames": {"const": "q"}}, [{"q": []}, {}], [{"r": []}]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"minLength": 2}}, [{"ab": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, [{UUID.format(1): 1}], [{"b": 1}]),
    ({"type": "string", "format": "password"}, ["x"], [1]),
    ({"type": "string", "format": "uuid4"}, [UUID.format(4)], [UUID.format(1)]),
    ({"type": "string", "format": "base64", "pattern": "^Y"}, ["YWI="], ["YWI", "ZWI="]),
    ({"type": "string", "format": "ipvanyaddress"}, ["1.2.3.4", "::1"], ["1.2.3"]),
    ({"type": "integer", "format": "int64"}, [7], ["7"]),
    ({"oneOf": [A, {"type": "null"}]}, [{"a": "x"}, None], [{"b": "x"}]),
    (
        {"oneOf": [tagged("c", n=NUMBER), {"anyOf": [tagged("d", n=NUMBER), tagged("e")]}]},
        [{"kind": "c", "n": 1}, {"kind": "e"}],
        [{"n": 1}, {"kind": "f", "n": 1}],
    ),
    ({"oneOf": [{"type": "integer"}, {"enum": ["a", None]}]}, [1, "a", None], ["b", 1.5]),
    ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
    ({"type": "integer", "exclusiveMaximum": 2**53 + 2}, [2**53, 5], [2**53 + 2, 2**53 + 4]),
    ({"type": "integer", "maximum": 2**64 - 1, "minimum": -(2**70)}, [2**60], [2**64]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SERVED)
def test_what_clients_generate_is_kept(schema: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert Draft202012Validator(schema).is_valid(value)
        assert fits(schema, value), value
    assert not [value for value in bad if fits(schema, value)]


def test_a_router_may_leave_objects_open() -> None:
    assert fits(an_object(a=A), {"a": {"a": "x", "b": 1}, "c": 2}, close=False)


DEAD = A | {"patternProperties": {"^a$": {"type": "string"}}, "additionalProperties": False}
WIDE = {"type": "object", "properties": {f"property_{n}": NUMBER for n in range(1000)}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (an_object(a={"items": {"not": {}}}), "#/properties/a/items/not"),
        (an_object(**{"a/b~": {"items": {"type": "frob"}}}), "#/properties/a~1b~0/items/type"),
        (an_object(a={"format": "frob"}), "#/properties/a/format"),
        (an_object(a={"oneOf": [A, {"type": "object"}]}), "#/properties/a/oneOf"),
        ({"oneOf": [an_object(k={"const": 1}), an_object(k={"const": 1.0})]}, "#/oneOf"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "#/oneOf"),
        (an_object(a=DEAD), "#/properties/a"),
        (an_object(a=NUMBER, b=WIDE), "#/properties/b"),
        (an_object(a={"pattern": "(?=a)"}), "#/properties/a"),
        (an_object(a={"type": "integer", "minimum": 1, "maximum": 0}), "#/properties/a"),
        (an_object(a={"minimum": 2**64}), "#/properties/a/minimum"),
        (an_object(a={"maximum": -1e999}), "#/properties/a/maximum"),
        (an_object(a={"enum": [2**53 + 1]}), "#/properties/a"),
        (A | {"propertyNames": {"pattern": "a"}}, "#/propertyNames"),
        ({"items": [{"propertyNames": {"format": "time"}}]}, "#/items/0/propertyNames"),
        ({"$ref": "#/$defs/x"}, "#/$ref"),
        ({"required": [["a"]]}, "#/required"),
        ({"properties": []}, "#/properties"),
        ({"allOf": [1]}, "#/allOf/0"),
        (True, "#"),
    ],
)
def test_a_refusal_names_the_place_and_none_of_the_library_s_words(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError) as refused:
        of_schema(json.dumps(schema))
    assert str(refused.value).startswith(f"{place}: ")
    assert not re.search("NoExt|Unimpl|Unsatis|parser error|coerce", str(refused.value))


def test_schemas_of_any_depth_and_in_circles_are_taken_or_refused() -> None:
    deep = '{"items": ' * 5000 + "{}" + "}" * 5000
    with pytest.raises(GrammarError, match="deep"):
        of_schema(deep)
    circle = {"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, A]}}, "$ref": "#/$defs/a"}
    with pytest.raises(GrammarError, match="oneOf"):
        of_schema(json.dumps(circle))
    tree = {"$defs": {"t": an_object(child={"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]})}}
    assert fits(tree | {"$ref": "#/$defs/t"}, {"child": {"child": None}})


# --- anything -------------------------------------------------------------------------------------

_LEAVES: list[Any] = [
    *(True, {"type": "null"}, {"type": "boolean"}, {"enum": [1, "a"]}, {"const": "a"}, NUMBER),
    {"type": "string", "maxLength": 3},
    {"type": "string", "format": "uuid4"},
    {"type": ["string", "null"], "format": "ipv4network"},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
    {"type": "array", "maxItems": 2, "items": NUMBER, "uniqueItems": False},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": NUMBER},
    {"$ref": "#/$defs/x"},
    {"$ref": "#/$defs/y"},
]


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=3)
    objects = st.builds(
        lambda properties, some, more: {"type": "object", "properties": properties} | some | more,
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(lambda r: {"required": r}),
        st.sampled_from(
            [{}, {}, {"additionalProperties": False}, {"patternProperties": {"^b": NUMBER}}]
        ),
    )
    tags = lists.map(lambda each: [tagged(n, a=schema) for n, schema in enumerate(each)])
    return st.one_of(
        objects,
        *(
            st.builds(lambda key, each: {key: each}, st.just(key), lists)
            for key in ("anyOf", "oneOf")
        ),
        st.builds(lambda one, each: one | {"allOf": each}, objects, lists),
        tags.map(lambda each: {"oneOf": each}),
        tags.map(lambda each: {"oneOf": [*each, {"type": "null"}]}),
    )


_SCHEMAS = st.recursive(st.sampled_from(_LEAVES), _nested, max_leaves=6)


@given(_SCHEMAS, _SCHEMAS, _SCHEMAS, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_whatever_is_said_by_a_rewritten_schema_fits_the_one_that_came(
    wanted: Any, x: Any, y: Any, close: bool, draw: random.Random
) -> None:
    schema = {"allOf": [wanted], "$defs": {"x": x, "y": y}}
    try:
        made = matcher(schema, close=close)
    except GrammarError:
        return
    said = bytearray()
    while END not in (allowed := _allowed(made)):
        assert not made.is_error(), (schema, said, made.get_error())
        ends = [each for each in allowed if each in b'"]}'] if len(said) > 40 else []
        said.append(draw.choice(ends or allowed))
        assert len(said) < 2000
        made.consume_token(said[-1])
    assert Draft202012Validator(schema).is_valid(json.loads(said)), (schema, said)


def _allowed(made: LLMatcher) -> list[int]:
    mask = int.from_bytes(made.compute_bitmask(), "little")
    return [token for token in range(END + 1) if mask >> token & 1]
