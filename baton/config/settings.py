"""Nested frozen dataclasses from YAML, for any such classes, with errors that help.

Every mistake is a ConfigError with the file, the dotted key and, for a misspelt key, the nearest
valid one. What a value may be comes from the dataclass: field types here, ranges in its own
`__post_init__` (a ValueError naming the field).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import yaml

from baton.errors import ConfigError

T = TypeVar("T")

Spell = Callable[[str], str]
"""How a file writes a field's name; `str`: as Python does."""


def parse(cls: type[T], value: object, *, source: str, key: str = "", spell: Spell = str) -> T:
    """Make a `cls` from a mapping. `source` names the file, `key` is the dotted way here."""
    return _Reader(source, spell).parse(cls, value, key)


def dump(config: object, *, base: object | None = None) -> dict[str, Any]:
    """Write the mapping that `parse` reads back; with `base`, only what differs from it."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        default = getattr(base, field.name, None) if base is not None else None
        if base is not None and value == default:
            continue
        result[field.name] = _plain(value, default)
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`; mappings inside are merged in turn."""
    result = dict(base)
    for name, value in over.items():
        inner = result.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return result


def changed(config: T, **values: Any) -> T:
    """Return a copy with other values. A mapping for a section changes only its fields there."""

    def value_of(name: str, value: Any) -> Any:
        section = getattr(config, name)
        is_section = dataclasses.is_dataclass(section) and isinstance(value, Mapping)
        return changed(section, **value) if is_section else value

    made = {name: value_of(name, value) for name, value in values.items()}
    return dataclasses.replace(config, **made)  # type: ignore[type-var]


def unknown_key(name: str, valid: Sequence[str]) -> str:
    """Word the message about an unknown key, with the nearest valid one."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"
    return f"unknown key; {hint}"


# --- YAML ---------------------------------------------------------------------------------------


class RepeatedKeyError(yaml.YAMLError):
    """A key is given in two lines of one mapping. Lines count from 1."""

    def __init__(self, key: str, first_line: int, line: int) -> None:
        super().__init__(f"{key} is given twice, in lines {first_line} and {line}")
        self.key = key


class _Loader(yaml.SafeLoader):
    """Check keys as written. A key that `<<` merges in may be given again."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise RepeatedKeyError(key.value, lines[key.value], line)
            lines[key.value] = line
        return node


def load_yaml(text: str) -> Any:
    """Read the value in a text. Raises yaml.YAMLError, such as RepeatedKeyError."""
    return yaml.load(text, Loader=_Loader)


# --- reading ------------------------------------------------------------------------------------


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class _Reader:
    """Reads one file's values; its errors name the file and spell keys as it does."""

    def __init__(self, source: str, spell: Spell) -> None:
        self._source, self._spell = source, spell

    def parse(self, cls: type[T], value: object, key: str) -> T:
        if not isinstance(value, Mapping):
            raise self._error(key, f"a mapping is expected, not {_describe(value)}")
        kinds = _field_types(cls)
        field_of = {self._spell(name): name for name in kinds}
        for name in value:
            if name not in field_of:
                raise self._error(_join(key, str(name)), unknown_key(str(name), list(field_of)))
        values = {
            field_of[name]: self._convert(kinds[field_of[name]], item, _join(key, name))
            for name, item in value.items()
        }
        if missing := [name for name in _needed(cls) if name not in values]:
            raise self._error(_join(key, self._spell(missing[0])), "is needed")
        try:
            return cls(**values)
        except ValueError as error:
            raise self._error(*self._locate(key, str(error), kinds)) from error

    def _convert(self, kind: Any, value: object, key: str) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (types.UnionType, typing.Union):
            if value is None and type(None) in arguments:
                return None
            kinds = [argument for argument in arguments if argument is not type(None)]
            if len(kinds) > 1 and isinstance(value, list | tuple):
                kinds = [each for each in kinds if typing.get_origin(each) is tuple]
            return self._convert(kinds[0], value, key)
        if choices := choices_of(kind):
            if value not in choices:
                raise self._error(key, _one_of(value, choices))
            return kind(value) if origin is None else value
        if origin in (dict, Mapping):
            return self._convert_mapping(arguments[1], value, key)
        if origin is tuple:
            return self._convert_tuple(arguments[0], value, key)
        if dataclasses.is_dataclass(kind):
            return self.parse(typing.cast(type, kind), {} if value is None else value, key)
        return self._convert_scalar(kind, value, key)

    def _convert_mapping(self, kind: Any, value: object, key: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error(key, f"a mapping is expected, not {_describe(value)}")
        for name in value:
            if isinstance(name, bool):
                raise self._error(key, f"a name is expected, not {_describe_for_text(name)}")
        return {
            str(name): self._convert(kind, item, _join(key, str(name)))
            for name, item in value.items()
        }

    def _convert_tuple(self, kind: Any, value: object, key: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise self._error(key, f"a list is expected, not {_describe(value)}")
        return tuple(self._convert(kind, item, f"{key}[{i}]") for i, item in enumerate(value))

    def _convert_scalar(self, kind: Any, value: object, key: str) -> Any:
        if kind is Any:
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            given = _describe_for_text(value) if kind is str else _describe(value)
            raise self._error(key, f"{_KINDS[kind]} is expected, not {given}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(key, f"must be a finite number, not {value}")
        return value

    # --- errors -----------------------------------------------------------------------------------

    def _error(self, key: str, problem: str) -> ConfigError:
        where = f"{self._source}: {key}" if key else self._source
        return ConfigError(f"{where}: {problem}", field=key or None)

    def _locate(self, key: str, problem: str, names: Mapping[str, Any]) -> tuple[str, str]:
        """Split a dataclass' ValueError, which names the field first, into the key and the rest."""
        spelt = re.sub(r"\b[a-z]+(_[a-z0-9]+)+\b", lambda word: self._spell(word[0]), problem)
        first, _, rest = spelt.partition(" ")
        if re.split(r"[.\[]", first)[0] in map(self._spell, names):
            return _join(key, first), rest
        return key, spelt


def _field_types(cls: Any) -> dict[str, Any]:
    return {
        name: kind
        for name, kind in typing.get_type_hints(cls).items()
        if name in {field.name for field in dataclasses.fields(cls)}
    }


def choices_of(kind: Any) -> list[str]:
    """List what a Literal or a StrEnum takes; empty for any other type."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [choice.value for choice in kind]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else []


def _needed(cls: Any) -> list[str]:
    """Return the fields that have no default."""
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _plain(value: object, default: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dump(value, base=default if type(default) is type(value) else None)
    if isinstance(value, Mapping):
        return {name: _plain(item, None) for name, item in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item, None) for item in value]
    return value


# --- words --------------------------------------------------------------------------------------


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _describe(value: object) -> str:
    return "nothing" if value is None else f"{value!r}"


def _describe_for_text(value: object) -> str:
    """Describe a value that is not text. YAML reads some unquoted words as true or false."""
    if not isinstance(value, bool):
        return _describe(value)
    name, words = ("true", "yes and on") if value else ("false", "no and off")
    return f"{name}: YAML reads {words} so unless they are quoted"


def _one_of(value: object, choices: list[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5) if type(value) is str else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"must be one of {', '.join(choices)}, not {_describe_for_text(value)}{hint}"
