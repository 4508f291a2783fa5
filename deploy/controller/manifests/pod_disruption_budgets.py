"""How many pods may be evicted at once: one of the routers, one of each pool.

A pool's budget counts pods that must stay, not pods that may go: the latter asks the pods' owner
for its scale, which a RayCluster does not tell, and then Kubernetes lets nothing go at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL, Object, Owner
from deploy.controller.objects import Resource


def router_budget(owner: Owner, resource: Resource) -> Object:
    """`resource`: the version of the kind that is served."""
    return _budget(
        resource,
        owner.metadata(owner.router_name, "router"),
        {"maxUnavailable": 1, "selector": {"matchLabels": owner.labels("router")}},
    )


def pool_budget(
    owner: Owner, pool: str, pool_uid: str, resource: Resource, num_expected: int
) -> Object:
    """It goes with the WorkerPool. `num_expected`: pods that the pool is to have, or has."""
    metadata = owner.metadata(f"{owner.pool_name(pool)}-workers", "pool")
    metadata["labels"] |= {POOL_LABEL: pool}
    metadata["ownerReferences"] = [owner.pool_reference(pool, pool_uid)]
    selector = {"matchLabels": {CLUSTER_LABEL: owner.name, POOL_LABEL: pool}}
    return _budget(
        resource, metadata, {"minAvailable": max(0, num_expected - 1), "selector": selector}
    )


def _budget(resource: Resource, metadata: Object, spec: Mapping[str, object]) -> Object:
    return {
        "apiVersion": resource.api_version,
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": dict(spec),
    }
