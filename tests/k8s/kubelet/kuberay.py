"""A stand-in for KubeRay in one namespace: RayClusters become a Service, a head and groups of pods
(ray-operator 1.6: controllers/ray/raycluster_controller.go, `reconcilePods`).

- A group has as many pods as `replicas` says, within its bounds. A pod that is ending counts until
  it is gone, unless it was deleted from here because there were too many, or is named to go.
- A pod whose Ray has ended for good is deleted, and replaced when it has gone.
- The pods in `scaleStrategy.workersToDelete` go, whatever `replicas` says, for as long as they are
  named. Where there are too many and none is named, those that go are chosen at random.
- A RayCluster whose head has a Redis stays, when it is deleted, until its pods are gone and that is
  emptied: by a Job, whose pod is refused without the head's account. Here nothing is emptied; it
  stays for as long as there is no such account, KubeRay gives up after 5 minutes.
- Every spec that a RayCluster has had is kept, for tests to look at.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.pacing import Backoff
from deploy.controller.kit.connection import Connection
from deploy.controller.kit.errors import AlreadyExistsError, NotFoundError
from deploy.controller.kit.informer import Informer, InformerSettings
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Selection, key_of
from deploy.controller.kit.workqueue import Workers, WorkQueue
from deploy.controller.manifests.common import CLUSTER_LABEL as SERVING_LABEL
from deploy.controller.manifests.resources import PODS, RAY_CLUSTERS, SERVICE_ACCOUNTS, SERVICES
from tests.k8s.kubelet.errors import KubeletError
from tests.k8s.kubelet.hosts import is_ready
from tests.k8s.kubelet.ray_pods import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    HEAD_GROUP,
    head_pod,
    head_service,
    worker_pod,
)

_SYNC_S = 20.0
_END_S = 30.0
_LOOK_AGAIN_S = 0.5
_EMPTIES_REDIS = "ray.io/gcs-ft-redis-cleanup-finalizer"
_QUICKLY = Backoff(first_s=0.1, longest_s=1.0)


@dataclass(frozen=True)
class GroupChange:
    """What one spec of a RayCluster said of a group."""

    replicas: int
    to_delete: tuple[str, ...]

    @classmethod
    def of(cls, group: Object) -> GroupChange:
        return cls(int(group.get("replicas") or 0), _to_delete(group))


class KubeRay:
    """Own the thread that makes pods of RayClusters, and what their specs have been."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._kube = Kube(connection, "kuberay-operator")
        self._rng = random.Random()
        self._deleted_as_too_many: set[str] = set()
        self._specs: dict[str, list[Object]] = {}
        self._owners: dict[str, str] = {}  # RayCluster -> ServingCluster
        self._specs_lock = threading.Lock()
        self._queue: WorkQueue[Key] = WorkQueue(_QUICKLY)
        self._workers = Workers(self._queue, self._reconcile, 1, "kuberay")
        settings = InformerSettings(backoff=_QUICKLY)
        selection = Selection(namespace)
        self._clusters = Informer(self._kube, RAY_CLUSTERS, selection, settings)
        ours = Selection(namespace, CLUSTER_LABEL)
        self._pods = Informer(self._kube, PODS, ours, settings)
        self._clusters.add_handler(self._keep_spec)
        self._clusters.add_handler(self._queue.add)
        self._pods.add_handler(self._queue.add, lambda pod: (_cluster_key(pod),))

    def start(self) -> None:
        """Raises KubeletError; the caller stops it nevertheless."""
        for informer in (self._clusters, self._pods):
            informer.start()
        self._workers.start()
        for informer in (self._clusters, self._pods):
            if not informer.wait_synced(_SYNC_S):
                raise KubeletError("the API server's lists do not come")

    def stop(self) -> None:
        for informer in (self._clusters, self._pods):
            informer.stop()
        self._workers.stop(_END_S)

    def specs(self, cluster: str) -> dict[str, list[Object]]:
        """All that the RayClusters of a ServingCluster have had, by name; the oldest first."""
        with self._specs_lock:
            found = {name: list(specs) for name, specs in self._specs.items()}
        return {name: specs for name, specs in found.items() if self._owners[name] == cluster}

    def _keep_spec(self, key: Key) -> None:
        """On the informer's thread, which shows each state before it goes on to the next."""
        cluster = self._clusters.get(key)
        if cluster is not None:
            with self._specs_lock:
                labels = cluster["metadata"].get("labels") or {}
                self._owners[key.name] = labels.get(SERVING_LABEL, key.name)
                specs = self._specs.setdefault(key.name, [])
                if specs[-1:] != [cluster["spec"]]:
                    specs.append(cluster["spec"])

    # --- reconciling ----------------------------------------------------------------------------

    def _reconcile(self, key: Key) -> float | None:
        cluster = self._clusters.get(key)
        if cluster is None:
            return None  # the garbage collector deletes what it owned
        if "deletionTimestamp" in cluster["metadata"]:
            return self._end(cluster)
        if "gcsFaultToleranceOptions" in cluster["spec"]:
            self._hold(cluster, [_EMPTIES_REDIS])
        with contextlib.suppress(AlreadyExistsError):
            self._kube.create(SERVICES, head_service(cluster))
        pods = self._pods_of(key)
        if over := [pod for pod in pods if _is_over(pod)]:
            for pod in over:
                self._delete(key_of(pod))
            return _LOOK_AGAIN_S  # others are made when they have gone
        if not any(_group_of(pod) == HEAD_GROUP for pod in pods):
            self._kube.create(PODS, head_pod(cluster))
        for group in cluster["spec"].get("workerGroupSpecs") or ():
            self._size(cluster, group, [p for p in pods if _group_of(p) == group["groupName"]])
        self._report(cluster, self._pods_of(key))
        return None

    def _end(self, cluster: Object) -> float | None:
        """KubeRay ignores one that waits for this finalizer and has no Redis any more."""
        holds = _EMPTIES_REDIS in cluster["metadata"].get("finalizers", ())
        if not holds or "gcsFaultToleranceOptions" not in cluster["spec"]:
            return None
        pods = self._pods_of(key_of(cluster))
        for pod in pods:
            self._delete(key_of(pod))
        if pods or not self._has_account(cluster):
            return _LOOK_AGAIN_S
        self._hold(cluster, [])
        return None

    def _hold(self, cluster: Object, finalizers: list[str]) -> None:
        if cluster["metadata"].get("finalizers", []) != finalizers:
            patch = {"metadata": {"finalizers": finalizers}}
            with contextlib.suppress(NotFoundError):
                self._kube.merge_patch(RAY_CLUSTERS, key_of(cluster), patch)

    def _has_account(self, cluster: Object) -> bool:
        """The head's."""
        head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        name = head.get("serviceAccountName", "default")
        try:
            self._kube.get(SERVICE_ACCOUNTS, Key(cluster["metadata"]["namespace"], name))
        except NotFoundError:
            return False
        return True

    def _size(self, cluster: Object, group: Mapping[str, Any], pods: list[Object]) -> None:
        """Bring a group to its size."""
        going = set(_to_delete(group)) | self._deleted_as_too_many
        for name in _to_delete(group):
            self._delete(Key(cluster["metadata"]["namespace"], name))
        stay = [pod for pod in pods if pod["metadata"]["name"] not in going]
        diff = _replicas(group) - len(stay)
        for _ in range(diff):
            self._kube.create(PODS, worker_pod(cluster, group))
        for pod in self._rng.sample(stay, max(0, -diff)):
            self._deleted_as_too_many.add(pod["metadata"]["name"])
            self._delete(key_of(pod))

    def _pods_of(self, key: Key) -> list[Object]:
        """As the API server has them now: what was made a moment ago is not yet in a cache."""
        selection = Selection(key.namespace, f"{CLUSTER_LABEL}={key.name}")
        return list(self._kube.list(PODS, selection).items)

    def _delete(self, key: Key) -> None:
        with contextlib.suppress(NotFoundError):
            self._kube.delete(PODS, key)

    def _report(self, cluster: Object, pods: list[Object]) -> None:
        """The status, where it is another one now."""
        status = _status(cluster, pods)
        former = cluster.get("status") or {}
        if any(former.get(name) != value for name, value in status.items()):
            patch = {"status": status}
            with contextlib.suppress(NotFoundError):
                self._kube.merge_patch(RAY_CLUSTERS, key_of(cluster), patch, "status")


