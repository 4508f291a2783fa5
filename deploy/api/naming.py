"""How a field is spelt: snake_case in Python and in cluster.yaml, camelCase in Kubernetes, where
times end with Seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GROUP = "baton.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = f"{_LABEL}([.]{_LABEL})*"
OBJECT_NAME = f"^{_SUBDOMAIN}$"
"""Of a Secret, a claim, and most else: a DNS subdomain."""
HOSTNAME = f"^([*][.])?{_SUBDOMAIN}$"
"""`*.` stands for one label."""
NAMESPACED_NAME = f"^({_LABEL}/)?{_SUBDOMAIN}$"
LABEL_KEY = rf"^({_SUBDOMAIN}/)?[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?$"


_IN_ADVANCED = ("router", "transfer", "worker", "decode", "registry", "supervisor")
_SETTING = re.compile(rf"(?<![\w.])(engine|{'|'.join(_IN_ADVANCED)})((?:\.[a-z_]+)+)")


def camel(name: str) -> str:
    """max_num_seqs -> maxNumSeqs, max_queue_s -> maxQueueSeconds, retry_per_s -> retryPerSecond."""
    first, *rest = re.sub("(?<=_)s$", "seconds", name.replace("_per_s", "_per_second")).split("_")
    return first + "".join(word.capitalize() for word in rest)


def snake(name: str) -> str:
    """maxNumSeqs -> max_num_seqs."""
    short = re.sub("Seconds?$", "S", name)
    return re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), short)


def as_written(problem: str) -> str:
    """What one of our processes says of a setting, by its path in a ServingCluster."""

    def path(match: re.Match[str]) -> str:
        section = f"advanced.{match[1]}" if match[1] in _IN_ADVANCED else match[1]
        return f"spec.{section}" + ".".join(map(camel, match[2].split(".")))

    return _SETTING.sub(path, problem)


def snake_keys(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of settings, with those inside it, as cluster.yaml spells it."""
    return {
        snake(name): snake_keys(item) if isinstance(item, Mapping) else item
        for name, item in value.items()
    }


def camel_keys(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same as Kubernetes spells it."""
    return {
        camel(name): camel_keys(item) if isinstance(item, Mapping) else item
        for name, item in value.items()
    }
