"""The WorkerPools of a ServingCluster: one for each pool of its spec. The operator applies what the
spec says of a pool, but never its size.

A pool that leaves the spec drains, and its WorkerPool goes. A WorkerPool that somebody deletes
while the spec names its pool is made again at its size; its workers serve on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial

from baton.errors import ConfigError
from cluster.planner.planner import PoolPlan
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import PoolTemplate, WorkerPoolSpec
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.errors import (
    AlreadyExistsError,
    KubeError,
    NotFoundError,
    each,
)
from deploy.controller.kit.events import EventType
from deploy.controller.kit.finalizers import FINALIZER, drop_finalizer
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, key_of
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.common import Owner
from deploy.controller.manifests.resources import WORKER_POOLS
from deploy.controller.manifests.worker_pool import worker_pool
from deploy.controller.observed.view import ClusterView, is_going
from deploy.controller.reconcile.caches import Caches
from deploy.controller.status.events import Record

log = logging.getLogger(__name__)


class Pools:
    def __init__(self, kube: Kube, caches: Caches, applied: Applied, record: Record) -> None:
        self._kube, self._caches, self._applied, self._record = kube, caches, applied, record

    def keep(
        self, cluster: Object, owner: Owner, spec: ServingClusterSpec
    ) -> tuple[dict[str, Object], list[KubeError]]:
        """Keep the WorkerPools; a deleted cluster's go. Returns those there are, by name, and what
        failed. Raises ConfigError, before anything is done, where one is to become what it
        cannot."""
        templates = {} if is_going(cluster) else cluster["spec"]["pools"]
        wanted = {
            name: worker_pool(owner, name, template, FINALIZER)
            for name, template in templates.items()
        }
        problems = [problem for name in wanted for problem in self._problems(name, wanted[name])]
        if problems:  # an API server with CEL refuses these, one without takes them
            raise ConfigError(f"ServingCluster {key_of(cluster)}: {'; '.join(problems)}")
        names = {made["metadata"]["name"]: name for name, made in wanted.items()}
        pools = {}
        for pool in self._of(key_of(cluster)):
            name = names.get(pool["metadata"]["name"], pool["spec"].get("pool"))
            is_made_again = name in wanted and _is_made_again(pool, wanted[name])
            pools[name] = _undeleted(pool) if is_made_again else pool

        def keep(name: str) -> None:
            pools[name] = self._keep(cluster, wanted[name], spec.pools[name])

        failed = each(partial(keep, name) for name in wanted)  # as it was, if it was
        failed += each(partial(self._delete, pools[name]) for name in pools.keys() - wanted.keys())
        return pools, failed

    def _problems(self, name: str, made: Manifest) -> list[str]:
        """Say why the WorkerPool that is there does not become what the pool of that name is made
        to. One that is being deleted makes way for another of its cluster."""
        seen = self._caches.pools.get(key_of(made))
        if seen is None:
            return []
        was, wanted = seen["spec"], made["spec"]
        if any(was.get(field) != wanted[field] for field in ("cluster", "pool")):
            whose = f"pool {was.get('pool')} of ServingCluster {was.get('cluster')}"
            return [f"spec.pools.{name} needs another name: WorkerPool {key_of(seen)} is {whose}"]
        if is_going(seen) or was.get("role") == wanted["role"]:
            return []
        has = f"WorkerPool {key_of(seen)} has role {was.get('role')}"
        return [f"spec.pools.{name}.role cannot be changed: make another pool; {has}"]

    def _keep(self, cluster: Object, wanted: Manifest, template: PoolTemplate) -> Object:
        """Keep a WorkerPool. It is made with its last size, or its first; others then scale it."""
        name, seen = wanted["spec"]["pool"], self._caches.pools.get(key_of(wanted))
        if seen is None:
            self._create(wanted, last_size(name, cluster))
        elif _is_made_again(seen, wanted):
            log.info("%s was deleted, and the spec names its pool: made again", key_of(seen))
            drop_finalizer(self._kube, WORKER_POOLS, seen)
            if not self._create(wanted, _size_of(name, seen, cluster)):
                return _undeleted(seen)
        elif is_going(seen):
            return seen
        elif template.scaling.mode == "planner":
            self._fit(seen, template)
        else:
            _check_size(name, seen, _size_of(name, seen, cluster), template)
        return _undeleted(self._applied.apply(key_of(cluster), WORKER_POOLS, wanted))

    def _create(self, wanted: Manifest, size: int) -> bool:
        """Create a WorkerPool. False: it is there, by an old cache or others' finalizers."""
        try:
            self._kube.create(WORKER_POOLS, wanted | {"spec": wanted["spec"] | {"replicas": size}})
        except AlreadyExistsError:
            return False
        return True

    def _delete(self, pool: Object) -> None:
        if not is_going(pool):
            with contextlib.suppress(NotFoundError):  # the cache has yet to hear of it
                self._kube.delete(WORKER_POOLS, key_of(pool))

    def _fit(self, seen: Object, template: PoolTemplate) -> None:
        """In planner mode, fit size and roles to new bounds, in one patch with them: the API server
        refuses a size outside its bounds."""
        spec = seen["spec"]
        fit: Manifest = {}
        size = max(template.min_replicas, min(spec.get("replicas", 1), template.max_replicas))
        if size != spec.get("replicas", 1):
            fit["replicas"] = size
        if sum((spec.get("rolePlan") or {}).values()) > template.max_replicas:
            fit["rolePlan"] = None
        if fit:
            log.info("%s: new bounds: %s", key_of(seen), fit)
            fit |= {"minReplicas": template.min_replicas, "maxReplicas": template.max_replicas}
            self._kube.merge_patch(WORKER_POOLS, key_of(seen), {"spec": fit})

    def release(self, view: ClusterView) -> None:
        """Let a deleted pool go when its last worker and pod are gone. A deleted cluster's pools go
        together: its last streams need the routers."""
        over = [pool for pool in view.pools.values() if pool.is_over]
        if not view.is_going or len(over) == len(view.pools):
            for pool in over:
                drop_finalizer(self._kube, WORKER_POOLS, pool.obj)

    def release_orphans(self, cluster: Key) -> None:
        """Let pools go whose ServingCluster is gone: what serves them goes with it."""
        for pool in self._of(cluster):
            drop_finalizer(self._kube, WORKER_POOLS, pool)

    def scale(self, view: ClusterView, plans: Mapping[str, PoolPlan]) -> None:
        """Write the sizes and roles of pools whose `scaling.mode` is planner: nobody else does. A
        pool that is being deleted has no plan."""
        for name, plan in plans.items():
            pool = view.pools[name]
            if pool.spec.scaling.mode != "planner":
                continue
            spec: Manifest = {}
            changes = []
            if plan.desired_replicas != pool.spec.replicas:
                spec["replicas"] = plan.desired_replicas
                changes.append(f"from {pool.spec.replicas} to {plan.desired_replicas} replicas")
            roles = plan.role_plan
            if roles is not None and (roles.prefill, roles.decode) != pool.role_plan:
                spec["rolePlan"] = {"prefill": roles.prefill, "decode": roles.decode}
                split = f"{roles.prefill} act as prefill alone, {roles.decode} as decode alone"
                changes.append(split)
            if spec:
                log.info("%s: %s", view.key, plan.reason)
                self._kube.merge_patch(WORKER_POOLS, key_of(pool.obj), {"spec": spec})
                message = f"{', '.join(changes)}: {plan.reason}"
                self._record(pool.obj, EventType.NORMAL, "Planned", message)

    def _of(self, cluster: Key) -> list[Object]:
        return self._caches.of_cluster(self._caches.pools, cluster)


