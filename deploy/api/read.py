"""An object from an API server into a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from baton.config import settings
from baton.errors import ConfigError
from deploy.api.checked import Checked
from deploy.api.naming import camel

T = TypeVar("T", bound=Checked)


def read_spec(cls: type[T], custom_object: Mapping[str, Any]) -> T:
    """The spec of a ServingCluster or WorkerPool. Raises ConfigError, which names the field as the
    object spells it."""
    metadata = custom_object["metadata"]
    source = f"{custom_object['kind']} {metadata['namespace']}/{metadata['name']}"
    for rule in cls.object_rules:
        if rule.holds is not None and not rule.holds(custom_object):
            field, _, problem = rule.message.partition(" ")
            raise ConfigError(f"{source}: {field}: {problem}", field=field)
    value = custom_object.get("spec", {})
    return settings.parse(cls, value, source=source, key="spec", spell=camel)
