"""A WorkerPool's size and its bounds. A size outside of them is not taken: the last one stays, and
a condition says so. An API server with CEL refuses it at once. Pure.
"""

from __future__ import annotations

from deploy.api.worker_pool import PoolTemplate, WorkerPoolSpec
from deploy.controller.kit.objects import Object
from deploy.controller.view import PoolView


def with_accepted_size(name: str, pool: Object, cluster: Object) -> Object:
    """The WorkerPool of that name in the ServingCluster, with the size that it has."""
    spec = pool["spec"]
    least = spec.get("minReplicas", WorkerPoolSpec.min_replicas)
    most = spec.get("maxReplicas", WorkerPoolSpec.max_replicas)
    if least <= spec.get("replicas", WorkerPoolSpec.replicas) <= most:
        return pool
    size = max(least, min(last_size(name, cluster), most))
    return {**pool, "spec": {**spec, "replicas": size}}


def last_size(name: str, cluster: Object) -> int:
    """The ServingCluster's status remembers it, also when the WorkerPool is gone. A pool without a
    past has its first size."""
    known = cluster.get("status", {}).get("pools", {}).get(name)
    if known is not None:
        return int(known.partition("/")[2])
    template = cluster["spec"]["pools"].get(name, {})
    return int(template.get("initialReplicas", PoolTemplate.initial_replicas))


def size_problem(pool: PoolView) -> str:
    """Empty: its size is as asked."""
    spec = pool.spec
    asked = pool.obj.get("spec", {}).get("replicas", spec.replicas)
    if asked == spec.replicas:
        return ""
    field = f"of spec.pools.{spec.pool} in ServingCluster {spec.cluster}"
    if asked > spec.replicas:
        bound = f"above maxReplicas {spec.max_replicas}"
        remedy = f"scale to {spec.max_replicas} at most, or raise maxReplicas {field}"
    else:
        bound = f"below minReplicas {spec.min_replicas}"
        remedy = f"scale to {spec.min_replicas} at least, or lower minReplicas {field}"
    return f"spec.replicas is {asked}, {bound}: the size stays {spec.replicas}; {remedy}"
