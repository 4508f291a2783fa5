"""The finalizer that keeps an object of ours until its workers have drained."""

from __future__ import annotations

import contextlib

from deploy.api.naming import GROUP
from deploy.controller.kit.errors import ConflictError, NotFoundError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Object, Resource, key_of

FINALIZER = f"{GROUP}/drain"


def keep_finalizer(kube: Kube, resource: Resource, obj: Object) -> None:
    metadata = obj["metadata"]
    if "deletionTimestamp" not in metadata and FINALIZER not in metadata.get("finalizers", ()):
        _patch(kube, resource, obj, [*metadata.get("finalizers", ()), FINALIZER])


def drop_finalizer(kube: Kube, resource: Resource, obj: Object, finalizer: str = FINALIZER) -> None:
    """Unless the object has changed meanwhile: then the next look tries again."""
    finalizers = obj["metadata"].get("finalizers", ())
    if finalizer in finalizers:
        left = [name for name in finalizers if name != finalizer]
        with contextlib.suppress(NotFoundError, ConflictError):
            _patch(kube, resource, obj, left)


def _patch(kube: Kube, resource: Resource, obj: Object, finalizers: list[str]) -> None:
    """Only if the version is still this: others have finalizers here, too."""
    version = obj["metadata"]["resourceVersion"]
    patch = {"metadata": {"finalizers": finalizers, "resourceVersion": version}}
    kube.merge_patch(resource, key_of(obj), patch)
