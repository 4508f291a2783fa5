"""The pods of Ray: the head with the supervisor in it, and a pool's workers.

A worker's pod gets the model's files from a claim, or from an init container that fetches them. The
init container also checks that there is a model: so a wrong name is seen at once. Workers and head
have the volume `weights` for what is fetched. A template that puts a folder of the node or a claim
there lets it outlive the pod, and the node's pods share it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from dataclasses import dataclass

from baton.config.workers import POD_LABEL, PORT_VARIABLE, pod_resource
from baton.identity.keys import Role
from baton.process.log import LOG_VARIABLE, SETTINGS_VARIABLE
from deploy.api.serving_cluster import ModelSource, ServingClusterSpec, SpotNotices
from deploy.api.worker_pool import WorkerPoolSpec, seconds
from deploy.controller.manifests.cluster_yaml import model_name, model_path, pool_device
from deploy.controller.manifests.common import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    CONTAINER_SECURITY,
    CONTROL_PORT,
    HEALTH_PORT,
    LAST_WORDS,
    METRICS_PORT,
    POD_ENV,
    POD_SECURITY,
    POOL_LABEL,
    RAY_PORT,
    ROLE_LABEL,
    RUN_FOLDER,
    SECRET_MODE,
    WEIGHTS_FOLDER,
    WORKER_PORT,
    Object,
    Owner,
    Release,
    config_volume,
    container_port,
    env,
    probe_of,
    pull_secrets,
)
from deploy.controller.manifests.identity import identity_of
from deploy.controller.manifests.merge import merged_template, with_settings
from deploy.controller.rollout.units import Unit

OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
"""KubeRay leaves our command as it is, and gives it its own in KUBERAY_GEN_RAY_START_CMD."""
GRACE_MARGIN_S = 60
"""Kubernetes' patience beyond a drain: what is left then is killed."""
_LOG_SETTINGS, _LOG_FOLDER = "log-settings", "/etc/baton/log"
_RAY_ENV = [
    env("RAY_USAGE_STATS_ENABLED", "0"),
    env(SETTINGS_VARIABLE, f"{_LOG_FOLDER}/cluster.yaml"),
    env("RAY_worker_niceness", "0"),  # Ray's 15 puts engines behind all else in their pod
]
_OUTLIVED_S = 120
"""After its announced end: a cloud ends a machine later than it says, but not by so much. A machine
that is there still, as after hibernation, has a pod whose node has left Ray. Its container must
start anew."""
HEAD_CONTAINER = "ray-head"
WORKER_CONTAINER = "ray-worker"
_SHELL = f"ulimit -n 65536; export {LOG_VARIABLE}=/proc/${{$}}/fd/1; "
"""The container's main process begins as this shell. Kubernetes would make one $ of two."""
WEIGHTS = "weights"
MODEL_VOLUME = "model"
"""The model's claim."""
FETCH = "fetch-model"
"""The init container, for templates that add to it."""

_BILLIONS = re.compile(r"(?<![\w.])(?:([0-9]+)x)?([0-9]{1,4}(?:[.][0-9]+)?)[bB](?!\w)")
_WORKER_PORTS = {"links": WORKER_PORT, "metrics": METRICS_PORT, "health": HEALTH_PORT}
_OWN_LABEL = f"--labels={POD_LABEL}=$POD_NAME"
"""KubeRay writes one command for all pods of a group; each gives Ray its own name."""


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

    @property
    def image(self) -> str:
        return self.made_with or self.spec.images.worker or self.release.worker_image


