"""The pods of Ray: the head with the supervisor in it, and a pool's workers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from baton.config.workers import POD_LABEL, PORT_VARIABLE, pod_resource
from deploy.api.model_source import ModelSource
from deploy.api.serving_cluster import Images, ServingClusterSpec, SpotNotices
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.cluster_yaml import pool_device, seconds
from deploy.controller.manifests.common import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    CONTAINER_SECURITY,
    CONTROL_PORT,
    METRICS_PORT,
    POD_ENV,
    POOL_LABEL,
    RAY_PORT,
    ROLE_LABEL,
    RUN_FOLDER,
    WORKER_PORT,
    Object,
    Owner,
    Release,
    config_volume,
    env,
)
from deploy.controller.manifests.merge import merged_template, with_settings
from deploy.controller.manifests.model_files import (
    fetching,
    model_env,
    model_mounts,
    model_volumes,
)
from deploy.controller.units import Unit

OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
"""KubeRay leaves our command as it is, and gives it its own in KUBERAY_GEN_RAY_START_CMD."""
GRACE_MARGIN_S = 60
"""Kubernetes' patience beyond a drain: what is left then is killed."""
_OUTLIVED_S = 120
"""After its announced end: a cloud ends a machine later than it says, but not by so much. One that
is there still, as after hibernation, keeps a pod whose node has left Ray until its container starts
anew."""
HEAD_CONTAINER = "ray-head"
WORKER_CONTAINER = "ray-worker"

_OWN_LABEL = f"--labels={POD_LABEL}=$POD_NAME"
"""KubeRay writes one command for all pods of a group; each tells Ray its own name."""


@dataclass(frozen=True)
class PodContext:
    """What all pods of one ServingCluster are made from."""

    owner: Owner
    spec: ServingClusterSpec
    release: Release
    unit: Unit
    has_grpc_probes: bool = True
    """Whether the API server knows them: since 1.24."""
    made_with: str = ""
    """The image that the unit was made with; empty: it is yet to be made."""

    def probe(self, port: int) -> Object:
        return probe_of(port, self.has_grpc_probes)

    @property
    def image(self) -> str:
        return self.made_with or self.spec.images.worker or self.release.worker_image


def probe_of(port: int, has_grpc_probes: bool) -> Object:
    """Whether what listens there serves; where that cannot be asked, whether it listens."""
    return {"grpc" if has_grpc_probes else "tcpSocket": {"port": port}}


def head_template(context: PodContext) -> Object:
    """Ray's head without a worker's resources, and the supervisor beside it in one container: a Ray
    driver shares its raylet's memory and sockets."""
    supervise = f"python -m cluster.supervisor.head --config {CONFIG_FILE} --run-dir {RUN_FOLDER}"
    container = {
        "name": HEAD_CONTAINER,
        "command": ["/bin/sh", "-c"],
        "args": [f'ulimit -n 65536; eval "$KUBERAY_GEN_RAY_START_CMD" & exec {supervise}'],
        "ports": [
            _port("gcs-server", RAY_PORT),
            _port("control", CONTROL_PORT),
        ],
        "readinessProbe": context.probe(CONTROL_PORT) | {"periodSeconds": 5},
        "resources": {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
    }
    own = _template(context, "head", container, grace_s=GRACE_MARGIN_S, text_only=True)
    own["spec"]["containers"][0]["volumeMounts"].insert(0, CONFIG_MOUNT)
    config = config_volume(context.owner.unit_name(context.unit.code))
    own["spec"]["volumes"].insert(0, config)
    return merged_template(own, context.spec.ray.head_template)


def worker_template(context: PodContext, pool: WorkerPoolSpec) -> Object:
    """One replica's pod: all of its ranks, each with its GPU. What they are to do the supervisor
    tells them; no file of the pod does."""
    drain_s = int(seconds(pool.drain_timeout))
    watch = _spot_watch(context.spec.spot_notices, drain_s)
    container = {
        "name": WORKER_CONTAINER,
        "command": ["/bin/sh", "-c"],
        "args": [f'ulimit -n 65536; {watch}eval "exec $KUBERAY_GEN_RAY_START_CMD {_OWN_LABEL}"'],
        "ports": [_port("grpc", WORKER_PORT), _port("metrics", METRICS_PORT)],
        # KubeRay's own would ask Ray's agent, which asks the head: see pod_disruption_budgets.
        "readinessProbe": context.probe(WORKER_PORT) | {"periodSeconds": 5, "timeoutSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", _drain_command(drain_s)]}}},
        "resources": _worker_resources(context.spec, pool),
    }
    is_fake = context.spec.advanced.engine.backend == "fake"
    grace_s = drain_s + GRACE_MARGIN_S
    own = _template(context, "worker", container, grace_s=grace_s, text_only=is_fake)
    own["metadata"]["labels"] |= {POOL_LABEL: pool.pool, ROLE_LABEL: pool.role}
    own["spec"]["containers"][0]["env"].append(env(PORT_VARIABLE, str(WORKER_PORT)))
    own["spec"]["affinity"] = _same_fabric(context)
    return with_settings(own, pool, WORKER_CONTAINER)


