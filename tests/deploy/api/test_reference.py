"""The page of all fields names what the CRDs have, each with its default, and breaks no table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from deploy.api.crd import KINDS, Kind
from deploy.api.reference import reference_files


def section_of(kind: Kind) -> str:
    (page,) = reference_files().values()
    (section,) = re.findall(rf"^## {kind.kind}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert isinstance(section, str)
    return section


def named_in(section: str) -> set[str]:
    """The fields of all tables, with their headings' way."""
    named: set[str] = set()
    heading = ""
    for line in section.splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
        elif line.startswith("| `"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 5, line
            named.add(f"{heading}.{line.split('`')[1]}")
    return named


def ways(schema: Mapping[str, Any], way: str) -> Iterator[str]:
    """To every field that holds no others."""
    for name, inner in schema.get("properties", {}).items():
        here = f"{way}.{name}"
        below = [
            *ways(inner, here),
            *ways(inner.get("items", {}), f"{here}[]"),
            *ways(inner.get("additionalProperties", {}), f"{here}.NAME"),
        ]
        yield from below or [here]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_page_names_every_field_and_no_other(kind: Kind) -> None:
    (version,) = kind.crd()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    wanted = {way for name in ("spec", "status") for way in ways(schema[name], name)}
    named = named_in(section_of(kind))
    assert wanted <= named
    assert all(any(way.startswith(f"{name}.") for way in wanted) for name in named - wanted)


def test_defaults_bounds_and_rules_are_told() -> None:
    cluster, (page,) = section_of(KINDS[0]), reference_files().values()
    assert "| `maxReplicas` | integer, 1 to 1024 | `8` |" in cluster
    assert "| `admission.fleetWaitSeconds` | number, at least 0 | (`10.0`) |" in page
    assert "`healthPort`" not in page, "the operator sets it"
    assert "| `blockSize` | integer, at least 1 | (`16`) | Tokens of one KV block. |" in cluster
    assert "| `gcsFaultTolerance.redisAddress` | string | required |" in cluster
    assert "- pools must have names of 1 to 34" in cluster


def test_texts_name_no_field_that_there_is_not() -> None:
    (page,) = reference_files().values()
    fields = {name.rpartition(".")[2] for name in named_in(page)}
    assert set(re.findall(r"`([a-z]+[A-Z]\w*)`", page)) <= fields
