"""A ServingCluster for tests: its spec, what the operator makes of it, and what a look sees."""

from __future__ import annotations

import dataclasses
from typing import Any

from deploy.api.checked import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import PoolShape, WorkerPoolSpec
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import GroupSize, ray_cluster, sized, worker_group
from deploy.controller.manifests.routers import router_deployment
from deploy.controller.rollout.rollout import Record
from deploy.controller.rollout.units import Unit

OWNER = Owner("main", "models", "0b5e1d0e-0000-4000-8000-000000000000")
RELEASE = Release("baton-worker:1", "baton-router:1", "2.60.0")


def spec_of(**changes: Any) -> ServingClusterSpec:
    usual = {
        "model": {"name": "models/demo"},
        "pools": {
            "prefill": {"role": "prefill"},
            "decode": {"role": "decode", "parallelism": {"tensor": 2}, "drainTimeout": "1m30s"},
        },
    }
    metadata = {"namespace": OWNER.namespace, "name": OWNER.name}
    obj = {"kind": "ServingCluster", "metadata": metadata, "spec": usual | changes}
    return read_spec(ServingClusterSpec, obj)


def pools_of(spec: ServingClusterSpec, **changes: Any) -> dict[str, WorkerPoolSpec]:
    shape = [each.name for each in dataclasses.fields(PoolShape)]
    return {
        name: WorkerPoolSpec(
            **{field: getattr(pool, field) for field in shape}, cluster="main", pool=name, **changes
        )
        for name, pool in spec.pools.items()
    }


def context_of(spec: ServingClusterSpec, release: Release = RELEASE, **changes: Any) -> PodContext:
    unit = Unit("2x4bz", "shared", {name: f"of-{name}" for name in spec.pools})
    return PodContext(OWNER, spec, release, unit, **changes)


def routers_of(
    spec: ServingClusterSpec, release: Release = RELEASE, **changes: Any
) -> dict[str, Any]:
    return router_deployment(OWNER, spec, release, "r1", **changes)


def ray_of(spec: ServingClusterSpec, **sizes: GroupSize) -> dict[str, Any]:
    context = context_of(spec)
    groups = [
        sized(worker_group(context, pool), sizes.get(name, GroupSize(1)))
        for name, pool in pools_of(spec).items()
    ]
    return ray_cluster(context, Record(), groups)


def group_of(ray: dict[str, Any], pool: str) -> dict[str, Any]:
    (group,) = [g for g in ray["spec"]["workerGroupSpecs"] if g["groupName"] == pool]
    return group