def _drain_command(timeout_s: int) -> str:
    """What it says stands in the container's own log where that can be written to: in a pod that
    has the node's process ids 1 is none of its own, and its drain must not fail for that."""
    return (
        "if (: >>/proc/1/fd/1) 2>/dev/null; then exec >>/proc/1/fd/1 2>&1; fi; "
        f"exec python -m cluster.node.pod_drain --timeout {timeout_s}"
    )


def _spot_watch(notices: SpotNotices | None, timeout_s: int) -> str:
    """What the container's shell starts beside Ray: a process of another container could not see
    the workers end."""
    if notices is None:
        return ""
    asked = f"--cloud {notices.cloud} --address {shlex.quote(notices.address)}"
    limits = (
        f"--notice {seconds(notices.notice):g} --timeout {timeout_s} --restart-after {_OUTLIVED_S}"
    )
    return f"python -m cluster.node.spot_watch {asked} {limits} & "


def ray_resources(pool: WorkerPoolSpec) -> str:
    """What a pool's node tells Ray it has, as KubeRay writes it into a shell's command line."""
    return json.dumps(json.dumps({pod_resource(pool.pool): pool.parallelism.tensor}))


def _template(
    context: PodContext, component: str, container: Object, *, grace_s: int, text_only: bool
) -> Object:
    """`text_only`: nobody in the pod reads the model's weights."""
    shared = {
        "image": context.image,
        "imagePullPolicy": context.spec.images.pull_policy,
        "env": [*POD_ENV, env("RAY_USAGE_STATS_ENABLED", "0"), *model_env(context.spec)],
        "volumeMounts": list(_mounts(context.spec.model)),
        "securityContext": dict(CONTAINER_SECURITY),
    }
    return {
        "metadata": {"labels": context.owner.unit_labels(component, context.unit.code)},
        "spec": {
            "serviceAccountName": f"{context.owner.name}-pods",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": {"fsGroup": 1000, "runAsUser": 1000, "runAsNonRoot": True},
            **fetching(context.spec, context.image, text_only=text_only),
            "containers": [container | shared],
            "volumes": list(_volumes(context.spec.model)),
            **pull_secrets(context.spec.images),
        },
    }


def pull_secrets(images: Images) -> Object:
    names = [{"name": name} for name in images.pull_secrets]
    return {"imagePullSecrets": names} if names else {}


def _port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def num_gpus(spec: ServingClusterSpec, pool: WorkerPoolSpec) -> int:
    """Of a pool's pod: one for each rank where its engine computes on GPUs."""
    return pool.parallelism.tensor if pool_device(spec, pool) == "cuda" else 0


def _worker_resources(spec: ServingClusterSpec, pool: WorkerPoolSpec) -> Object:
    """A GPU for each rank; everything else the pool's own template says."""
    count = num_gpus(spec, pool)
    if not count:
        return {"requests": {"cpu": "1", "memory": "2Gi"}}
    gpus = {"nvidia.com/gpu": str(count)}
    return {"requests": {"cpu": "4", "memory": "32Gi"} | gpus, "limits": gpus}


def _same_fabric(context: PodContext) -> Object:
    """All pools' workers near each other. Where that is required the first pod goes anywhere: it is
    itself what the others are to be near to."""
    fabric = context.spec.fabric
    term = {
        "labelSelector": {"matchLabels": context.owner.labels("worker")},
        "topologyKey": fabric.node_label,
    }
    if fabric.required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _mounts(model: ModelSource) -> Sequence[Object]:
    mounts: list[Object] = [
        {"name": "run", "mountPath": RUN_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return [*mounts, *model_mounts(model)]


def _volumes(model: ModelSource) -> Sequence[Object]:
    volumes: list[Object] = [
        {"name": "run", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return [*volumes, *model_volumes(model)]
