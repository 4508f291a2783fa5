"""What the operator writes, without what would change nothing.

An apply is left out where the same was applied last and nobody has touched the object since. The
cache shows that for kinds that are followed. Others are applied again after `_TRUST_S`: so an edit
is put back within that time, and the operator need not be allowed to read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.controller.kit.errors import AlreadyExistsError, NotFoundError
from deploy.controller.kit.informer import Informer
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Resource, is_owned, key_of

_TRUST_S = 30.0


@dataclass(frozen=True)
class _Last:
    """An object's last apply; `answer`: the object as it was then, None where it was removed."""

    wanted: str
    answer: Object | None
    at_s: float


class Applied:
    """Own what was applied last of each cluster's objects. One thread at a time uses one
    cluster's."""

    def __init__(
        self,
        kube: Kube,
        followed: Mapping[Resource, Informer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._followed, self._clock = kube, followed, clock
        self._last: dict[Key, dict[tuple[Resource, Key], _Last]] = {}

    def apply(self, cluster: Key, resource: Resource, obj: Object) -> Object:
        """Apply an object, and return it as it is then, as far as is known. Raises KubeError."""
        wanted = hashlib.sha256(json.dumps(obj, sort_keys=True).encode()).hexdigest()
        known = self._known(cluster, resource, key_of(obj))
        if known is not None and known.wanted == wanted:
            as_it_is = self._untouched(resource, known)
            if as_it_is is not None:
                return as_it_is
        answer = self._kube.apply(resource, obj, force=True)
        self._note(cluster, resource, key_of(obj), wanted, answer)
        return answer

    def make(self, cluster: Key, resource: Resource, obj: Object) -> None:
        """Create it unless one of that name exists, whatever it holds; raises KubeError."""
        key = key_of(obj)
        known = self._known(cluster, resource, key)
        if known is not None and self._is_trusted(known):
            return
        with contextlib.suppress(AlreadyExistsError):
            self._kube.create(resource, obj)
        self._note(cluster, resource, key, "", obj)

    def remove(self, cluster: Key, resource: Resource, key: Key, owner_uid: str) -> None:
        """Delete it unless it is another owner's; raises KubeError."""
        known = self._known(cluster, resource, key)
        if known is not None and known.answer is None:
            return
        with contextlib.suppress(NotFoundError):
            found = self._kube.get(resource, key)
            if is_owned(found, owner_uid):
                self._kube.delete(resource, key, uid=found["metadata"]["uid"])
        self._note(cluster, resource, key, "", None)

    def forget(self, cluster: Key) -> None:
        self._last.pop(cluster, None)

    def _known(self, cluster: Key, resource: Resource, key: Key) -> _Last | None:
        return self._last.get(cluster, {}).get((resource, key))

    def _note(
        self, cluster: Key, resource: Resource, key: Key, wanted: str, answer: Object | None
    ) -> None:
        last = _Last(wanted, answer, self._clock())
        self._last.setdefault(cluster, {})[resource, key] = last

    def _untouched(self, resource: Resource, known: _Last) -> Object | None:
        """Return the object as it is now; None where it has changed since, or nobody knows."""
        assert known.answer is not None
        informer = self._followed.get(resource)
        if informer is None:
            return known.answer if self._is_trusted(known) else None
        seen = informer.get(key_of(known.answer))
        if seen is None or _of_writers(seen) != _of_writers(known.answer):
            return None
        return seen

    def _is_trusted(self, known: _Last) -> bool:
        return self._clock() < known.at_s + _TRUST_S


def _of_writers(obj: Object) -> Object:
    """Return an object without what changes by itself: status, versions, field managers."""
    changing = ("resourceVersion", "managedFields")
    metadata = {name: value for name, value in obj["metadata"].items() if name not in changing}
    return {name: value for name, value in obj.items() if name != "status"} | {"metadata": metadata}
