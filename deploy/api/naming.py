"""How a field is spelt: snake_case in Python and in cluster.yaml, camelCase in Kubernetes, where
times end with Seconds."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from baton.config.cluster import ClusterConfig
from baton.config.ranges import sized

GROUP = "baton.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = f"{_LABEL}([.]{_LABEL})*"
OBJECT_NAME = f"^{_SUBDOMAIN}$"
ObjectName = Annotated[str, sized(253, OBJECT_NAME)]
"""The name of a Secret, a claim and most other objects: a DNS subdomain."""
Hostname = Annotated[str, sized(253, f"^([*][.])?{_SUBDOMAIN}$")]
"""A name of a host; `*.` stands for one label."""
NAMESPACED_NAME = f"^({_LABEL}/)?{_SUBDOMAIN}$"
LABEL_KEY = rf"^({_SUBDOMAIN}/)?[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?$"


_KINDS = {
    name: kind
    for name, kind in typing.get_type_hints(ClusterConfig).items()
    if dataclasses.is_dataclass(kind)
}
_SETTING = re.compile(rf"(?<![\w.])({'|'.join(_KINDS)})((?:\.[a-z_]+)+)")


def camel(name: str) -> str:
    """Spell a name as Kubernetes does: max_num_seqs -> maxNumSeqs, max_queue_s -> maxQueueSeconds,
    refill_per_s -> refillPerSecond, internal_tls -> internalTLS."""
    first, *rest = re.sub("(?<=_)s$", "seconds", name.replace("_per_s", "_per_second")).split("_")
    return first + "".join("TLS" if word == "tls" else word.capitalize() for word in rest)


def snake(name: str) -> str:
    """Spell a name as Python does: maxNumSeqs -> max_num_seqs."""
    short = re.sub("Seconds?$", "S", name)
    return re.sub(r"TLS|[A-Z]", lambda match: "_" + match[0].lower(), short)


def as_written(problem: str) -> str:
    """Word a message of our processes with a setting's path in a ServingCluster."""

    def path(match: re.Match[str]) -> str:
        section, *names = match[0].split(".")
        kind: Any = _KINDS[section]
        for name in names:
            fields = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
            if name not in fields:
                return match[0]
            kind = fields[name]
        way = ".".join([section, *map(camel, names)])
        return f"spec.{'' if section == 'engine' else 'advanced.'}{way}"

    return _SETTING.sub(path, problem)


def respelt(value: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, Any]:
    """Spell the keys of settings, and of those inside them: by `camel` as Kubernetes does, by
    `snake` as cluster.yaml does."""
    return {
        spell(name): respelt(item, spell) if isinstance(item, Mapping) else item
        for name, item in value.items()
    }
