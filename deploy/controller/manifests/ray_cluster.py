"""KubeRay's RayCluster of a unit: a head, and a worker group for each pool, called as the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.naming import GROUP
from deploy.api.serving_cluster import GcsFaultTolerance
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.manifests.cluster_yaml import cluster_config
from deploy.controller.manifests.common import UNIT_LABEL, Object
from deploy.controller.manifests.pods import (
    OWN_COMMAND,
    PodContext,
    head_template,
    num_gpus,
    ray_resources,
    worker_template,
)
from deploy.controller.units import Unit

_SHARED_HASH = f"{GROUP}/shared-hash"
_POOL_HASH = f"{GROUP}/pool-hash"
_SETTINGS = f"{GROUP}/cluster-yaml"


@dataclass(frozen=True)
class GroupSize:
    """How many pods a pool's group is to have, and which go: both are told in one patch, or KubeRay
    would choose for itself."""

    replicas: int
    to_delete: tuple[str, ...] = ()


def ray_cluster(
    context: PodContext, unit: str, groups: Sequence[Seen], seen: Seen | None = None
) -> Object:
    """`unit`: its code; `seen`: how the RayCluster is, None where there is none yet. All but the
    groups stays as it was made: an operator of another release would start another Ray under
    workers that run."""
    owner, ray = context.owner, context.spec.ray
    metadata = owner.metadata(owner.unit_name(unit), "ray")
    metadata["labels"] = owner.unit_labels("ray", unit)
    secret = ray.token_secret_name or f"{owner.name}-ray-token"
    spec: Object = {
        "rayVersion": ray.version or context.release.ray_version,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token", "secretName": secret},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "include-dashboard": "false"},
            "template": head_template(context),
        },
    }
    if ray.gcs_fault_tolerance is not None:
        spec["gcsFaultToleranceOptions"] = _fault_tolerance(ray.gcs_fault_tolerance)
    shared = context.unit.shared
    if seen is not None:
        kept = (*spec, "gcsFaultToleranceOptions")
        spec = {name: value for name, value in seen["spec"].items() if name in kept}
        shared = unit_in(seen).shared
    metadata["annotations"] = {**OWN_COMMAND, _SHARED_HASH: shared}
    spec["workerGroupSpecs"] = list(groups)
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def worker_group(context: PodContext, pool: WorkerPoolSpec) -> Object:
    """A pool's pods, none of them yet. It says all that there is to know of the pool in this unit,
    and never changes but for its size."""
    start = {
        "num-cpus": "1",
        "num-gpus": str(num_gpus(context.spec, pool)),  # a template may take shared ones instead
        "resources": ray_resources(pool),
    }
    template, unit = worker_template(context, pool), context.unit
    config = cluster_config(context.owner, context.spec, {pool.pool: pool}, unit.code)
    said = {_POOL_HASH: unit.pools[pool.pool], _SETTINGS: config.to_yaml()}
    template["metadata"]["annotations"] = template["metadata"].get("annotations", {}) | said
    return {
        "groupName": pool.pool,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": pool.max_replicas,
        "numOfHosts": 1,
        "rayStartParams": start,
        "scaleStrategy": {"workersToDelete": []},
        "template": template,
    }


def sized(group: Seen, size: GroupSize) -> Object:
    return {
        **group,
        "replicas": size.replicas,
        "maxReplicas": max(group["maxReplicas"], size.replicas),
        "scaleStrategy": {"workersToDelete": list(size.to_delete)},
    }


def unit_in(ray_cluster: Seen) -> Unit:
    """What `ray_cluster` made it of."""
    metadata, groups = ray_cluster["metadata"], ray_cluster["spec"]["workerGroupSpecs"]
    hashes = {each["groupName"]: _annotations_of(each)[_POOL_HASH] for each in groups}
    return Unit(metadata["labels"][UNIT_LABEL], metadata["annotations"][_SHARED_HASH], hashes)


def settings_in(group: Seen) -> str:
    """The cluster file that the supervisor makes the pool's workers from."""
    return _annotations_of(group)[_SETTINGS]


def _annotations_of(group: Seen) -> dict[str, str]:
    annotations: dict[str, str] = group["template"]["metadata"]["annotations"]
    return annotations


def _fault_tolerance(wanted: GcsFaultTolerance) -> Object:
    options: Object = {"redisAddress": wanted.redis_address}
    if wanted.redis_secret_name is not None:
        secret = {"name": wanted.redis_secret_name, "key": "password"}
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": secret}}
    return options
