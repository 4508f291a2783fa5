"""How a pod comes by the model's files: a claim, or an init container that fetches them.

Every pod has the volume `weights`, where what is fetched lies; a template that puts a folder of the
node or a claim there has it outlive the pod, and shared by the node's pods.
"""

from __future__ import annotations

from baton.model_folder import is_hub_name
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
    """The pod's init containers. `text_only`: without weights, for who only reads text, which of a
    hub's model is so little that its reader fetches it."""
    model = spec.model
    if model.uri is not None:
        fetch = ["baton.fetch", "--uri", model.uri, "--folder", model_path(model)]
        fetch += ["--text-only"] if text_only else []
        environment = [env("HOME", "/tmp")]
    elif model.name is not None and is_hub_name(model.name) and not text_only:
        fetch = ["baton.model_folder", "--name", model.name]
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
        "volumeMounts": [dict(_WEIGHTS_MOUNT)],
        "securityContext": dict(CONTAINER_SECURITY),
    }
    if model.credentials_secret_name is not None:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret_name}}]
    return {"initContainers": [container]}


def model_mounts(model: ModelSource) -> list[Object]:
    """Where the model's files lie, for who reads only its tokenizer, too."""
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
