"""How a field is spelt: snake_case in Python and in cluster.yaml, camelCase in Kubernetes."""

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


def camel(name: str) -> str:
    """max_num_seqs -> maxNumSeqs."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def snake(name: str) -> str:
    """maxNumSeqs -> max_num_seqs."""
    return re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), name)


def snake_keys(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of settings, with those inside it, as cluster.yaml spells it."""
    return {
        snake(name): snake_keys(item) if isinstance(item, Mapping) else item
        for name, item in value.items()
    }
