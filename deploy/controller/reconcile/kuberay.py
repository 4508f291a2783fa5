"""KubeRay makes the pods, by one RayCluster for each unit. The reconciler asks nothing else of it
than what stands here.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence, Set

from deploy.controller.kit.applied import Applied
from deploy.controller.kit.errors import NotFoundError, UnreachableError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Object, Selection, is_owned, key_of
from deploy.controller.manifests.cluster_yaml import cluster_config, unit_config_map
from deploy.controller.manifests.common import CLUSTER_LABEL
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import (
    GroupSize,
    pods_account,
    ray_cluster,
    ray_token,
    sized,
    worker_group,
)
from deploy.controller.manifests.resources import (
    CONFIG_MAPS,
    RAY_CLUSTERS,
    SECRETS,
    SERVICE_ACCOUNTS,
)
from deploy.controller.observed.fleet import FleetPool, Slot
from deploy.controller.observed.pod import Pod
from deploy.controller.observed.view import ClusterView, PoolView, UnitView
from deploy.controller.reconcile.caches import Caches


class KubeRay:
    """Keeps RayClusters as the rollout wants them. Each call may raise KubeError."""

    def __init__(self, kube: Kube, caches: Caches, applied: Applied) -> None:
        self._kube, self._caches, self._applied = kube, caches, applied

    @property
    def is_served(self) -> bool:
        """Tell whether the API server serves KubeRay's kind: without it nobody makes pods."""
        return self._caches.ray_clusters.is_served

    def find(self, cluster: Object) -> list[Object]:
        """List a ServingCluster's RayClusters anew: a cache may not have the newest. One that is in
        the cache and not in the list raises UnreachableError: another unit would be made beside
        it."""
        key, uid = key_of(cluster), cluster["metadata"]["uid"]
        selection = Selection(key.namespace, f"{CLUSTER_LABEL}={key.name}")
        try:
            listed = self._kube.list(RAY_CLUSTERS, selection).items
        except NotFoundError:  # nobody serves the kind
            listed = ()
        found = [each for each in listed if is_owned(each, uid)]
        seen = self._caches.of_cluster(self._caches.ray_clusters, key)
        unseen = {key_of(each) for each in seen if is_owned(each, uid)} - set(map(key_of, found))
        if unseen:
            names = ", ".join(sorted(map(str, unseen)))
            raise UnreachableError(f"{names}: not listed, and not seen to go")
        return sorted(found, key=key_of)

    def bring(self, view: ClusterView, contexts: Mapping[str, PodContext], groups: Groups) -> None:
        """Bring every unit to what the rollout has it be. `contexts`: by the units' codes."""
        self._applied.apply(view.key, SERVICE_ACCOUNTS, pods_account(view.owner))
        if view.spec.ray.token_secret_name is None:
            # Once: another token would lock out the pods that run.
            self._applied.make(view.key, SECRETS, ray_token(view.owner, secrets.token_hex(32)))
        for unit in view.units:
            if not unit.plan.ends:
                self._bring(view, unit, contexts[unit.code], groups[unit.code])
            elif unit.ray_cluster is not None:
                self._end(unit.ray_cluster)

    def _bring(
        self, view: ClusterView, unit: UnitView, context: PodContext, groups: Sequence[Object]
    ) -> None:
        wanted = ray_cluster(context, unit.plan.record, groups, unit.ray_cluster)
        made = self._applied.apply(view.key, RAY_CLUSTERS, wanted)
        if unit.is_wanted:
            config = cluster_config(view.owner, view.spec, {}, unit.code)
            unit_map = unit_config_map(view.owner, unit.code, config, made)
            # Of one that stays nothing changes: its processes read it when they start.
            keep = self._applied.apply if unit.ray_cluster is None else self._applied.make
            keep(view.key, CONFIG_MAPS, unit_map)

    def end(self, cluster: Object) -> bool:
        """Delete what the ServingCluster has of it; whether there is anything left."""
        found = self.find(cluster)
        for each in found:
            self._end(each)
        return bool(found)

    def _end(self, ray: Object) -> None:
        if "deletionTimestamp" not in ray["metadata"]:
            with contextlib.suppress(NotFoundError):
                self._kube.delete(RAY_CLUSTERS, key_of(ray), uid=ray["metadata"]["uid"])


