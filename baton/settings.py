"""Nested frozen dataclasses from a YAML mapping, for any such classes, with errors that help.

Every mistake is a ConfigError with the file, the dotted key and, for a misspelt key, the nearest
valid one. What a value may be comes from the dataclass: field types here, ranges in its own
`__post_init__` (a ValueError naming the field).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from baton.errors import ConfigError

T = TypeVar("T")


def parse(cls: type[T], value: object, *, source: str, key: str = "") -> T:
    """Make a `cls` from a mapping; `source` names the file, `key` is the dotted way here."""
    if not isinstance(value, Mapping):
        raise _error(source, key, f"a mapping is expected, not {_describe(value)}")
    types_of = _field_types(cls)
    for name in value:
        if name not in types_of:
            raise _unknown_key(source, key, str(name), list(types_of))
    values = {
        name: _convert(types_of[name], item, source, _join(key, name))
        for name, item in value.items()
    }
    missing = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise _error(source, _join(key, missing[0]), "is needed")
    try:
        return cls(**values)
    except ValueError as error:
        raise _error(source, *_locate(key, str(error), types_of)) from error


def dump(config: object, *, base: object | None = None) -> dict[str, Any]:
    """The mapping that `parse` reads back; with `base`, only what differs from it."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        default = getattr(base, field.name, None) if base is not None else None
        if base is not None and value == default:
            continue
        result[field.name] = _plain(value, default)
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`; mappings inside are merged in turn."""
    result = dict(base)
    for name, value in over.items():
        inner = result.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return result


# --- one value ----------------------------------------------------------------------------------


def _field_types(cls: Any) -> dict[str, Any]:
    return {
        name: kind
        for name, kind in typing.get_type_hints(cls).items()
        if name in {field.name for field in dataclasses.fields(cls)}
    }


def _convert(kind: Any, value: object, source: str, key: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _convert(kind, value, source, key)
    if origin is typing.Literal:
        if value not in arguments:
            raise _error(source, key, _one_of(value, [str(choice) for choice in arguments]))
        return value
    if origin in (dict, Mapping) or origin is types.MappingProxyType:
        return _convert_mapping(arguments[1], value, source, key)
    if origin is tuple:
        return _convert_tuple(arguments[0], value, source, key)
    if dataclasses.is_dataclass(kind):
        return parse(
            typing.cast(type, kind), {} if value is None else value, source=source, key=key
        )
    return _convert_scalar(kind, value, source, key)


def _convert_mapping(kind: Any, value: object, source: str, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(source, key, f"a mapping is expected, not {_describe(value)}")
    for name in value:
        if isinstance(name, bool):
            raise _error(source, key, f"a name is expected, not {_describe_for_text(name)}")
    return {
        str(name): _convert(kind, item, source, _join(key, str(name)))
        for name, item in value.items()
    }


def _convert_tuple(kind: Any, value: object, source: str, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _error(source, key, f"a list is expected, not {_describe(value)}")
    return tuple(
        _convert(kind, item, source, f"{key}[{index}]") for index, item in enumerate(value)
    )


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _convert_scalar(kind: Any, value: object, source: str, key: str) -> Any:
    if kind is Any:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        given = _describe_for_text(value) if kind is str else _describe(value)
        raise _error(source, key, f"{_KINDS[kind]} is expected, not {given}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _error(source, key, f"must be a finite number, not {value}")
    return value


def _plain(value: object, default: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dump(value, base=default if type(default) is type(value) else None)
    if isinstance(value, Mapping):
        return {name: _plain(item, None) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item, None) for item in value]
    return value


# --- errors -------------------------------------------------------------------------------------


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _describe(value: object) -> str:
    return "nothing" if value is None else f"{value!r}"


def _describe_for_text(value: object) -> str:
    """What was given where a word is wanted: YAML takes some words for true or false."""
    if not isinstance(value, bool):
        return _describe(value)
    name, words = ("true", "yes and on") if value else ("false", "no and off")
    return f"{name}: YAML reads {words} so unless they are quoted"


def _error(source: str, key: str, problem: str) -> ConfigError:
    where = f"{source}: {key}" if key else source
    return ConfigError(f"{where}: {problem}", field=key or None)


def _unknown_key(source: str, key: str, name: str, valid: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"
    return _error(source, _join(key, name), f"unknown key; {hint}")


def _one_of(value: object, choices: list[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5) if type(value) is str else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"must be one of {', '.join(choices)}, not {_describe_for_text(value)}{hint}"


def _locate(key: str, problem: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """A dataclass names the field first in its ValueError: move it into the key."""
    first, _, rest = problem.partition(" ")
    if first.partition(".")[0] in names:
        return _join(key, first), rest
    return key, problem
