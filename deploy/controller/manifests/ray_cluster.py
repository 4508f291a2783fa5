"""KubeRay's RayCluster: a head, and one worker group for each pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deploy.api.serving_cluster import GcsFaultTolerance
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.common import Object
from deploy.controller.manifests.pods import (
    OWN_COMMAND,
    PodContext,
    head_template,
    num_gpus,
    ray_resources,
    worker_template,
)


@dataclass(frozen=True)
class GroupSize:
    """How many pods a pool's group is to have, and which go: both are told in one patch, or KubeRay
    would choose for itself."""

    replicas: int
    to_delete: tuple[str, ...] = ()


def ray_cluster(
    context: PodContext, pools: Mapping[str, WorkerPoolSpec], sizes: Mapping[str, GroupSize]
) -> Object:
    """`pools` and `sizes` by the pools' names in the cluster."""
    owner, ray = context.owner, context.spec.ray
    metadata = owner.metadata(owner.name, "ray")
    metadata["annotations"] = dict(OWN_COMMAND)
    secret = ray.token_secret_name or f"{owner.name}-ray-token"
    spec: Object = {
        "rayVersion": ray.version or context.release.ray_version,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token", "secretName": secret},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "include-dashboard": "false"},
            "template": head_template(context),
        },
        "workerGroupSpecs": [
            _group(context, name, pool, sizes[name]) for name, pool in sorted(pools.items())
        ],
    }
    if ray.gcs_fault_tolerance is not None:
        spec["gcsFaultToleranceOptions"] = _fault_tolerance(ray.gcs_fault_tolerance)
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def _group(context: PodContext, name: str, pool: WorkerPoolSpec, size: GroupSize) -> Object:
    start = {
        "num-cpus": "1",
        "num-gpus": str(num_gpus(context.spec, pool)),  # a template may take shared ones instead
        "resources": ray_resources(name, pool),
    }
    return {
        "groupName": name,
        "replicas": size.replicas,
        "minReplicas": 0,
        "maxReplicas": max(pool.max_replicas + pool.rollout.max_surge, size.replicas),
        "numOfHosts": 1,
        "rayStartParams": start,
        "scaleStrategy": {"workersToDelete": list(size.to_delete)},
        "template": worker_template(context, name, pool),
    }


def _fault_tolerance(wanted: GcsFaultTolerance) -> Object:
    options: Object = {"redisAddress": wanted.redis_address}
    if wanted.redis_secret_name is not None:
        secret = {"name": wanted.redis_secret_name, "key": "password"}
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": secret}}
    return options
