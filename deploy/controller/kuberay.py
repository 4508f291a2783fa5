"""What makes pods: KubeRay, told by one RayCluster for each ServingCluster. All that the reconciler
asks of whatever makes them stands here; a second one would answer to the same calls.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping

from deploy.controller.applied import Applied
from deploy.controller.caches import Caches
from deploy.controller.errors import NotFoundError, UnreachableError
from deploy.controller.finalizers import Finalizers
from deploy.controller.heads import remove_unfit
from deploy.controller.kube import Kube, Preconditions
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import ray_cluster, revision_in, sized, worker_group
from deploy.controller.manifests.shared import pods_account, ray_token
from deploy.controller.objects import Key, Object, is_owned, key_of
from deploy.controller.resources import RAY_CLUSTERS, SECRETS, SERVICE_ACCOUNTS
from deploy.controller.rolling import PoolRolling, group_size_of
from deploy.controller.view import ClusterView, PoolView

_EMPTIES_REDIS = "ray.io/gcs-ft-redis-cleanup-finalizer"
"""KubeRay's own. It drops it while the RayCluster has a Redis: of one that has none any more it
would stay for ever (read in its raycluster_controller.go; kuberay PR 5013 tells of it)."""


class KubeRay:
    """Each call may raise KubeError."""

    def __init__(self, kube: Kube, caches: Caches, applied: Applied) -> None:
        self._kube, self._caches, self._applied = kube, caches, applied
        self._finalizers = Finalizers(kube)

    @property
    def is_served(self) -> bool:
        """Whether its kind is: without it nobody makes pods, nor keeps those that there are."""
        return self._caches.ray_clusters.is_served

    def find(self, cluster: Key) -> Object | None:
        """As it is, not as it was heard of last: revisions live in it, and one that was made a
        moment ago must not be forgotten. One that nobody has seen go is not taken for gone: all
        that serves would drain."""
        try:
            return self._kube.get(RAY_CLUSTERS, cluster)
        except NotFoundError as error:
            if self._caches.ray_clusters.get(cluster) is not None:
                raise UnreachableError(f"{error}, and it was not seen to go") from error
            return None

    def apply(
        self,
        view: ClusterView,
        context: PodContext,
        decided: Mapping[str, PoolRolling],
        new: Mapping[str, Manifest],
    ) -> None:
        """One apply tells each group's size and which pods go. A head that what it was told before
        keeps from starting goes, too. `decided`: by pool; `new`: of `new_groups`."""
        self._applied.apply(view.key, SERVICE_ACCOUNTS, pods_account(view.owner))
        if view.spec.ray.token_secret_name is None:
            # Once: another token would lock out the pods that run.
            self._applied.make(view.key, SECRETS, ray_token(view.owner, secrets.token_hex(32)))
        groups = [*_unheard(view), *_groups(view, decided, new)]
        groups.sort(key=lambda group: str(group["groupName"]))
        self._applied.apply(view.key, RAY_CLUSTERS, ray_cluster(context, groups, view.ray_cluster))
        pods = self._caches.of_cluster(self._caches.pods, view.key)
        remove_unfit(self._kube, pods, context.head_hash)

    def end(self, cluster: Object) -> bool:
        """Delete what the ServingCluster has of it; whether there is anything left."""
        ray = self.find(key_of(cluster))
        if ray is None or not is_owned(ray, cluster["metadata"]["uid"]):
            return False
        if "gcsFaultToleranceOptions" not in ray["spec"]:
            self._finalizers.drop(RAY_CLUSTERS, ray, _EMPTIES_REDIS)
        if "deletionTimestamp" not in ray["metadata"]:
            exactly = Preconditions(uid=ray["metadata"]["uid"])
            with contextlib.suppress(NotFoundError):
                self._kube.delete(RAY_CLUSTERS, key_of(ray), preconditions=exactly)
        return True


def new_groups(view: ClusterView, context: PodContext) -> dict[str, Manifest]:
    """Of revisions that have none yet, by name. Raises ConfigError or ValueError."""
    return {
        name: worker_group(context, revision.revision, pool.spec)
        for pool in view.pools.values()
        for name, revision in pool.revisions.items()
        if revision.group is None
    }


def _groups(
    view: ClusterView, decided: Mapping[str, PoolRolling], new: Mapping[str, Manifest]
) -> list[Object]:
    groups: list[Object] = []
    for pool_name, pool in view.pools.items():
        rolling = decided[pool_name]
        for name, size in rolling.sizes.items():
            group = pool.revisions[name].group or new[name]
            if _has_group(view, pool, name, rolling):
                size_of_group = group_size_of(view, pool, name, size)
                groups.append(sized(group, size_of_group))
    return groups


def _has_group(view: ClusterView, pool: PoolView, name: str, rolling: PoolRolling) -> bool:
    """A revision's group goes when nothing is left of it, and nobody speaks of it any more."""
    revision = pool.revisions[name]
    is_over = view.fleet is not None and revision.fleet is None and revision.is_empty
    return bool(rolling.sizes[name]) or name in rolling.kept or not is_over


def _unheard(view: ClusterView) -> list[Object]:
    """Groups of pools whose WorkerPool the API server has just not told of: they stay."""
    wanted = view.obj["spec"]["pools"].keys() - view.pools.keys()
    return [group for group in view.groups.values() if revision_in(group).pool in wanted]
