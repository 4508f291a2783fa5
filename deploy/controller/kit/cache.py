"""What is known of a selection of objects. The informer writes, others read."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from deploy.controller.kit.kube import Listing
from deploy.controller.kit.objects import Key, Object, key_of, resource_version_of
from deploy.controller.kit.watch_stream import WatchEvent, WatchEventType


class FrozenDict(dict[str, Any]):
    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a shared object must not be changed: copy.deepcopy it first")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


class FrozenList(list[Any]):
    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a shared list must not be changed: copy.deepcopy it first")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(item, memo) for item in self]


def frozen(value: Any) -> Any:
    """The same JSON value, all through unchangeable; a copy."""
    if isinstance(value, dict):
        return FrozenDict((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return FrozenList(frozen(item) for item in value)
    return value


@dataclass(frozen=True)
class Change:
    """None: there was, or is, no such object."""

    before: Object | None
    after: Object | None

    def states(self) -> Iterator[Object]:
        return (state for state in (self.before, self.after) if state is not None)


class Cache:
    """Own the newest known state of each object, frozen; `metadata.managedFields` is left out,
    which is half of an object and tells nothing to who reconciles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[Key, Object] = {}

    def get(self, key: Key) -> Object | None:
        with self._lock:
            return self._objects.get(key)

    def snapshot(self) -> Mapping[Key, Object]:
        """All objects at one moment; what happens later does not show in it."""
        with self._lock:
            return MappingProxyType(dict(self._objects))

    def replace(self, listing: Listing) -> list[Change]:
        """Whatever the list lacks is gone. What it has as it was here is no change."""
        objects = {key_of(item): _kept(item) for item in listing.items}
        with self._lock:
            before, self._objects = self._objects, objects
        changes = [Change(before.get(key), obj) for key, obj in objects.items()]
        gone = [Change(obj, None) for key, obj in before.items() if key not in objects]
        return gone + [change for change in changes if _is_change(change)]

    def follow(self, event: WatchEvent) -> Change | None:
        """Take in a watch's event; None where nothing has changed."""
        assert event.type is not WatchEventType.BOOKMARK
        key = key_of(event.object)
        after = None if event.type is WatchEventType.DELETED else _kept(event.object)
        with self._lock:
            before = self._objects.pop(key, None)
            if after is not None:
                self._objects[key] = after
        change = Change(before, after)
        return change if _is_change(change) else None


def _is_change(change: Change) -> bool:
    if change.before is None or change.after is None:
        return change.before is not change.after
    return resource_version_of(change.before) != resource_version_of(change.after)


def _kept(obj: Object) -> Object:
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    kept: Object = frozen({**obj, "metadata": metadata})
    return kept
