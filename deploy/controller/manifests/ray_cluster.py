"""KubeRay's RayCluster: a head, and one worker group for each revision of each pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.naming import GROUP
from deploy.api.serving_cluster import GcsFaultTolerance
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.cluster_yaml import cluster_config
from deploy.controller.manifests.common import POOL_LABEL, WORKER_PORT, Object
from deploy.controller.manifests.pods import (
    CONFIG_HASH,
    OWN_COMMAND,
    PodContext,
    head_template,
    num_gpus,
    ray_resources,
    worker_template,
)
from deploy.controller.objects import Object as Seen
from deploy.controller.revisions import Revision

_COHORT = f"{GROUP}/cohort"
_SETTINGS = f"{GROUP}/cluster-yaml"


@dataclass(frozen=True)
class GroupSize:
    """How many pods a pool's group is to have, and which go: both are told in one patch, or KubeRay
    would choose for itself."""

    replicas: int
    to_delete: tuple[str, ...] = ()


def ray_cluster(context: PodContext, groups: Sequence[Seen], seen: Seen | None = None) -> Object:
    """`groups`: of every revision; `seen`: how the RayCluster is, None where there is none yet. The
    head stays as it was made until the spec says something else of it: an operator of another
    release would start another Ray under workers that run."""
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
    }
    if ray.gcs_fault_tolerance is not None:
        spec["gcsFaultToleranceOptions"] = _fault_tolerance(ray.gcs_fault_tolerance)
    if seen is not None and _head_hash(seen["spec"]) == context.head_hash:
        spec = {name: value for name, value in seen["spec"].items() if name in spec}
    spec["workerGroupSpecs"] = list(groups)
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def _head_hash(spec: Seen) -> str | None:
    metadata = spec["headGroupSpec"]["template"].get("metadata", {})
    found: str | None = metadata.get("annotations", {}).get(CONFIG_HASH)
    return found


def worker_group(context: PodContext, revision: Revision, pool: WorkerPoolSpec) -> Object:
    """A revision's pods, none of them yet. It says all that there is to know of the revision, and
    never changes but for its size."""
    start = {
        "num-cpus": "1",
        "num-gpus": str(num_gpus(context.spec, pool)),  # a template may take shared ones instead
        "resources": ray_resources(revision.name, pool),
    }
    template = worker_template(context, revision.name, pool)
    config = cluster_config(context.owner, context.spec, {revision.name: pool})
    said = {_COHORT: revision.cohort, _SETTINGS: config.to_yaml()}
    template["metadata"]["annotations"] = template["metadata"].get("annotations", {}) | said
    return {
        "groupName": revision.name,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": pool.max_replicas + pool.rollout.max_surge,
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


def revision_in(group: Seen) -> Revision:
    """What `worker_group` made the group of."""
    metadata = group["template"]["metadata"]
    cohort = metadata["annotations"][_COHORT]
    return Revision(group["groupName"], metadata["labels"][POOL_LABEL], cohort)


def settings_in(group: Seen) -> str:
    """The cluster file that the supervisor makes the revision's workers from."""
    settings: str = group["template"]["metadata"]["annotations"][_SETTINGS]
    return settings


def listens_at_worker_port(group: Seen) -> bool:
    """Where all of its workers do; those that an older operator made listen at any port."""
    containers = group["template"]["spec"]["containers"]
    ports = [port for container in containers for port in container.get("ports", ())]
    return any(port["containerPort"] == WORKER_PORT for port in ports)


def _fault_tolerance(wanted: GcsFaultTolerance) -> Object:
    options: Object = {"redisAddress": wanted.redis_address}
    if wanted.redis_secret_name is not None:
        secret = {"name": wanted.redis_secret_name, "key": "password"}
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": secret}}
    return options
