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
from collections.abc import Mapping, Sequence
from typing import Any

from baton.config.ranges import Bounds, annotations_of
from baton.config.settings import choices_of
from deploy.api.checked import AS_WRITTEN, Checked, Foreign, PartialOf
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
    """Make the schema of a dataclass, without a description of its own."""
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
    """Make the schema of one field: its type, bounds, default and description."""
    inner, is_optional = _without_none(kind)
    beside, default = annotations_of(cls)[field.name], _default(field)
    schema = _bounded(inner, beside)
    is_section = dataclasses.is_dataclass(default) or isinstance(default, Mapping)
    if default in (dataclasses.MISSING, None, ()) or issubclass(cls, Reported):
        pass
    elif not issubclass(cls, Checked):
        text = text if is_section else f"{text} Default: {_spelt(default)}.".strip()
    elif not is_section:
        schema["default"] = list(default) if isinstance(default, tuple) else default
    elif isinstance(default, Checked) and AS_WRITTEN not in beside:
        schema["default"] = {}
    if is_optional:
        schema["nullable"] = True
    if not text and dataclasses.is_dataclass(inner):
        text = inspect.cleandoc(inner.__doc__ or "")
    return ({"description": _as_written(text)} if text else {}) | schema


def _as_written(text: str) -> str:
    """Spell fields and None, as a text names them, as people meet them in an object."""
    text = re.sub(r"\bNone:", "Unset:", text)
    return re.sub(r"`([a-z]+(?:_[a-z]+)+)`", lambda found: f"`{camel(found[1])}`", text)


def _type_schema(kind: Any, beside: Sequence[Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    for each in beside:
        if isinstance(each, PartialOf):
            schema = schema_of(each.cls)
            schema.pop("required", None)
            return schema
        if isinstance(each, Foreign):
            return dict(each.schema)
    if choices := choices_of(kind):
        return {"type": "string", "enum": choices}
    if origin is tuple:
        return {"type": "array", "items": _bounded(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _bounded(arguments[1])}
    if dataclasses.is_dataclass(kind):
        return schema_of(typing.cast(type, kind))
    return dict(_SCALARS[kind])


def _bounded(kind: Any, beside: Sequence[Any] = ()) -> dict[str, Any]:
    """Make the schema of a type within the bounds beside it."""
    schema = _type_schema(kind, beside)
    is_plain_text = schema == _SCALARS[str]
    for bounds in beside:
        if isinstance(bounds, Bounds):
            schema |= _keywords(bounds, schema["type"])
    if is_plain_text:
        schema.setdefault("maxLength", _LONGEST)
    return schema


def _keywords(bounds: Bounds, type_: str) -> dict[str, Any]:
    """Return the schema's keywords for bounds."""
    number = int if type_ == "integer" else float
    low = bounds.minimum if bounds.above is None else bounds.above
    words = {
        "minimum": None if low is None else number(low),
        "exclusiveMinimum": bounds.above is not None or None,
        "maximum": None if bounds.maximum is None else number(bounds.maximum),
        "pattern": bounds.pattern,
        _SIZE.get(type_, ""): bounds.max_size,
    }
    return {word: value for word, value in words.items() if value is not None}


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
    """Read the text under each field, of the class and those it is made from."""
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
