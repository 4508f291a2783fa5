"""Why what a ServingCluster is made of does not run, as its pods and their owners tell it: for the
messages of conditions. Pure; an empty answer: nothing tells of it."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.controller.kit.objects import Object
from deploy.controller.observed import Pod
from deploy.controller.status.pod_waits import pods_refused, together
from deploy.controller.view import ClusterView, PoolView


def pool_waits(view: ClusterView, pool: PoolView) -> str:
    staying = [pod for pod in pool.pods if not pod.is_going]
    is_short = len(staying) < pool.replicas
    refused = [pods_refused(each) for each in view.ray_clusters] if is_short else []
    return _joined(_of(pool.pods), *refused)


def head_waits(view: ClusterView) -> str:
    heads = [pod for pod in view.poolless_pods if pod.component == "head"]
    if not heads:
        refused = _joined(*(pods_refused(each) for each in view.ray_clusters))
        return refused or "Ray's head has no pod"
    return _of(heads)


def router_waits(view: ClusterView, routers: Object | None) -> str:
    """`routers`: their Deployment."""
    pods = [pod for pod in view.poolless_pods if pod.component == "router"]
    return _joined(_of(pods), pods_refused(routers))


def with_waits(told: str, waits: str) -> str:
    return f"{told}; {waits}" if waits else told


def _of(pods: Sequence[Pod]) -> str:
    told = (pod for pod in pods if pod.is_lost or not pod.is_going)
    return together({pod.name: pod.waits_for for pod in told})


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
