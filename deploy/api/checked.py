"""Dataclasses whose values are checked alike in Python and at an API server: a field's bounds, and
rules that cross fields, each once as CEL and once as its Python twin.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from baton.config import settings
from baton.errors import ConfigError
from deploy.api.naming import camel

_KEY = "bounds"
FREE: Mapping[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@dataclass(frozen=True)
class Foreign:
    """A type of Kubernetes: its schema here, and what checks a field's value."""

    schema: Mapping[str, Any]
    check: Callable[[Any, str], None]


@dataclass(frozen=True)
class Bounds:
    """None: not bounded. `max_size` counts characters, list items or a mapping's keys. The API
    server refuses a CEL rule over values without one: it cannot bound its cost."""

    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    max_size: int | None = None
    partial_of: type | None = None
    """A mapping of some of this dataclass's fields."""
    foreign: Foreign | None = None
    """Kubernetes' own."""
    is_free: bool = False
    """The API server takes anything; the dataclass checks it."""


def bounded(default: Any = dataclasses.MISSING, **bounds: Any) -> Any:
    """A dataclass field with bounds; one without a default is required."""
    kinds = {"default_factory": default} if callable(default) else {"default": default}
    if default is dataclasses.MISSING:
        kinds = {}
    return dataclasses.field(metadata={_KEY: Bounds(**bounds)}, **kinds)


def bounds_of(field: dataclasses.Field[Any]) -> Bounds:
    found: Bounds = field.metadata.get(_KEY, Bounds())
    return found


@dataclass(frozen=True)
class Rule:
    """A check that crosses fields; `message` begins with the field that it names."""

    cel: str
    """With `self` for the object; `oldSelf` makes it a rule on changes."""
    message: str
    holds: Callable[[Any], bool] | None = None
    """The same for the dataclass; None: a rule on changes."""
    keeps: str | None = None
    """For a rule on changes: the field whose value stays (see `broken_by`)."""

    def validation(self) -> dict[str, str]:
        """An entry of `x-kubernetes-validations`."""
        return {"rule": self.cel, "message": self.message}


@dataclass(frozen=True)
class Checked:
    """Raises ValueError, the field's name first, for a value out of bounds or a broken rule."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    object_rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules of a spec's class on the whole object. The API server shows only `metadata.name`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), bounds_of(field)
            if value is not None and (problem := _problem(value, bounds)):
                raise ValueError(f"{field.name} {problem}")
            if bounds.foreign is not None:
                bounds.foreign.check(value, camel(field.name))
        for rule in self.rules:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)


T = TypeVar("T", bound=Checked)


def read_spec(cls: type[T], custom_object: Mapping[str, Any]) -> T:
    """The spec of a ServingCluster or WorkerPool from an API server. Raises ConfigError, which
    names the field as the object spells it."""
    metadata = custom_object["metadata"]
    source = f"{custom_object['kind']} {metadata['namespace']}/{metadata['name']}"
    for rule in cls.object_rules:
        if rule.holds is not None and not rule.holds(custom_object):
            field, _, problem = rule.message.partition(" ")
            raise ConfigError(f"{source}: {field}: {problem}", field=field)
    value = custom_object.get("spec", {})
    return settings.parse(cls, value, source=source, key="spec", spell=camel)


def broken_by(
    cls: type[Checked], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[Rule]:
    """Rules on changes that a change from `before` to `after` breaks, both spelt as in
    Kubernetes."""
    names = {rule: camel(rule.keeps) for rule in cls.rules if rule.keeps is not None}
    return [rule for rule, name in names.items() if before.get(name) != after.get(name)]


def _problem(value: Any, bounds: Bounds) -> str | None:
    if bounds.minimum is not None and value < bounds.minimum:
        return f"must be at least {bounds.minimum:g}, not {value:g}"
    if bounds.maximum is not None and value > bounds.maximum:
        return f"must be at most {bounds.maximum:g}, not {value:g}"
    if bounds.pattern is not None and not re.search(bounds.pattern, value, re.ASCII):
        return f"must match {bounds.pattern}, not {value!r}"
    if bounds.max_size is not None and len(value) > bounds.max_size:
        return f"must not be longer than {bounds.max_size}, not {len(value)}"
    return None
