"""How a worker's pod comes by the model's files: a claim, or an init container that fetches them.
The init container also checks that there is a model, so that a wrong name is seen at once.

Workers and Ray's head have the volume `weights`, where what is fetched lies. A template that puts a
folder of the node or a claim there lets it outlive the pod, and the node's pods share it.
"""

from __future__ import annotations

from deploy.api.model_source import ModelSource
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.controller.manifests.cluster_yaml import model_path
from deploy.controller.manifests.common import CONTAINER_SECURITY, WEIGHTS_FOLDER, Object, env

WEIGHTS = "weights"
MODEL_VOLUME = "model"
"""The model's claim."""
FETCH = "fetch-model"
"""The init container, for templates that add to it."""

_WEIGHTS_MOUNT = {"name": WEIGHTS, "mountPath": WEIGHTS_FOLDER}


def model_env(spec: ServingClusterSpec) -> list[Object]:
    """Where the hub's files are kept, and how it is asked. HOME: the image has none for users."""
    found = [env("HOME", "/tmp"), env("HF_HOME", f"{WEIGHTS_FOLDER}/hub")]
    if spec.hub.offline:
        found.append(env("HF_HUB_OFFLINE", "1"))
    if spec.hub.endpoint is not None:
        found.append(env("HF_ENDPOINT", spec.hub.endpoint))
    if spec.hub.token_secret_name is not None:
        secret = {"secretKeyRef": {"name": spec.hub.token_secret_name, "key": "token"}}
        found.append({"name": "HF_TOKEN", "valueFrom": secret})
    return found


def fetching(spec: ServingClusterSpec, image: str, *, text_only: bool) -> Object:
    """The pod's init containers. `text_only`: nobody in the pod reads weights."""
    model = spec.model
    if model.uri is not None:
        fetch = ["baton.fetch", "--uri", model.uri, "--folder", model_path(model)]
        fetch += ["--text-only"] if text_only else []
        environment = [env("HOME", "/tmp")]
    elif not text_only:
        fetch = ["baton.model_folder", "--name", model_path(model)]
        fetch += ["--revision", model.revision] if model.revision is not None else []
        environment = model_env(spec)
    else:
        return {}
    container: Object = {
        "name": FETCH,
        "image": image,
        "imagePullPolicy": spec.images.pull_policy,
        "command": ["python", "-m", fetch[0]],
        "args": fetch[1:],
        "env": environment,
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": model_mounts(model),
        "securityContext": dict(CONTAINER_SECURITY),
    }
    if model.credentials_secret_name is not None:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret_name}}]
    return {"initContainers": [container]}


def model_mounts(model: ModelSource) -> list[Object]:
    mounts: list[Object] = [dict(_WEIGHTS_MOUNT)]
    if model.claim is not None:
        folder = model.claim.folder
        mounts.append({"name": MODEL_VOLUME, "mountPath": folder, "readOnly": True})
    return mounts


def model_volumes(model: ModelSource) -> list[Object]:
    volumes: list[Object] = [{"name": WEIGHTS, "emptyDir": {}}]
    if model.claim is not None:
        claim = {"claimName": model.claim.claim_name, "readOnly": True}
        volumes.append({"name": MODEL_VOLUME, "persistentVolumeClaim": claim})
    return volumes