Groups = Mapping[str, Sequence[Object]]
"""Worker groups of RayClusters, by the units' codes."""


def groups_of(view: ClusterView, contexts: Mapping[str, PodContext]) -> Groups:
    """Make the worker groups that each unit's pools are to run on. Raises ConfigError or
    ValueError, so that nothing is begun that cannot be made."""
    return {unit.code: _groups(view, unit, contexts[unit.code]) for unit in view.units}


def _groups(view: ClusterView, unit: UnitView, context: PodContext) -> list[Object]:
    # A pool whose WorkerPool the API server has not listed just now keeps its group.
    unlisted = view.obj["spec"]["pools"].keys() - view.pools.keys()
    groups = [group for name, group in unit.groups.items() if name in unlisted]
    for name, pool in unit.pools.items():
        group = pool.group
        is_new = not pool.is_going and not unit.plan.is_leaving and name in context.unit.pools
        if group is None and is_new:
            group = worker_group(context, pool.spec)
        # It goes when nothing is left of the pool, and the supervisor has forgotten it.
        is_gone = unit.fleet is not None and pool.fleet is None and pool.is_over
        if group is not None and not is_gone:
            groups.append(sized(group, size_of(pool)))
    return sorted(groups, key=lambda group: str(group["groupName"]))


def size_of(pool: PoolView) -> GroupSize:
    """Size a group. What goes waits for no silent supervisor: its pods drain by themselves."""
    if pool.group is None:
        return GroupSize(pool.size)
    if (pool.is_going or pool.makes_way) and pool.fleet is None:
        names = sorted(pod.name for pod in pool.pods)
        return GroupSize(0, tuple(names), frozenset(names))
    closed = frozenset() if pool.heard.fleet is None else pool.heard.fleet.closed_pods
    if not pool.heard.is_settled:
        return group_size(pool.size, pool.pods, None, closed)
    unknown = FleetPool(pool.size, ())  # it runs nothing that it does not know
    return group_size(pool.size, pool.pods, pool.fleet or unknown, closed)


def group_size(
    replicas: int, pods: Sequence[Pod], pool: FleetPool | None, closed: Set[str] = frozenset()
) -> GroupSize:
    """How many pods a pool's worker group is to have, and which go. Pure.

    A pod goes only when no worker is left on it, and none can come:

    1. The supervisor gets the pool's new size and drains the slots that are too many.
    2. It is told to close the empty pods that are too many.
    3. Those that it reports closed and empty go in one patch, whatever the size is by then. They
       are never opened again: a pool that grows meanwhile gets others.

    `replicas`: the pool's size; `pods`: all of its group; `pool`: None while the supervisor is
    silent or does not know the pool, and nothing goes then; `closed`: what it reports.
    """
    slots = () if pool is None else pool.slots
    taken, names = {slot.pod for slot in slots}, {pod.name for pod in pods}
    going = {pod.name for pod in pods if pod.is_going}
    if pool is not None:
        going |= names & closed - taken
    staying = [pod for pod in pods if pod.name not in going]
    surplus = 0 if pool is None else _surplus(replicas, staying, slots)
    chosen = sorted(_empty(staying, slots), key=_least_wanted_first)[:surplus]
    # What was seen of the pods may be old: none with a worker on it may be left out of the count.
    num_unseen = len(taken - {""} - names)
    to_close = going | (names & closed) | {pod.name for pod in chosen}
    size = max(replicas, len(staying) + num_unseen)
    return GroupSize(size, tuple(sorted(going)), frozenset(to_close))


def _empty(pods: Sequence[Pod], slots: Sequence[Slot]) -> list[Pod]:
    taken = {slot.pod for slot in slots}
    return [pod for pod in pods if pod.name not in taken]


def _surplus(replicas: int, pods: Sequence[Pod], slots: Sequence[Slot]) -> int:
    """Count the pods that neither the pool's size nor a slot without a pod will want."""
    num_homeless = sum(not slot.pod for slot in slots)
    return max(0, min(len(pods) - replicas, len(_empty(pods, slots)) - num_homeless))


def _least_wanted_first(pod: Pod) -> tuple[bool, str, str]:
    """Put pods that are not ready first, then the oldest: new ones are of the newest version."""
    return pod.is_ready, pod.created_at, pod.name
