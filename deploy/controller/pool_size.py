"""A WorkerPool's size and its bounds. An API server with CEL takes none that they leave out; where
one without has, the nearest that they allow is kept, and that is told. Pure.
"""

from __future__ import annotations

from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.kit.objects import Object
from deploy.controller.view import PoolView


def within_bounds(pool: Object) -> Object:
    """The WorkerPool with the size that is kept."""
    spec = pool["spec"]
    least = spec.get("minReplicas", WorkerPoolSpec.min_replicas)
    most = spec.get("maxReplicas", WorkerPoolSpec.max_replicas)
    size = max(least, min(spec.get("replicas", WorkerPoolSpec.replicas), most))
    return {**pool, "spec": {**spec, "replicas": size}}


def size_problem(pool: PoolView) -> str:
    """Empty: its size is the one that is kept."""
    size = pool.spec.replicas
    asked = pool.obj.get("spec", {}).get("replicas", size)
    if asked == size:
        return ""
    bound = "above maxReplicas" if asked > size else "below minReplicas"
    return f"spec.replicas: must not be {bound}, and is {asked}: {size} are kept"
