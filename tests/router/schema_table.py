"""How many JSON schemas are served: those that pydantic writes, those of the tests, and of files.

    python -m tests.router.schema_table FILE.json ...

A file is a schema, or an OpenAPI document, whose first 200 bodies of requests are taken.
"""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import pathlib
import random
import re
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic as p
from jsonschema.validators import validator_for

from router.text.grammar import GrammarError
from tests.router.test_schemas import SERVED, matcher, said

Color = enum.Enum("Color", {"red": "red", "green": "green"})
Cat = p.create_model("Cat", kind=(Literal["cat"], "cat"), lives=(int, p.Field(ge=0, le=9)))
Dog = p.create_model("Dog", kind=(Literal["dog"], ...), friends=(list[Cat], []))
Pet = Annotated[Cat | Dog, p.Field(discriminator="kind")]
Short = Annotated[str, p.StringConstraints(min_length=1, max_length=9)]
PLAIN: list[Any] = [
    str,
    int,
    bool,
    float,
    Color,
    Cat,
    Dog,
    Pet,
    Short,
    bytes,
    pathlib.Path,
    uuid.UUID,
]
PLAIN += [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, re.Pattern, p.Json]
PLAIN += [ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, p.IPvAnyAddress]
PLAIN += [p.UUID1, p.UUID4, p.UUID5, p.FilePath, p.SecretStr, p.Base64Str, p.AnyUrl, p.PostgresDsn]
PLAIN += [p.ByteSize, p.PositiveInt, tuple[int, str], set[int], Literal["a", 1, None]]
PLAIN += [dict[key, int] for key in (str, Color, Literal["x", "y"], uuid.UUID, datetime.date)]


def schemas(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Where each comes from, and itself."""
    for kind in PLAIN:
        yield "pydantic", p.TypeAdapter(kind).json_schema()
        fields: Any = {"a": (kind, ...), "b": (list[kind] | None, None)}
        yield "pydantic", p.create_model("M", **fields).model_json_schema()
    yield from (("zod's and others' shapes", schema) for schema, _, _ in SERVED)
    for file in files:
        value = json.loads(file.read_text())
        calls = (call for path in value.get("paths", {}).values() for call in path.values())
        bodies = (call.get("requestBody", {}).get("content", {}) for call in calls)
        if "openapi" in value:
            found = [each["application/json"] for each in bodies if "application/json" in each]
            yield from (("OpenAPI", each["schema"]) for each in found[:200])
        else:
            yield "files", value


def outcome(schema: Any) -> str:
    try:
        answers = [said(matcher(schema), random.Random(seed)) for seed in range(3)]
    except GrammarError as error:
        why = re.sub(r"^#\S*: |(['\"/])\S*\1|\d+ ?", "", str(error))
        return f"refused: {why[:60].partition(';')[0]}"
    except AssertionError:
        return "refused at run time, or no end"
    valid = all(validator_for(schema)(schema).is_valid(json.loads(each)) for each in answers)
    return "served" if valid else "served, and an answer did not fit"


if __name__ == "__main__":
    counts: dict[str, Counter[str]] = {}
    for source, schema in schemas([Path(each) for each in sys.argv[1:]]):
        counts.setdefault(source, Counter())[outcome(schema)] += 1
    total = sum(counts.values(), Counter[str]())
    print(
        f"| {total.total()} schemas | {' | '.join(counts)} | all |\n{'| --- ' * (len(counts) + 2)}|"
    )
    for name, number in total.most_common():
        print(f"| {name} | {' | '.join(str(each[name]) for each in counts.values())} | {number} |")