def head_template(context: PodContext) -> Object:
    """Make the pod of Ray's head, without a worker's resources. The supervisor runs in the same
    container: a Ray driver shares its raylet's memory and sockets."""
    supervise = f"python -m cluster.supervisor.head --config {CONFIG_FILE} --run-dir {RUN_FOLDER}"
    speaks_grpc = context.has_grpc_probes and context.spec.internal_tls is None
    container = {
        "name": HEAD_CONTAINER,
        "command": ["/bin/sh", "-c"],
        "args": [f'{_SHELL}eval "$KUBERAY_GEN_RAY_START_CMD" & exec {supervise}'],
        "ports": [container_port("gcs-server", RAY_PORT), container_port("control", CONTROL_PORT)],
        "readinessProbe": probe_of(CONTROL_PORT, speaks_grpc) | {"periodSeconds": 5},
        "resources": {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
    }
    own = _template(context, "head", container, grace_s=GRACE_MARGIN_S, text_only=True)
    own["spec"]["containers"][0]["volumeMounts"].insert(0, CONFIG_MOUNT)
    config = config_volume(context.owner.unit_name(context.unit.code))
    own["spec"]["volumes"].insert(0, config)
    return merged_template(own, context.spec.ray.head_template)


def worker_template(context: PodContext, pool: WorkerPoolSpec) -> Object:
    """Make one replica's pod: all of its ranks, each with its GPU. They get their orders from the
    supervisor, not from a file of the pod."""
    drain_s = int(seconds(pool.drain_timeout))
    watch = _spot_watch(context.spec.spot_notices, drain_s)
    container = {
        "name": WORKER_CONTAINER,
        "command": ["/bin/sh", "-c"],
        "args": [f'{_SHELL}{watch}eval "exec $KUBERAY_GEN_RAY_START_CMD {_OWN_LABEL}"'],
        "ports": [container_port(name, port) for name, port in _WORKER_PORTS.items()],
        # KubeRay's own would ask Ray's agent, which asks the head: see `companions`.
        "readinessProbe": {
            "httpGet": {"path": "/live", "port": HEALTH_PORT},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", _drain_command(drain_s)]}}},
        "resources": _worker_resources(context.spec, pool),
    }
    grace_s = drain_s + GRACE_MARGIN_S
    text_only = not context.spec.advanced.engine.reads_model
    own = _template(context, "worker", container, grace_s=grace_s, text_only=text_only)
    own["metadata"]["labels"] |= {POOL_LABEL: pool.pool, ROLE_LABEL: pool.role.value}
    own["spec"]["containers"][0]["env"].append(env(PORT_VARIABLE, str(WORKER_PORT)))
    own["spec"]["affinity"] = _same_fabric(context)
    return with_settings(own, pool, WORKER_CONTAINER)


def _drain_command(timeout_s: int) -> str:
    """Make the drain's command. It logs to the container's log where it may write there. In a pod
    with the node's process ids, process 1 is not the container's: the drain must not fail for
    that."""
    return (
        "if (: >>/proc/1/fd/1) 2>/dev/null; then exec >>/proc/1/fd/1 2>&1; fi; "
        f"exec python -m cluster.node.pod_drain --timeout {timeout_s}"
    )


def _spot_watch(notices: SpotNotices | None, timeout_s: int) -> str:
    """Return the command that watches for spot notices. The container's shell starts it beside Ray:
    another container's process could not see the workers end."""
    if notices is None:
        return ""
    asked = f"--cloud {notices.cloud} --address {shlex.quote(notices.address)}"
    limits = (
        f"--notice {seconds(notices.notice):g} --timeout {timeout_s} --restart-after {_OUTLIVED_S}"
    )
    return f"python -m cluster.node.spot_watch {asked} {limits} & "


def ray_resources(pool: WorkerPoolSpec) -> str:
    """Return what a pool's node offers to Ray, as KubeRay writes it into a shell's command line."""
    return json.dumps(json.dumps({pod_resource(pool.pool): pool.parallelism.tensor}))


def _template(
    context: PodContext, component: str, container: Object, *, grace_s: int, text_only: bool
) -> Object:
    """Make what the pods of Ray share. `text_only`: nobody in the pod reads the model's weights."""
    role: Role = "worker" if component == "worker" else "operator"
    identity, folder, secret = identity_of(context.owner, context.spec, role)
    # The routers' configuration: all pods follow its level and format, and start without it, too.
    followed = {"name": context.owner.config_name, "optional": True}
    shared = {
        "image": context.image,
        "imagePullPolicy": context.spec.images.pull_policy,
        "env": [*POD_ENV, *_RAY_ENV, *_model_env(context.spec)],
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": identity, "mountPath": folder, "readOnly": True},
            {"name": _LOG_SETTINGS, "mountPath": _LOG_FOLDER, "readOnly": True},
            *_model_mounts(context.spec.model),
        ],
        **LAST_WORDS,
        "securityContext": dict(CONTAINER_SECURITY),
    }
    return {
        "metadata": {"labels": context.owner.unit_labels(component, context.unit.code)},
        "spec": {
            "serviceAccountName": f"{context.owner.name}-pods",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": dict(POD_SECURITY),
            **_fetching(context.spec, context.image, text_only=text_only),
            "containers": [container | shared],
            "volumes": [
                {"name": "run", "emptyDir": {}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                {"name": identity, "secret": {"secretName": secret, "defaultMode": SECRET_MODE}},
                {"name": _LOG_SETTINGS, "configMap": followed},
                *_model_volumes(context.spec.model),
            ],
            **pull_secrets(context.spec.images),
        },
    }


def num_gpus(spec: ServingClusterSpec, pool: WorkerPoolSpec) -> int:
    """Count the GPUs of a pool's pod: one for each rank where its engine computes on GPUs."""
    return pool.parallelism.tensor if pool_device(spec, pool) == "cuda" else 0


def _worker_resources(spec: ServingClusterSpec, pool: WorkerPoolSpec) -> Object:
    """Ask for a GPU for each rank, and memory for the weights, which pass through it, and stay on a
    CPU: two bytes for each parameter that the model's name counts."""
    source = model_name(dataclasses.replace(spec, served_model_name=None))
    ranks, counted = pool.parallelism.tensor, _BILLIONS.search(source)
    weights = counted and math.ceil(int(counted[1] or 1) * float(counted[2]) * 2e9 / 2**30)
    if not num_gpus(spec, pool):
        return {"requests": {"cpu": str(ranks), "memory": f"{2 * ranks + (weights or 0)}Gi"}}
    memory = f"{8 + 8 * ranks + (weights or 16)}Gi"
    gpus = {"nvidia.com/gpu": str(ranks)}
    return {"requests": {"cpu": str(2 + 2 * ranks), "memory": memory} | gpus, "limits": gpus}


def _same_fabric(context: PodContext) -> Object:
    """Have all pools' workers near each other. Where that is required the first pod goes anywhere,
    and the others near it."""
    fabric = context.spec.fabric
    term = {
        "labelSelector": {"matchLabels": context.owner.labels("worker")},
        "topologyKey": fabric.node_label,
    }
    if fabric.required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _model_env(spec: ServingClusterSpec) -> list[Object]:
    """Say where the hub's files are kept, and how it is asked. HOME: the image's user has none."""
    found = [env("HOME", "/tmp"), env("HF_HOME", f"{WEIGHTS_FOLDER}/hub")]
    if spec.hub.offline:
        found.append(env("HF_HUB_OFFLINE", "1"))
    if spec.hub.endpoint is not None:
        found.append(env("HF_ENDPOINT", spec.hub.endpoint))
    if spec.hub.token_secret_name is not None:
        secret = {"secretKeyRef": {"name": spec.hub.token_secret_name, "key": "token"}}
        found.append({"name": "HF_TOKEN", "valueFrom": secret})
    return found


def _fetching(spec: ServingClusterSpec, image: str, *, text_only: bool) -> Object:
    """Return the pod's init containers. `text_only`: nobody in the pod reads weights."""
    model = spec.model
    if model.uri is not None:
        fetch = ["--uri", model.uri, "--folder", model_path(model)]
        fetch += ["--text-only"] if text_only else []
        environment = [env("HOME", "/tmp")]
    elif not text_only:
        fetch = ["--name", model_path(model)]
        fetch += ["--revision", model.revision] if model.revision is not None else []
        environment = _model_env(spec)
    else:
        return {}
    container: Object = {
        "name": FETCH,
        "image": image,
        "imagePullPolicy": spec.images.pull_policy,
        "command": ["python", "-m", "baton.fetch"],
        "args": fetch,
        "env": environment,
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}},  # no pod asks for less
        **LAST_WORDS,
        "volumeMounts": _model_mounts(model),
        "securityContext": dict(CONTAINER_SECURITY),
    }
    if model.credentials_secret_name is not None:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret_name}}]
    return {"initContainers": [container]}


def _model_mounts(model: ModelSource) -> list[Object]:
    mounts: list[Object] = [{"name": WEIGHTS, "mountPath": WEIGHTS_FOLDER}]
    if model.claim is not None:
        folder = model.claim.folder
        mounts.append({"name": MODEL_VOLUME, "mountPath": folder, "readOnly": True})
    return mounts


def _model_volumes(model: ModelSource) -> list[Object]:
    volumes: list[Object] = [{"name": WEIGHTS, "emptyDir": {}}]
    if model.claim is not None:
        claim = {"claimName": model.claim.claim_name, "readOnly": True}
        volumes.append({"name": MODEL_VOLUME, "persistentVolumeClaim": claim})
    return volumes