def _size_of(name: str, seen: Object, cluster: Object) -> int:
    return int(with_accepted_size(name, seen, cluster)["spec"].get("replicas", 1))


def _is_made_again(seen: Object, made: Manifest) -> bool:
    """Tell whether somebody deleted the WorkerPool, and one of the same role is wanted. One of
    another role waits until the workers of the former have drained."""
    return is_going(seen) and seen["spec"].get("role") == made["spec"]["role"]


def _undeleted(pool: Object) -> Object:
    metadata = {key: value for key, value in pool["metadata"].items() if key != "deletionTimestamp"}
    return {**pool, "metadata": metadata}


def _check_size(name: str, seen: Object, size: int, template: PoolTemplate) -> None:
    """Raises KubeError where new bounds leave out the pool's size, which is somebody else's to
    change. With them no API server that has CEL takes the pool, and nobody could read it."""
    bounds = (
        ("minReplicas", template.min_replicas, size < template.min_replicas),
        ("maxReplicas", template.max_replicas, size > template.max_replicas),
    )
    for bound, value, is_outside in bounds:
        if is_outside and seen["spec"].get(bound) != value:
            has = f"WorkerPool {key_of(seen)} has {size} replicas"
            raise KubeError(f"spec.pools.{name}.{bound} is {value}, and {has}: scale it first")


def with_accepted_size(name: str, pool: Object, cluster: Object) -> Object:
    """Return a ServingCluster's WorkerPool of that name with the size that it has."""
    spec = pool["spec"]
    least = spec.get("minReplicas", WorkerPoolSpec.min_replicas)
    most = spec.get("maxReplicas", WorkerPoolSpec.max_replicas)
    if least <= spec.get("replicas", WorkerPoolSpec.replicas) <= most:
        return pool
    size = max(least, min(last_size(name, cluster), most))
    return {**pool, "spec": {**spec, "replicas": size}}


def last_size(name: str, cluster: Object) -> int:
    """Return a pool's last size, which the ServingCluster's status remembers, also when the
    WorkerPool is gone. A pool without a past has its first size."""
    known = cluster.get("status", {}).get("pools", {}).get(name)
    if known is not None:
        return int(known.partition("/")[2])
    template = cluster["spec"]["pools"].get(name, {})
    return int(template.get("initialReplicas", PoolTemplate.initial_replicas))
