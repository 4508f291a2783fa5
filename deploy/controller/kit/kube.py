"""The verbs of an API server, for objects that are plain dicts, and which kinds it serves.

Every call ends within its timeouts, in an answer or in an error of `deploy.controller.kit.errors`.
Nothing is tried again here: callers reconcile levels, and come back.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.controller.kit.connection import USUAL, Call, Connection, Timeouts
from deploy.controller.kit.errors import NotFoundError, WriteRefusedError
from deploy.controller.kit.objects import (
    EVERYTHING,
    Key,
    Object,
    Resource,
    Selection,
    key_of,
    resource_version_of,
)
from deploy.controller.kit.watch_stream import WatchStream, Window

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_FRESH_S = 60.0
"""A kind that is installed later is noticed within this time."""


@dataclass(frozen=True)
class Listing:
    """All objects of a selection, as they were at one resourceVersion."""

    items: tuple[Object, ...]
    resource_version: str


class Kube:
    """One client of one API server. Threads share it."""

    def __init__(
        self, connection: Connection, field_manager: str, timeouts: Timeouts = USUAL
    ) -> None:
        """`field_manager`: the API server names it as the writer of what is written here."""
        self._connection = connection
        self.field_manager = field_manager
        self._timeouts = timeouts
        self._may_write: Callable[[], bool] = lambda: True

    def check_may_write(self, doing: object) -> None:
        """Raise WriteRefusedError where this client may not write. Also asked before orders that
        only a writer may give to others."""
        if not self._may_write():
            raise WriteRefusedError(f"{doing}: may not write now")

    def within(self, timeouts: Timeouts) -> Kube:
        """Make the same client with other timeouts."""
        other = copy.copy(self)
        other._timeouts = timeouts
        return other

    def guarded(self, may_write: Callable[[], bool]) -> Kube:
        """Make the same client, which asks before each write and raises WriteRefusedError."""
        other = copy.copy(self)
        other._may_write = may_write
        return other

    def get(self, resource: Resource, key: Key, subresource: str | None = None) -> dict[str, Any]:
        return self._answer(Call("GET", resource.path_of(key, subresource)))

    def version(self) -> tuple[int, int]:
        """Return the API server's version, such as (1, 31)."""
        answer = self._answer(Call("GET", "/version"))
        minor = re.match(r"\d+", answer["minor"])
        assert minor is not None, answer
        return int(answer["major"]), int(minor[0])

    def served_plurals(self, resource: Resource) -> frozenset[str]:
        """Return the kinds that are served in the resource's group and version, by their plurals;
        none where it is not served."""
        path = resource.path_of_all(None).removesuffix(f"/{resource.plural}")
        try:
            answer = self._answer(Call("GET", path))
        except NotFoundError:
            return frozenset()
        return frozenset(each["name"] for each in answer["resources"])

    def list(self, resource: Resource, selection: Selection = EVERYTHING) -> Listing:
        """List objects as etcd has them now, never as an older state out of a cache."""
        path = resource.path_of_all(selection.namespace)
        answer = self._answer(Call("GET", path, selection.query()))
        return Listing(tuple(_typed_items(answer)), resource_version_of(answer))

    def create(self, resource: Resource, obj: Object) -> dict[str, Any]:
        """Create an object. Raises AlreadyExistsError where there is one of that name."""
        path = resource.path_of_all(key_of(obj).namespace or None)
        return self._write(Call("POST", path, self._manager(None), obj))

    def apply(self, resource: Resource, obj: Object, *, force: bool) -> dict[str, Any]:
        """Server-side apply: `obj` names every field that this manager wants, and no other. What
        it named last time and does not name now goes. Makes the object where there is none.

        force: take over fields that another manager owns; ConflictError where not.
        """
        query = {**self._manager(None), "force": "true" if force else "false"}
        return self._write(Call("PATCH", resource.path_of(key_of(obj)), query, obj, _APPLY))

    def merge_patch(
        self, resource: Resource, key: Key, patch: Object, subresource: str | None = None
    ) -> dict[str, Any]:
        """Merge a patch: None removes a key, a list replaces a list. A `metadata.resourceVersion`
        in it makes it a patch of that version alone: ConflictError where the object is another by
        now.

        A subresource has a field manager of its own, `<manager>-status`."""
        path = resource.path_of(key, subresource)
        return self._write(Call("PATCH", path, self._manager(subresource), patch, _MERGE))

    def delete(self, resource: Resource, key: Key, *, uid: str | None = None) -> None:
        """Begin the deletion: finalizers may hold the object for long, and its dependents follow.
        NotFoundError where there is none, ConflictError where its uid is another."""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        self._write(Call("DELETE", resource.path_of(key), body=body))

    def watch(
        self, resource: Resource, selection: Selection, resource_version: str, window: Window
    ) -> WatchStream:
        """Watch what happens after `resource_version`. Use it as a context manager."""
        query = {
            **selection.query(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(window.watch_s),
        }
        call = Call("GET", resource.path_of_all(selection.namespace), query)
        timeouts = Timeouts(self._timeouts.connect_s, window.watch_s + window.grace_s)
        return WatchStream(self._connection, call, timeouts)

    def _manager(self, subresource: str | None) -> dict[str, str]:
        manager = self.field_manager
        return {"fieldManager": manager if subresource is None else f"{manager}-{subresource}"}

    def _write(self, call: Call) -> dict[str, Any]:
        self.check_may_write(call)
        return self._answer(call)

    def _answer(self, call: Call) -> dict[str, Any]:
        return self._connection.answer(call, self._timeouts)


def _typed_items(listed: Mapping[str, Any]) -> list[Object]:
    """Give each item of a list the kind and version that the list names once for all."""
    named = {"kind": listed["kind"].removesuffix("List"), "apiVersion": listed["apiVersion"]}
    return [named | item for item in listed["items"] or ()]


class Discovery:
    """Own what is known of one API server: its version, and which kinds it serves. Not every one
    has what others install, or what came later. Threads share it."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._served: dict[str, tuple[frozenset[str], float]] = {}
        self._version: tuple[int, int] | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Return the API server's version when it was asked first, such as (1, 31). Raises
        KubeError."""
        if self._version is None:
            self._version = self._kube.version()
        return self._version

    def serves(self, resource: Resource) -> bool:
        """Tell whether the API server serves a kind, as of the last minute. Raises KubeError."""
        name, now = resource.api_version, self._clock()
        if name not in self._served or now >= self._served[name][1] + _FRESH_S:
            self._served[name] = self._kube.served_plurals(resource), now
        return resource.plural in self._served[name][0]
