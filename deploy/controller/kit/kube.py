"""The verbs of an API server, for objects that are plain dicts.

Every call ends within its timeouts, in an answer or in an error of `deploy.controller.kit.errors`.
Nothing is tried again here: whoever calls reconciles levels, and comes back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from deploy.controller.kit.connection import USUAL, Call, Connection, Timeouts
from deploy.controller.kit.errors import GoneError, NotFoundError, WriteRefusedError
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

_PAGE_SIZE = 500
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"


@dataclass(frozen=True)
class Listing:
    """All objects of a selection, as they were at one resourceVersion."""

    items: tuple[Object, ...]
    resource_version: str


class Propagation(StrEnum):
    """What becomes of an object's dependents when it is deleted."""

    BACKGROUND = "Background"
    FOREGROUND = "Foreground"
    ORPHAN = "Orphan"


@dataclass(frozen=True)
class Preconditions:
    """A deletion of anything else is refused with ConflictError."""

    uid: str | None = None
    resource_version: str | None = None


_ANY = Preconditions()


class Kube:
    """One client of one API server. Threads share it."""

    def __init__(
        self, connection: Connection, field_manager: str, timeouts: Timeouts = USUAL
    ) -> None:
        self._connection = connection
        self._field_manager = field_manager
        self._timeouts = timeouts
        self._may_write: Callable[[], bool] = lambda: True

    @property
    def field_manager(self) -> str:
        """Whom the API server names as the writer of what is written here."""
        return self._field_manager

    def check_may_write(self, doing: object) -> None:
        """Raises WriteRefusedError. For what is done elsewhere, too, by who may write alone."""
        if not self._may_write():
            raise WriteRefusedError(f"{doing}: may not write now")

    def within(self, timeouts: Timeouts) -> Kube:
        """The same client with other timeouts."""
        other = copy.copy(self)
        other._timeouts = timeouts
        return other

    def guarded(self, may_write: Callable[[], bool]) -> Kube:
        """The same client, which asks before each write: WriteRefusedError where it may not."""
        other = copy.copy(self)
        other._may_write = may_write
        return other

    def get(self, resource: Resource, key: Key, subresource: str | None = None) -> dict[str, Any]:
        return self._answer(Call("GET", resource.path_of(key, subresource)))

    def version(self) -> tuple[int, int]:
        """The API server's, such as (1, 31)."""
        told = self._answer(Call("GET", "/version"))
        return int(told["major"]), int(re.match(r"\d+", told["minor"])[0])  # type: ignore[index]

    def served_plurals(self, resource: Resource) -> frozenset[str]:
        """All kinds that are served in the resource's group and version; none where it is not."""
        path = resource.path_of_all(None).removesuffix(f"/{resource.plural}")
        try:
            told = self._answer(Call("GET", path))
        except NotFoundError:
            return frozenset()
        return frozenset(each["name"] for each in told["resources"])

    def list(self, resource: Resource, selection: Selection = EVERYTHING) -> Listing:
        """As etcd has it now, never an older state out of a cache. In pages; where they expire on
        the way, once more at a stroke."""
        try:
            return self._list(resource, selection, _PAGE_SIZE)
        except GoneError:
            return self._list(resource, selection, None)

    def create(self, resource: Resource, obj: Object) -> dict[str, Any]:
        """AlreadyExistsError where there is one of that name."""
        path = resource.path_of_all(key_of(obj).namespace or None)
        return self._write(Call("POST", path, self._manager(None), obj))

    def apply(
        self, resource: Resource, obj: Object, *, force: bool, subresource: str | None = None
    ) -> dict[str, Any]:
        """Server-side apply: `obj` names every field that this manager wants, and no other; what
        it named last time and does not name now goes. Makes the object where there is none (unless
        a subresource is applied).

        force: take over fields that another manager owns; ConflictError, whose causes name them,
        where not. A subresource has a field manager of its own (`<manager>-status`): before 1.22
        an API server kept one set of fields for both, so that to apply a status forgot the spec's.
        """
        query = {**self._manager(subresource), "force": "true" if force else "false"}
        path = resource.path_of(key_of(obj), subresource)
        return self._write(Call("PATCH", path, query, obj, _APPLY))

    def merge_patch(
        self, resource: Resource, key: Key, patch: Object, subresource: str | None = None
    ) -> dict[str, Any]:
        """None removes a key, a list replaces a list. A `metadata.resourceVersion` in it makes the
        patch one of that version alone: ConflictError where the object is another by now."""
        path = resource.path_of(key, subresource)
        return self._write(Call("PATCH", path, self._manager(subresource), patch, _MERGE))

    def json_patch(
        self,
        resource: Resource,
        key: Key,
        operations: Sequence[Mapping[str, Any]],
        subresource: str | None = None,
    ) -> dict[str, Any]:
        """InvalidError where a `test` does not hold, nothing is changed then."""
        path = resource.path_of(key, subresource)
        query = self._manager(subresource)
        return self._write(Call("PATCH", path, query, list(operations), _JSON_PATCH))

    def delete(
        self,
        resource: Resource,
        key: Key,
        *,
        propagation: Propagation = Propagation.BACKGROUND,
        preconditions: Preconditions = _ANY,
    ) -> None:
        """Begins the deletion: finalizers may hold the object for long. NotFoundError where there
        is none."""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation.value,
        }
        named = {"uid": preconditions.uid, "resourceVersion": preconditions.resource_version}
        if held := {name: value for name, value in named.items() if value is not None}:
            body["preconditions"] = held
        self._write(Call("DELETE", resource.path_of(key), body=body))

    def watch(
        self,
        resource: Resource,
        selection: Selection,
        resource_version: str,
        window: Window,
    ) -> WatchStream:
        """What happens after `resource_version`. Use it as a context manager."""
        query = {
            **selection.query(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(window.watch_s),
        }
        call = Call("GET", resource.path_of_all(selection.namespace), query)
        timeouts = Timeouts(self._timeouts.connect_s, window.longest_silence_s)
        return WatchStream(self._connection, call, timeouts)

    def _list(self, resource: Resource, selection: Selection, page_size: int | None) -> Listing:
        path = resource.path_of_all(selection.namespace)
        query = selection.query()
        if page_size is not None:
            query["limit"] = str(page_size)
        items: list[Object] = []
        while True:
            page = self._answer(Call("GET", path, query))
            items += _typed_items(page)
            token = page["metadata"].get("continue")
            if not token:
                return Listing(tuple(items), resource_version_of(page))
            query = {**query, "continue": token}

    def _manager(self, subresource: str | None) -> dict[str, str]:
        manager = self._field_manager
        return {"fieldManager": manager if subresource is None else f"{manager}-{subresource}"}

    def _write(self, call: Call) -> dict[str, Any]:
        self.check_may_write(call)
        return self._answer(call)

    def _answer(self, call: Call) -> dict[str, Any]:
        return self._connection.answer(call, self._timeouts)


def _typed_items(page: Mapping[str, Any]) -> list[Object]:
    """A list's items lack what the list says for all of them; a watch's objects have it."""
    kind = page["kind"].removesuffix("List")
    return [
        {"kind": kind, "apiVersion": page["apiVersion"], **item} for item in page["items"] or ()
    ]
