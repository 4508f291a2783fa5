"""How many JSON schemas are served: those that pydantic and zod write, and those of files.

    python -m bench.schemas FILE.json ...

A file is a schema, or an OpenAPI document, whose bodies of requests are taken (200 at most).
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
from pydantic import Field, StringConstraints, TypeAdapter

from baton.model_folder import find_text_files
from engine.constraints import GrammarCompiler
from engine.errors import InvalidRequestError
from router.text import TextModel
from router.text.grammar import GrammarError, of_schema

DEMO = Path(__file__).parents[1] / "models" / "demo"
_MAX_BODIES, _WALKS, _MAX_TOKENS = 200, 3, 600


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    friends: list[Dog | Cat] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
_PLAIN: list[Any] = [str, int, bool, float, Color, Cat, Dog, Pet, Literal["a", 1, None]]
_PLAIN += [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal]
_PLAIN += [uuid.UUID, pydantic.UUID1, pydantic.UUID4, pydantic.UUID5, pathlib.Path, bytes]
_PLAIN += [ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, pydantic.AnyUrl]
_PLAIN += [pydantic.IPvAnyAddress, pydantic.IPvAnyNetwork, pydantic.FilePath, pydantic.SecretStr]
_PLAIN += [
    pydantic.Base64Str,
    pydantic.Base64UrlStr,
    pydantic.Json,
    pydantic.PostgresDsn,
    re.Pattern,
]
_PLAIN += [pydantic.ByteSize, pydantic.PositiveInt, pydantic.HttpUrl, tuple[int, str], set[int]]
_PLAIN += [dict[str, int], dict[Color, Cat], dict[Literal["x", "y"], int], dict[uuid.UUID, str]]
_PLAIN += [dict[Annotated[str, StringConstraints(min_length=1)], str], dict[datetime.date, float]]
_PLAIN += [Annotated[str, StringConstraints(pattern="^[a-z]+$", max_length=9)]]

_STRING, _NULL = {"type": "string"}, {"type": "null"}
_ZOD: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": _STRING, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": _STRING},
    {"type": "object", "propertyNames": _STRING | {"pattern": "^x"}, "additionalProperties": {}},
    {"type": "array", "items": _STRING, "uniqueItems": False},
    {"oneOf": [{"type": "object", "properties": {"a": _STRING}}, _NULL]},
    {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"allOf": [{"type": "object", "properties": {k: _STRING}, "required": [k]} for k in "ab"]},
    *(_STRING | {"format": each} for each in ("base64", "base64url", "uri-template", "password")),
]


def schemas(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Where each comes from, and itself."""
    for annotation in _PLAIN:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        yield "pydantic", adapter.json_schema()
        fields: Any = {"a": (annotation, ...), "b": (list[annotation] | None, None)}
        yield "pydantic", pydantic.create_model("M", **fields).model_json_schema()
    yield from (("zod's shapes", each) for each in _ZOD)
    for file in files:
        value = json.loads(file.read_text())
        calls = [call for path in value.get("paths", {}).values() for call in path.values()]
        bodies = [call.get("requestBody") for call in calls if "openapi" in value]
        if "openapi" in value:
            found = [body["content"].get("application/json") for body in bodies if body]
            some = [each["schema"] for each in found if each][:_MAX_BODIES]
            yield from (("OpenAPI", each) for each in some)
        else:
            yield "files", value


def outcome(schema: Any, compiler: GrammarCompiler, model: TextModel) -> str:
    """What becomes of a request with it."""
    try:
        part = of_schema(json.dumps(schema))
    except GrammarError as error:
        why = re.sub(r"^(#[^:]*: )|['\"/].*['\"/]|\d+", "", str(error))
        return f"refused: {why[:50].strip()}"
    grammar = json.dumps({"grammars": [part]})
    for seed in range(_WALKS):
        try:
            text = said(compiler, grammar, model, random.Random(seed))
        except InvalidRequestError as error:
            return f"failed at a worker: {str(error)[:50]}"
        validator = jsonschema.validators.validator_for(schema)(schema)
        if text is not None and not validator.is_valid(json.loads(text)):
            return "served, and a value did not fit"
    return "served"


def said(
    compiler: GrammarCompiler, grammar: str, model: TextModel, draw: random.Random
) -> str | None:
    """Any answer; None if it grows too long."""
    matcher, ids = compiler.matcher(grammar), list[int]()
    (end,) = model.eos_token_ids
    while len(ids) < _MAX_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise InvalidRequestError("grammar", matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if end in allowed:
            return model.decode(ids)
        closing = [each for each in allowed if model.token_text(each)[:1] in (b'"', b"]", b"}")]
        ids.append(draw.choice(closing if closing and draw.random() < 0.7 else allowed))
        matcher.consume_token(ids[-1])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    model = TextModel(find_text_files(DEMO))
    tokenizer = DEMO / "tokenizer.json"
    compiler = GrammarCompiler(lambda: tokenizer, model.vocab_size, model.eos_token_ids)
    counts: dict[str, Counter[str]] = {}
    for source, schema in schemas(parser.parse_args().files):
        counts.setdefault(source, Counter())[outcome(schema, compiler, model)] += 1
    total = sum(counts.values(), Counter[str]())
    print(f"| {total.total()} schemas | {' | '.join(counts)} | all |")
    print("| --- " * (len(counts) + 2) + "|")
    for name, number in sorted(total.items(), key=lambda each: (each[0][:6] != "served", -each[1])):
        print(f"| {name} | {' | '.join(str(each[name]) for each in counts.values())} | {number} |")


if __name__ == "__main__":
    main()
