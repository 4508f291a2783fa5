"""Dataclasses whose values are checked alike in Python and at an API server: their fields' bounds
(`baton.config.ranges`), and rules that cross fields, each once as CEL and once as its Python twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from baton.config import settings
from baton.config.ranges import Ranged, annotations_of
from baton.errors import ConfigError
from deploy.api.naming import camel

FREE: Mapping[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@dataclass(frozen=True)
class Foreign:
    """Annotates a field of a type of Kubernetes: its schema here, and what checks a value."""

    schema: Mapping[str, Any]
    check: Callable[[Any, str], None] = lambda value, field: None


@dataclass(frozen=True)
class PartialOf:
    """Annotates a mapping that holds some of a dataclass's fields."""

    cls: type


AS_WRITTEN = Foreign(FREE)
"""Beside a section that an API server stores as it is written: the dataclass checks it."""


@dataclass(frozen=True)
class Rule:
    """A check that crosses fields; `message` begins with the field that it names."""

    cel: str
    """The rule in CEL, with `self` for the object; `oldSelf` makes it a rule on changes."""
    message: str
    holds: Callable[[Any], bool] | None = None
    """The rule in Python; None for a rule on changes."""

    def validation(self) -> dict[str, str]:
        """Return the rule's entry of `x-kubernetes-validations`."""
        return {"rule": self.cel, "message": self.message}


@dataclass(frozen=True)
class Checked(Ranged):
    """Settings that raise ValueError, the field's name first, for a value out of bounds or a broken
    rule."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    object_rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules of a spec's class on the whole object, of which the API server shows `metadata.name`
    alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beside in annotations_of(type(self)).items():  # type: ignore[arg-type]
            for foreign in beside:
                if isinstance(foreign, Foreign):
                    foreign.check(getattr(self, name), camel(name))
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
