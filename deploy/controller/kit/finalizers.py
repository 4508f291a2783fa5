"""The finalizer that keeps an object of ours until its workers have drained."""

from __future__ import annotations

import contextlib

from deploy.api.naming import GROUP
from deploy.controller.kit.errors import ConflictError, NotFoundError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Object, Resource, key_of

FINALIZER = f"{GROUP}/drain"


def keep_finalizer(kube: Kube, resource: Resource, obj: Object) -> None:
    """Put our finalizer on an object that is not being deleted."""
    metadata = obj["metadata"]
    if "deletionTimestamp" not in metadata and FINALIZER not in metadata.get("finalizers", ()):
        _patch(kube, resource, obj, [*metadata.get("finalizers", ()), FINALIZER])


def drop_finalizer(kube: Kube, resource: Resource, obj: Object) -> None:
    """Take our finalizer off an object. One that has changed meanwhile is left to the next look."""
    finalizers = obj["metadata"].get("finalizers", ())
    if FINALIZER in finalizers:
        left = [name for name in finalizers if name != FINALIZER]
        with contextlib.suppress(NotFoundError, ConflictError):
            _patch(kube, resource, obj, left)


def _patch(kube: Kube, resource: Resource, obj: Object, finalizers: list[str]) -> None:
    """Write the finalizers if the object is still of this version: others have some, too."""
    version = obj["metadata"]["resourceVersion"]
    patch = {"metadata": {"finalizers": finalizers, "resourceVersion": version}}
    kube.merge_patch(resource, key_of(obj), patch)
