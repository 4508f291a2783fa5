"""How many pods may be evicted at once: one of the routers, one of each pool.

A pool's budget counts pods that must stay, not pods that may go: the latter asks the pods' owner
for its scale, which a RayCluster does not tell, and then Kubernetes lets nothing go at all.

Budgets keep what serves. A pod that is not ready may go at any time, or one that never gets ready
would hold up its node's drain for good; should streams run in it, it drains as any other does. So a
worker's pod is ready while its worker takes requests, by a probe of our own. The one that KubeRay
gives a container without asks the agent of the pod's raylet, and that asks the head whether it
knows the node: whatever ails the head would lay all of a pool's pods open, and a pod whose worker
still loads would count as one that serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deploy.controller.kit.objects import Resource
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL, Object, Owner


@dataclass(frozen=True)
class BudgetKind:
    """What the API server knows of budgets."""

    resource: Resource
    """The version that is served."""
    lets_unready_go: bool
    """Whether a budget can say so."""


def router_budget(owner: Owner, kind: BudgetKind) -> Object:
    return _budget(
        kind,
        owner.metadata(owner.router_name, "router"),
        {"maxUnavailable": 1, "selector": {"matchLabels": owner.labels("router")}},
    )


def pool_budget(
    owner: Owner, pool: str, pool_uid: str, kind: BudgetKind, num_expected: int
) -> Object:
    """It goes with the WorkerPool. `num_expected`: pods that the pool is to have, or has."""
    metadata = owner.metadata(f"{owner.pool_name(pool)}-workers", "pool")
    metadata["labels"] |= {POOL_LABEL: pool}
    metadata["ownerReferences"] = [owner.pool_reference(pool, pool_uid)]
    selector = {"matchLabels": {CLUSTER_LABEL: owner.name, POOL_LABEL: pool}}
    return _budget(kind, metadata, {"minAvailable": max(0, num_expected - 1), "selector": selector})


def _budget(kind: BudgetKind, metadata: Object, spec: Mapping[str, object]) -> Object:
    unready = {"unhealthyPodEvictionPolicy": "AlwaysAllow"} if kind.lets_unready_go else {}
    return {
        "apiVersion": kind.resource.api_version,
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {**spec, **unready},
    }
