"""The dataclasses inside a spec, and what an API server does with its defaults."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.api.naming import camel
from deploy.api.schema import schema_of


def dataclasses_in(cls: type) -> set[type]:
    """A dataclass and all that its fields are made of."""
    found = {cls}
    for kind in typing.get_type_hints(cls).values():
        for each in (kind, *typing.get_args(kind)):
            if dataclasses.is_dataclass(each):
                found |= dataclasses_in(typing.cast(type, each))
    return found


def with_defaults(cls: type, spec: dict[str, Any]) -> dict[str, Any]:
    """A copy of a spec with what its schema defaults."""
    filled = copy.deepcopy(spec)
    _fill(schema_of(cls), filled)
    return filled


def _fill(schema: Mapping[str, Any], value: Any) -> None:
    if not isinstance(value, dict):
        return
    for name, inner in schema.get("properties", {}).items():
        if name not in value and "default" in inner:
            value[name] = copy.deepcopy(inner["default"])
        _fill(inner, value.get(name))
    if "additionalProperties" in schema:
        for item in value.values():
            _fill(schema["additionalProperties"], item)


def inner_objects(
    cls: type, value: Mapping[str, Any]
) -> Iterator[tuple[str, type, dict[str, Any]]]:
    """The objects directly in one: where each is, and the dataclass it is read as."""
    for name, kind in typing.get_type_hints(cls).items():
        inner = value.get(camel(name))
        for each in (kind, *typing.get_args(kind)):
            if not dataclasses.is_dataclass(each) or not isinstance(inner, dict):
                continue
            items = inner if _is_map(kind) else {"": inner}
            for key, item in items.items():
                yield f"{name}.{key}", typing.cast(type, each), item


def _is_map(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)
