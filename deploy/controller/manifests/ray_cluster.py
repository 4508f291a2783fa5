"""KubeRay's RayCluster of a unit: a head, and a worker group for each pool, called as the pool.
Beside it what the pods share: their account, which may do nothing, and Ray's token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.naming import GROUP
from deploy.api.serving_cluster import GcsFaultTolerance
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.manifests.cluster_yaml import cluster_config, model_name
from deploy.controller.manifests.common import UNIT_LABEL, Object, Owner, manifest
from deploy.controller.manifests.pods import (
    OWN_COMMAND,
    PodContext,
    head_template,
    num_gpus,
    ray_resources,
    worker_template,
)
from deploy.controller.rollout.rollout import Record
from deploy.controller.rollout.units import Unit

_SHARED_HASH = f"{GROUP}/shared-hash"
_MODEL_HASH = f"{GROUP}/model-hash"
_IMAGE = f"{GROUP}/worker-image"
_NAME = f"{GROUP}/served-model-name"
_RECORD = f"{GROUP}/rollout"
_POOL_HASH = f"{GROUP}/pool-hash"
_SETTINGS = f"{GROUP}/cluster-yaml"


@dataclass(frozen=True)
class GroupSize:
    """How many pods a pool's group is to have, and which go. One patch holds both: otherwise
    KubeRay would choose itself."""

    replicas: int
    to_delete: tuple[str, ...] = ()
    to_close: frozenset[str] = frozenset()
    """Pods that go, or are about to: the supervisor is told first."""


def ray_cluster(
    context: PodContext, record: Record, groups: Sequence[Seen], seen: Seen | None = None
) -> Object:
    """`seen`: the RayCluster as it is; None: there is none yet. All but groups and record stays as
    it was made: otherwise an operator of another release would restart Ray under live workers."""
    owner, ray, unit = context.owner, context.spec.ray, context.unit
    metadata = owner.metadata(owner.unit_name(unit.code), "ray")
    metadata["labels"] = owner.unit_labels("ray", unit.code)
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
    if seen is not None:
        kept = (*spec, "gcsFaultToleranceOptions")
        spec = {name: value for name, value in seen["spec"].items() if name in kept}
    said = {
        _SHARED_HASH: unit.shared,
        _MODEL_HASH: unit.model,
        _IMAGE: context.image if seen is None else image_in(seen),
        _NAME: model_name(context.spec) if seen is None else name_in(seen),
        _RECORD: json.dumps(dataclasses.asdict(record), sort_keys=True),
    }
    metadata["annotations"] = {**OWN_COMMAND, **said}
    spec["workerGroupSpecs"] = list(groups)
    return manifest("ray.io/v1", "RayCluster", metadata, spec=spec)


def worker_group(context: PodContext, pool: WorkerPoolSpec) -> Object:
    """Make the group of a pool's pods, none of them yet. It holds all of the pool's settings in
    this unit; only its size ever changes."""
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
    """Return the unit that a RayCluster was made for."""
    metadata, groups = ray_cluster["metadata"], ray_cluster["spec"]["workerGroupSpecs"]
    hashes = {each["groupName"]: _annotations_of(each)[_POOL_HASH] for each in groups}
    said = metadata["annotations"]
    return Unit(metadata["labels"][UNIT_LABEL], said[_SHARED_HASH], hashes, said[_MODEL_HASH])


def image_in(ray_cluster: Seen) -> str:
    """Return the image of a RayCluster's workers. A pool that comes later gets the same."""
    image: str = ray_cluster["metadata"]["annotations"][_IMAGE]
    return image


def name_in(ray_cluster: Seen) -> str:
    """Return what clients call the model of a RayCluster."""
    name: str = ray_cluster["metadata"]["annotations"][_NAME]
    return name


def record_in(ray_cluster: Seen) -> Record:
    return Record(**json.loads(ray_cluster["metadata"]["annotations"][_RECORD]))


def settings_in(group: Seen) -> str:
    """Return the cluster file that the supervisor makes the pool's workers from."""
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


def pods_account(owner: Owner) -> Object:
    metadata = owner.metadata(f"{owner.name}-pods", "pods")
    return manifest("v1", "ServiceAccount", metadata, automountServiceAccountToken=False)


def ray_token(owner: Owner, token: str) -> Object:
    """Make the Secret of Ray's token, as KubeRay reads it."""
    metadata = owner.metadata(f"{owner.name}-ray-token", "ray")
    return manifest("v1", "Secret", metadata, type="Opaque", stringData={"auth_token": token})
