"""Writes the statuses of ServingClusters and WorkerPools, and records events of what changes in
them. Nobody else writes them.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.planner.planner import PoolPlan
from deploy.controller.kit.errors import KubeError, NotFoundError, each
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Resource, key_of
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.resources import SERVING_CLUSTERS, WORKER_POOLS
from deploy.controller.observed.view import ClusterView
from deploy.controller.status.cluster_status import Refusals, cluster_status, cluster_verdicts
from deploy.controller.status.conditions import Verdict, conditions, timestamp
from deploy.controller.status.events import Look, Record, exposure, happenings
from deploy.controller.status.pool_status import pool_status, pool_verdicts
from deploy.controller.status.waiting import pool_waits, silence


class Statuses:
    """Own what was written last of each cluster and its pools; one cluster's is used by one thread
    at a time. Each call may raise KubeError."""

    def __init__(self, kube: Kube, record: Record, now: Callable[[], datetime.datetime]) -> None:
        self._kube, self._record, self._now = kube, record, now
        self._looks: dict[Key, dict[tuple[Resource, Key], Look]] = {}

    def write_pools(
        self, view: ClusterView, plans: Mapping[str, PoolPlan], refused: Mapping[str, str]
    ) -> list[KubeError]:
        """Write the pools' statuses. Returns what failed. `refused`: by the supervisor, by pool. An
        operator that has just begun to listen to it leaves the statuses as they are."""
        if not view.heard.is_certain:
            return []
        now = timestamp(self._now())
        silent = silence(view, now)
        self._forget_gone_pools(view)

        def write(name: str) -> None:
            pool, plan = view.pools[name], plans.get(name)
            status = pool_status(pool, view.spec.planner, now) | {
                "desiredReplicas": None if plan is None else plan.desired_replicas,
                "desiredReason": None if plan is None else plan.reason,
            }
            verdicts = pool_verdicts(pool, refused.get(name, ""), pool_waits(view, pool), silent)
            self.write(view.key, WORKER_POOLS, pool.obj, verdicts, status, size=pool.spec.replicas)

        return each(partial(write, name) for name in view.pools)

    def write_cluster(self, view: ClusterView, routers: Object | None, refusals: Refusals) -> None:
        """Write the cluster's status. `routers`: their Deployment."""
        if not view.heard.is_certain:
            return
        verdicts = cluster_verdicts(view, routers, refusals, timestamp(self._now()))
        status = cluster_status(view, verdicts)
        exposed = exposure(view)
        self.write(view.key, SERVING_CLUSTERS, view.obj, verdicts, status, exposure=exposed)

    def _forget_gone_pools(self, view: ClusterView) -> None:
        """Let another pool that gets the name of one begin without its history."""
        looks, here = self._looks.get(view.key, {}), {key_of(p.obj) for p in view.pools.values()}
        for resource, key in [*looks]:
            if resource is WORKER_POOLS and key not in here:
                del looks[resource, key]

    def forget(self, cluster: Key) -> None:
        self._looks.pop(cluster, None)

    def write(
        self,
        cluster: Key,
        resource: Resource,
        obj: Object,
        verdicts: Sequence[Verdict],
        status: Manifest | None = None,
        **looked: Any,
    ) -> None:
        """Write a status unless it says so already, and record what has changed. `status`: None
        where the object was not looked at as a whole; a None in it takes a field away."""
        written = (status or {}) | {
            "observedGeneration": obj["metadata"].get("generation", 0),
            "conditions": conditions(verdicts, obj, timestamp(self._now())),
        }
        if not _says(obj.get("status", {}), written):
            with contextlib.suppress(NotFoundError):  # it was deleted just now
                self._kube.merge_patch(resource, key_of(obj), {"status": written}, "status")
        looks = self._looks.setdefault(cluster, {})
        before = looks.get((resource, key_of(obj))) or _first_look(obj)
        now = Look.of(written)
        drains = now.drains if "draining" in written else before.drains
        after = replace(before, conditions=now.conditions, drains=drains, **looked)
        looks[resource, key_of(obj)] = after
        for what in happenings(before, after):
            self._record(obj, what.type, what.reason, what.message)


def _first_look(obj: Object) -> Look:
    """Return the look before an operator's first: what was there by then is no news."""
    look = Look.of(obj.get("status", {}))
    return replace(look, exposure="reported by an operator before" if look.conditions else "")


def _says(before: Any, written: Any) -> bool:
    """Tell whether a merge patch would change nothing."""
    if isinstance(before, Mapping) and isinstance(written, Mapping):
        return all(_says(before.get(name), value) for name, value in written.items())
    return bool(before == written)
