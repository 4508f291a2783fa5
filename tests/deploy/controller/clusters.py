"""A ServingCluster for tests: its spec, what the operator makes of it, and what a look sees."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from deploy.api.checked import read_spec
from deploy.api.naming import API_VERSION
from deploy.api.serving_cluster import ModelSource, ServingClusterSpec
from deploy.api.worker_pool import PoolShape, PoolTemplate, Scaling, WorkerPoolSpec
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import POOL_LABEL, Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import GroupSize, ray_cluster, sized, worker_group
from deploy.controller.manifests.routers import router_deployment
from deploy.controller.observed import NOTHING_HEARD, Fleet, FleetPool, Heard, Pod
from deploy.controller.rollout import Record, State, Step, UnitPlan
from deploy.controller.units import Unit
from deploy.controller.view import ClusterView, PoolView

OWNER = Owner("main", "models", "0b5e1d0e-0000-4000-8000-000000000000")
RELEASE = Release("baton-worker:1", "baton-router:1", "2.60.0")
SERVING = Step(State.SERVING, "", (UnitPlan("2x4bz", {}, Record()),))
UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
        }
    ],
}
REFUSED: dict[str, Any] = {
    "status": {
        "conditions": [
            {
                "type": "ReplicaFailure",
                "status": "True",
                "reason": "FailedCreate",
                "message": "pods is forbidden: exceeded quota: gpus",
            }
        ]
    }
}


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


def view_of(pods: Sequence[Pod] = (), **spec: Any) -> ClusterView:
    """Two pools of two, the decode one with `pods`."""
    parsed = spec_of(**spec)
    pools = {
        name: PoolView(
            {"metadata": {"name": f"main-{name}", "uid": f"uid-of-{name}"}},
            pool,
            list(pods) if name == "decode" else [],
            None,
        )
        for name, pool in pools_of(parsed, replicas=2).items()
    }
    key = Key(OWNER.namespace, OWNER.name)
    return ClusterView(key, {"metadata": {}}, OWNER, parsed, pools, NOTHING_HEARD, SERVING)


def at(replicas: int, mode: str) -> ClusterView:
    """A cluster whose pools are to have that many workers, and have none."""
    pools = {
        name: PoolView(
            {"metadata": {}},
            WorkerPoolSpec(
                role=name, cluster="main", pool=name, replicas=replicas, scaling=Scaling(mode=mode)
            ),
            [],
            FleetPool(replicas, ()),
        )
        for name in ("prefill", "decode")
    }
    spec = ServingClusterSpec(
        model=ModelSource(name="a/model"),
        pools={name: PoolTemplate(role=name) for name in pools},
    )
    fleet = Fleet({name: pool.fleet for name, pool in pools.items() if pool.fleet})
    obj = {"apiVersion": API_VERSION, "kind": "ServingCluster", "metadata": {}}
    heard = Heard(fleet, is_settled=True, is_certain=True)
    key, owner = Key("here", "main"), Owner("main", "here", "uid")
    return ClusterView(key, obj, owner, spec, pools, heard, SERVING)


def pod(name: str, is_ready: bool = True, is_going: bool = False) -> Pod:
    metadata = {"name": name, "labels": {POOL_LABEL: "decode"}}
    if is_going:
        metadata["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": str(is_ready)}]
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return Pod.of({"metadata": metadata, "status": {"conditions": conditions}}, now)
