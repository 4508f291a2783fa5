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
    """The bounds of a value; None: not bounded. `max_size` counts characters, list items or a
    mapping's keys. The API server refuses a CEL rule over values without one: it cannot bound its
    cost."""

    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    max_size: int | None = None
    partial_of: type | None = None
    """The dataclass of which the value is a mapping of some fields."""
    foreign: Foreign | None = None
    """The type of Kubernetes that the value is."""
    is_free: bool = False
    """The API server takes anything; the dataclass checks it."""


def bounded(default: Any = dataclasses.MISSING, **bounds: Any) -> Any:
    """Make a dataclass field with bounds. One without a default is required."""
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
    """The rule in CEL, with `self` for the object; `oldSelf` makes it a rule on changes."""
    message: str
    holds: Callable[[Any], bool] | None = None
    """The rule in Python; None for a rule on changes."""
    keeps: str | None = None
    """The field whose value a rule on changes keeps (see `broken_by`)."""

    def validation(self) -> dict[str, str]:
        """Return the rule's entry of `x-kubernetes-validations`."""
        return {"rule": self.cel, "message": self.message}


@dataclass(frozen=True)
class Checked:
    """A dataclass that is checked when it is made. A value out of bounds or a broken rule raises
    ValueError, with the field's name first."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    object_rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules of a spec's class on the whole object, of which the API server shows `metadata.name`
    alone."""

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
    """Read the spec of a ServingCluster or WorkerPool from an API server. Raises ConfigError, which
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
    """List the rules on changes that a change from `before` to `after` breaks, both spelt as in
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
