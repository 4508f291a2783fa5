"""The statuses of ServingClusters and WorkerPools, which nobody else writes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from cluster.planner.planner import PoolPlan
from deploy.controller.kit.errors import KubeError, NotFoundError, each
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Object, Resource, key_of
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.resources import SERVING_CLUSTERS, WORKER_POOLS
from deploy.controller.status.cluster_status import Refusals, cluster_status, cluster_verdicts
from deploy.controller.status.conditions import Verdict, conditions
from deploy.controller.status.pool_status import pool_status, pool_verdicts
from deploy.controller.status.waiting import pool_waits, silence
from deploy.controller.view import ClusterView


class Statuses:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    def tell_pools(
        self,
        view: ClusterView,
        plans: Mapping[str, PoolPlan],
        refused: Mapping[str, str],
        now: str,
    ) -> list[KubeError]:
        """What failed of it. `refused`: by the supervisor, by pool. Who has just begun to listen
        to the supervisor leaves what the last operator told."""
        if not view.heard.is_certain:
            return []

        silent = silence(view, now)

        def tell(name: str) -> None:
            pool, plan = view.pools[name], plans.get(name)
            status = pool_status(pool, view.spec.planner, now) | {
                "desiredReplicas": None if plan is None else plan.desired_replicas,
                "desiredReason": None if plan is None else plan.reason,
            }
            verdicts = pool_verdicts(pool, refused.get(name, ""), pool_waits(view, pool), silent)
            self._tell(WORKER_POOLS, pool.obj, status, verdicts, now)

        return each(partial(tell, name) for name in view.pools)

    def tell_cluster(
        self, view: ClusterView, routers: Object | None, refusals: Refusals, now: str
    ) -> None:
        """`routers`: their Deployment. What is not known yet is not told."""
        if not view.heard.is_certain:
            return
        verdicts = cluster_verdicts(view, routers, refusals, now)
        status = cluster_status(view, verdicts)
        self._tell(SERVING_CLUSTERS, view.obj, status, verdicts, now)

    def tell(self, resource: Resource, obj: Object, verdicts: list[Verdict], now: str) -> None:
        """Of an object that was not looked at as a whole; raises KubeError."""
        self._tell(resource, obj, {}, verdicts, now)

    def _tell(
        self, resource: Resource, obj: Object, status: Manifest, verdicts: list[Verdict], now: str
    ) -> None:
        """Unless it says so already; None takes a field away."""
        told = status | {
            "observedGeneration": obj["metadata"].get("generation", 0),
            "conditions": conditions(verdicts, obj, now),
        }
        self._patch(resource, obj, told)

    def _patch(self, resource: Resource, obj: Object, told: Manifest) -> None:
        if _says(obj.get("status", {}), told):
            return
        with contextlib.suppress(NotFoundError):  # it was deleted just now
            self._kube.merge_patch(resource, key_of(obj), {"status": told}, "status")


def _says(before: Any, told: Any) -> bool:
    """Whether a merge patch would change nothing."""
    if isinstance(before, Mapping) and isinstance(told, Mapping):
        return all(_says(before.get(name), value) for name, value in told.items())
    return bool(before == told)
