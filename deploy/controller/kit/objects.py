"""Kubernetes objects as values: what names a kind, an object, a selection of objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

Object = Mapping[str, Any]
"""An object as the API's JSON has it. Readers do not change it."""


@dataclass(frozen=True, order=True)
class Key:
    """An object of a known kind. As the API writes it, the namespace of a kind that has none is
    the empty string."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True)
class Resource:
    """A kind, as the API's paths name it; `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path_of_all(self, namespace: str | None) -> str:
        """Return the path of all objects in a namespace, or everywhere."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            assert self.namespaced, f"{self} has no namespaces"
            parts += ["namespaces", _escaped(namespace)]
        return "/" + "/".join([*parts, self.plural])

    def path_of(self, key: Key, subresource: str | None = None) -> str:
        assert bool(key.namespace) == self.namespaced, f"{self} {key}"
        path = self.path_of_all(key.namespace or None) + "/" + _escaped(key.name)
        return path if subresource is None else f"{path}/{subresource}"


def _escaped(name: str) -> str:
    """Escape a name from a user's object, which must not lead to another path."""
    assert name not in ("", ".", ".."), repr(name)
    return quote(name, safe="")


@dataclass(frozen=True)
class Selection:
    """Which objects of a kind; by default all of them, everywhere."""

    namespace: str | None = None
    labels: str = ""
    """A label selector, such as `app=x,tier in (a,b)`."""
    fields: str = ""
    """A field selector; a custom resource has `metadata.name` and `metadata.namespace` only."""

    def query(self) -> dict[str, str]:
        pairs = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: value for name, value in pairs.items() if value}


EVERYTHING = Selection()


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return Key(metadata.get("namespace") or "", metadata["name"])


def resource_version_of(obj: Object) -> str:
    """Return the version of an object or a list, which is opaque: equal to another, or not."""
    version: str = obj["metadata"]["resourceVersion"]
    return version


def is_owned(obj: Object, owner_uid: str) -> bool:
    """Tell whether an object is deleted with that owner."""
    return any(each["uid"] == owner_uid for each in obj["metadata"].get("ownerReferences", ()))
