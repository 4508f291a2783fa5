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


def matcher(schema: Any, **options: bool) -> LLMatcher:
    part = of_schema(json.dumps(schema), **options)
    return LLMatcher(BYTES, json.dumps({"grammars": [part]}), log_level=0)


def fits(schema: Any, value: Any, **options: bool) -> bool:
    made = matcher(schema, **options)
    return made.consume_tokens([*json.dumps(value).encode()]) and made.is_accepting()


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def tagged(tag: Any, **properties: Any) -> dict[str, Any]:
    """As pydantic writes one whose tag has a default."""
    made = an_object(kind={"const": tag, "default": tag}, **properties)
    return made | {"required": [*properties]}


STRING, NUMBER, NULL = {"type": "string"}, {"type": "number"}, {"type": "null"}
A, B, MAP = (
    an_object(a=STRING),
    an_object(b=STRING),
    {"type": "object", "additionalProperties": NUMBER},
)
TAGS = {"oneOf": [tagged("c", n=NUMBER), {"anyOf": [tagged("d", n=NUMBER), tagged("e")]}]}
UUID = "00000000-0000-{}000-8000-000000000000"
# Schema, what fits it, what does not.
SERVED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (A, [{"a": "x"}], [{"a": "x", "b": 1}, {}]),
    (A | {"additionalProperties": NUMBER}, [{"a": "x", "b": 1}], [{"a": "x", "b": "1"}]),
    (A | {"unevaluatedProperties": False}, [{"a": "x"}], [{"a": "x", "b": 1}]),
    (A | {"patternProperties": {"^x-": NUMBER}}, [{"a": "", "x-b": 1}], [{"a": "", "b": 1}]),
    ({"properties": {"a": {}}, "required": ["b"]}, [{"a": 1, "b": 1}], [{"b": 1, "c": 1}]),
    ({"type": "object"}, [{"a": 1}], []),
    ({"allOf": [A, B]}, [{"a": "x", "b": "x"}, {"a": "", "b": "", "c": 1}], [{"a": "x"}]),
    ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, [{"a": "x"}], [{"a": "x", "b": 1}]),
    ({"anyOf": [A, NULL]}, [{"a": "x"}, None], [{"a": "x", "b": 1}]),
    ({"type": "array", "items": NUMBER, "uniqueItems": False}, [[1, 1]], [["x"]]),
    (MAP | {"propertyNames": STRING}, [{"a": 1}], [{"": ""}]),
    (MAP | {"propertyNames": {"enum": ["r", "g"]}}, [{"r": 1, "g": 2}], [{"b": 1}, {"r": "x"}]),
    (MAP | {"propertyNames": {"const": "q"}}, [{"q": 1}, {}], [{"r": 1}]),
    (MAP | {"propertyNames": STRING | {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
    (MAP | {"propertyNames": {"minLength": 2}}, [{"ab": 1}], [{"b": 1}]),
    (MAP | {"propertyNames": {"format": "uuid"}}, [{UUID.format(1): 1}], [{"b": 1}]),
    (STRING | {"format": "password", "maxLength": 3}, ["x"], [1]),
    (STRING | {"format": "uuid4"}, [UUID.format(4)], [UUID.format(1)]),
    (STRING | {"format": "base64", "pattern": "^Y"}, ["YWIz", "YWI="], ["YWI", "ZWIz"]),
    (STRING | {"format": "ipvanyaddress"}, ["1.2.3.4", "::1"], ["1.2.3"]),
    ({"type": "integer", "format": "int64"}, [7], ["7"]),
    ({"oneOf": [A, NULL]}, [{"a": "x"}, None], [{"b": "x"}]),
    (TAGS, [{"kind": "c", "n": 1}, {"kind": "e"}], [{"n": 1}, {"kind": "f", "n": 1}]),
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


DEAD = A | {"patternProperties": {"^a$": STRING}, "additionalProperties": False}
WIDE = {"type": "object", "properties": {f"property_{n}": NUMBER for n in range(1000)}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (an_object(**{"a/b~": {"items": {"not": {}}}}), "#/properties/a~1b~0/items/not"),
        (an_object(a={"items": [{"type": "frob"}]}), "#/properties/a/items/0/type"),
        (an_object(a={"format": "frob"}), "#/properties/a/format"),
        ({"oneOf": [A, {"type": "object"}]}, "#/oneOf"),
        ({"oneOf": [an_object(k={"const": 1}), an_object(k={"const": 1.0})]}, "#/oneOf"),
        ({"oneOf": [{"$ref": "#"}, A]}, "#/oneOf"),
        (an_object(a=DEAD), "#"),
        (an_object(a=NUMBER, b=WIDE), "#"),
        (an_object(a={"pattern": "(?=a)"}), "#"),
        (an_object(a={"type": "integer", "minimum": 1, "maximum": 0}), "#"),
        (an_object(a={"minimum": 2**64}), "#/properties/a/minimum"),
        (an_object(a={"maximum": -1e999}), "#/properties/a/maximum"),
        (an_object(a={"enum": [2**53 + 1]}), "#/properties/a"),
        (A | {"propertyNames": {"pattern": "a"}}, "#/propertyNames"),
        ({"$ref": "#/$defs/x"}, "#/$ref"),
        ({"required": [["a"]]}, "#/required"),
        ({"allOf": [1]}, "#/allOf/0"),
        (True, "#"),
    ],
)
def test_a_refusal_names_the_place_and_none_of_the_library_s_words(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError) as refused:
        of_schema(json.dumps(schema))
    assert str(refused.value).startswith(f"{place}: ")
    assert not re.search("NoExt|Unimpl|Unsatis|parser error|coerce", str(refused.value))


def test_a_schema_that_nests_too_deeply_is_refused() -> None:
    with pytest.raises(GrammarError, match="deep"):
        of_schema('{"items": ' * 5000 + "{}" + "}" * 5000)


_LEAVES = st.sampled_from([schema for schema, _, _ in SERVED if "$defs" not in schema])
_MAY = st.sampled_from(
    [{}, {"required": ["a"]}, {"additionalProperties": False}, {"oneOf": [A, B]}]
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=3)
    properties = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda each, more: {"type": "object", "properties": each} | more, properties, _MAY
        ),
        st.builds(
            lambda key, each: {key: each}, st.sampled_from(["anyOf", "oneOf", "allOf"]), lists
        ),
        lists.map(lambda each: {"oneOf": [NULL, *(tagged(n, a=a) for n, a in enumerate(each))]}),
    )


_SCHEMAS = st.recursive(_LEAVES | st.just({"$ref": "#/$defs/x"}), _nested, max_leaves=6)


@given(_SCHEMAS, _LEAVES, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_whatever_is_said_by_a_rewritten_schema_fits_the_one_that_came(
    wanted: Any, x: Any, close: bool, draw: random.Random
) -> None:
    schema = {"allOf": [wanted], "$defs": {"x": x}}
    try:
        made = matcher(schema, close=close)
    except GrammarError:
        return
    assert Draft202012Validator(schema).is_valid(json.loads(said(made, draw)))


def said(made: LLMatcher, draw: random.Random) -> bytes:
    """Any answer, which is soon ended."""
    said = bytearray()
    while END not in (allowed := _allowed(made)):
        assert not made.is_error(), (said, made.get_error())
        ends = [each for each in allowed if each in b'"]}'] if len(said) > 40 else []
        said.append(draw.choice(ends or allowed))
        assert len(said) < 3000
        made.consume_token(said[-1])
    return bytes(said)


def _allowed(made: LLMatcher) -> list[int]:
    mask = int.from_bytes(made.compute_bitmask(), "little")
    return [token for token in range(END + 1) if mask >> token & 1]
