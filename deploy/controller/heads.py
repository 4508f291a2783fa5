"""The pod of Ray's head where what it was made of keeps it from starting. KubeRay makes a head anew
only when its pod is gone: so one that cannot start, and is not as the spec wants it, is deleted.
One that has run, and is started again where it is, is not: its workers wait for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from deploy.controller.errors import ConflictError, NotFoundError
from deploy.controller.kube import Kube, Preconditions
from deploy.controller.manifests.common import COMPONENT_LABEL
from deploy.controller.manifests.pods import CONFIG_HASH, HEAD_CONTAINER
from deploy.controller.objects import Object, key_of, resource_version_of
from deploy.controller.resources import PODS

log = logging.getLogger(__name__)

_MANY_RESTARTS = 3


def unfit_heads(pods: Iterable[Object], head_hash: str) -> list[Object]:
    """Of a cluster's `pods` the heads that were made of another spec and cannot start. Nothing is
    lost with these: Ray's own state went when the container ended, or is in its Redis.

    One that runs keeps its spec until it ends: the workers are its own."""
    return [
        pod
        for pod in pods
        if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == "head"
        and "deletionTimestamp" not in pod["metadata"]
        and pod["metadata"].get("annotations", {}).get(CONFIG_HASH, head_hash) != head_hash
        and _cannot_start(pod)
    ]


def _cannot_start(pod: Object) -> bool:
    """It has never begun, or ends again and again."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    status = next((each for each in statuses if each["name"] == HEAD_CONTAINER), None)
    if status is None:
        return True
    num_restarts, state = status.get("restartCount", 0), status["state"]
    if num_restarts == 0:
        return "waiting" in state
    return num_restarts >= _MANY_RESTARTS and "running" not in state


def remove_unfit(kube: Kube, pods: Iterable[Object], head_hash: str) -> None:
    """After the RayCluster says what the next one is to be made of. Raises KubeError."""
    for pod in unfit_heads(pods, head_hash):
        log.warning("%s: made of an older spec, and does not run: it is made anew", key_of(pod))
        exactly = Preconditions(pod["metadata"]["uid"], resource_version_of(pod))
        with contextlib.suppress(NotFoundError, ConflictError):  # it has come to run meanwhile
            kube.delete(PODS, key_of(pod), preconditions=exactly)