def _status(cluster: Object, pods: list[Object]) -> dict[str, Any]:
    desired = sum(map(_replicas, cluster["spec"].get("workerGroupSpecs") or ()))
    workers = [pod for pod in pods if _group_of(pod) != HEAD_GROUP]
    status: dict[str, Any] = {
        "observedGeneration": cluster["metadata"]["generation"],
        "desiredWorkerReplicas": desired,
        "availableWorkerReplicas": sum(map(_runs, workers)),
    }
    if len(pods) == desired + 1 and all(map(is_ready, pods)):
        status["state"] = "ready"  # and so it stays, also when a pod goes later
    return status


def _replicas(group: Mapping[str, Any]) -> int:
    """Pods, within the group's bounds."""
    least, most = int(group.get("minReplicas") or 0), int(group.get("maxReplicas") or 2**31)
    return min(max(int(group.get("replicas") or 0), least), most)


def _to_delete(group: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple((group.get("scaleStrategy") or {}).get("workersToDelete") or ())


def _group_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"][GROUP_LABEL])


def _cluster_key(pod: Object) -> Key:
    return Key(pod["metadata"]["namespace"], pod["metadata"]["labels"][CLUSTER_LABEL])


def _is_over(pod: Object) -> bool:
    """Its Ray has ended and is not started again in it."""
    if pod["spec"].get("restartPolicy", "Always") == "Always":
        return False
    status = pod.get("status") or {}
    ray = pod["spec"]["containers"][0]["name"]
    states = {each["name"]: each["state"] for each in status.get("containerStatuses") or ()}
    return status.get("phase") in ("Succeeded", "Failed") or "terminated" in states.get(ray, {})


def _runs(pod: Object) -> bool:
    return bool((pod.get("status") or {}).get("phase") == "Running")


@contextlib.contextmanager
def running_kuberay(connection: Connection, namespace: str) -> Iterator[KubeRay]:
    """It makes and deletes nothing after the block."""
    kuberay = KubeRay(connection, namespace)
    try:
        kuberay.start()
        yield kuberay
    finally:
        kuberay.stop()
