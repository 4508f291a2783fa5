"""A structural OpenAPI v3 schema from frozen dataclasses.

Names become camelCase. The text under a field becomes its description. The API server checks bounds
and rules. The defaults of `deploy.api`'s own classes stand in the schema, so they are seen in the
object. The defaults of sections that `cluster.yaml` shares stand in descriptions: written into
every stored object they would outlive the release that chose them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any

from baton.config.settings import choices_of
from deploy.api.checked import FREE, Bounds, Checked, bounds_of
from deploy.api.naming import camel
from deploy.api.status import Reported

_SCALARS = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": "int64"},
    float: {"type": "number"},
    str: {"type": "string"},
}
_SIZE = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}
_LONGEST = 4096  # of text that names no bound of its own


def schema_of(cls: type) -> dict[str, Any]:
    """The schema of a dataclass, without a description of its own."""
    kinds, texts = typing.get_type_hints(cls), _texts(cls)
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        name = camel(field.name)
        properties[name] = _property(cls, field, kinds[field.name], texts.get(field.name, ""))
        if _default(field) is dataclasses.MISSING:
            required.append(name)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if issubclass(cls, Checked) and cls.rules:
        schema["x-kubernetes-validations"] = [rule.validation() for rule in cls.rules]
    return schema


def _property(cls: type, field: dataclasses.Field[Any], kind: Any, text: str) -> dict[str, Any]:
    """One field: its type, bounds, default and description."""
    inner, is_optional = _without_none(kind)
    bounds, default = bounds_of(field), _default(field)
    schema = _bounded(inner, bounds)
    is_section = dataclasses.is_dataclass(default) or isinstance(default, Mapping)
    if default in (dataclasses.MISSING, None, ()) or issubclass(cls, Reported):
        pass
    elif not issubclass(cls, Checked):
        text = text if is_section else f"{text} Default: {_spelt(default)}.".strip()
    elif not is_section:
        schema["default"] = list(default) if isinstance(default, tuple) else default
    elif _is_checked(inner) and not bounds.is_free:
        schema["default"] = {}
    if is_optional:
        schema["nullable"] = True
    if not text and dataclasses.is_dataclass(inner):
        text = inspect.cleandoc(inner.__doc__ or "")
    return ({"description": _as_written(text)} if text else {}) | schema


def _as_written(text: str) -> str:
    """Fields that a text names, as the object spells them."""
    return re.sub(r"`([a-z]+(?:_[a-z]+)+)`", lambda found: f"`{camel(found[1])}`", text)


def _type_schema(kind: Any, bounds: Bounds) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if choices := choices_of(kind):
        return {"type": "string", "enum": choices}
    if bounds.partial_of is not None:
        schema = schema_of(bounds.partial_of)
        schema.pop("required", None)
        return schema
    if bounds.foreign is not None:
        return dict(bounds.foreign.schema)
    if bounds.is_free:
        return dict(FREE)
    if origin is tuple:
        return {"type": "array", "items": _bounded(arguments[0], Bounds())}
    if _is_mapping(kind):
        return {"type": "object", "additionalProperties": _bounded(arguments[1], Bounds())}
    if dataclasses.is_dataclass(kind):
        return schema_of(typing.cast(type, kind))
    return dict(_SCALARS[kind])


def _bounded(kind: Any, bounds: Bounds) -> dict[str, Any]:
    """A type within bounds."""
    schema = _type_schema(kind, bounds)
    number = int if schema["type"] == "integer" else float
    if bounds.minimum is not None:
        schema["minimum"] = number(bounds.minimum)
    if bounds.maximum is not None:
        schema["maximum"] = number(bounds.maximum)
    if bounds.pattern is not None:
        schema["pattern"] = bounds.pattern
    size = bounds.max_size or (_LONGEST if schema == _SCALARS[str] else None)
    if size is not None:
        schema[_SIZE[schema["type"]]] = size
    return schema


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_checked(kind: Any) -> bool:
    """Whether an object that is not given gets its fields' defaults all the same."""
    return dataclasses.is_dataclass(kind) and issubclass(typing.cast(type, kind), Checked)


def _without_none(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind, False
    (inner,) = (each for each in typing.get_args(kind) if each is not type(None))
    return inner, True


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _spelt(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def _texts(cls: type) -> dict[str, str]:
    """The text under each field, of the class and those it is made from."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            texts |= _own_texts(each)
    return texts


def _own_texts(cls: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for field, below in zip(node.body, node.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    texts[field.target.id] = " ".join(text.split())
    return texts
