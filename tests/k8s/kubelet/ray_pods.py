"""The Service and the pods that KubeRay makes of a RayCluster, in what matters to pods' processes
(ray-operator 1.6: controllers/ray/common/pod.go, service.go). Pure, but for the pods' names.

What it adds to a template: labels, the environment with KUBERAY_GEN_RAY_START_CMD, the token, a
memory volume for the object store, an init container that waits for the GCS, and probes where there
are none. The container's command stays, as the annotation `ray.io/overwrite-container-cmd` asks.
"""

from __future__ import annotations

import copy
import json
import math
import re
import secrets
from collections.abc import Mapping
from typing import Any

GCS_PORT = 6379
AGENT_PORT = 52365
METRICS_PORT = 8080
_WITH_WORD = ("log-color", "include-dashboard")
"""Options that take true and false as words; of others `true` means that they are there."""
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": 1e-3}
HEAD, WORKER = "head", "worker"
CLUSTER_LABEL, TYPE_LABEL, GROUP_LABEL = "ray.io/cluster", "ray.io/node-type", "ray.io/group"
HEAD_GROUP = "headgroup"
_APP_LABEL = "app.kubernetes.io/name"
_RAYLET = "/tmp/ray/session_latest/sockets/raylet"
_HAS_RAYLET = {
    "exec": {"command": ["test", "-S", _RAYLET]},
    "timeoutSeconds": 2,
    "periodSeconds": 5,
}
_WAIT_FOR_GCS = """
until (: < /dev/tcp/{head}/{port}) 2> /dev/null; do sleep 0.2; done
until ray health-check --address {head}:{port} > /dev/null 2>&1; do
  echo "waiting for the GCS at {head}:{port}"; sleep 1
done
"""
_SHM = {"name": "shared-mem", "mountPath": "/dev/shm"}

_NOT_SELECTED = (GROUP_LABEL, "ray.io/is-ray-node")

Pod = dict[str, Any]


def head_service(cluster: Mapping[str, Any]) -> dict[str, Any]:
    template = cluster["spec"]["headGroupSpec"]["template"]
    selector = _labels(cluster, HEAD, HEAD_GROUP, {})
    selector = {name: selector[name] for name in selector if name not in _NOT_SELECTED}
    own = (template.get("metadata") or {}).get("labels") or {}
    selector[_APP_LABEL] = own.get(_APP_LABEL, selector[_APP_LABEL])
    ports = {
        port.get("name", f"{port['containerPort']}-port"): port["containerPort"]
        for port in template["spec"]["containers"][0].get("ports") or ()
    }
    ports.setdefault("metrics", METRICS_PORT)
    metadata = cluster["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(cluster),
            "namespace": metadata["namespace"],
            "labels": selector,
            "ownerReferences": [_owner(cluster)],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [
                {"name": name, "port": port, "appProtocol": "tcp"}
                for name, port in sorted(ports.items())
            ],
        },
    }


def service_name(cluster: Mapping[str, Any]) -> str:
    return f"{cluster['metadata']['name']}-head-svc"


def head_pod(cluster: Mapping[str, Any]) -> Pod:
    group = cluster["spec"]["headGroupSpec"]
    params = {"dashboard-host": "0.0.0.0", **_params(group)}
    pod = _pod(cluster, group, HEAD, HEAD_GROUP)
    container = pod["spec"]["containers"][0]
    if (options := cluster["spec"].get("gcsFaultToleranceOptions")) is not None:
        params |= _fault_tolerance(cluster, options, container)
    _finish(cluster, pod, "127.0.0.1", _ray_start(True, params))
    return pod


def worker_pod(cluster: Mapping[str, Any], group: Mapping[str, Any]) -> Pod:
    head = _head_name(cluster)
    params = {"address": f"{head}:{_head_port(cluster)}", **_params(group)}
    pod = _pod(cluster, group, WORKER, group["groupName"])
    container = pod["spec"]["containers"][0]
    if cluster["spec"].get("gcsFaultToleranceOptions") is not None:
        _add(container, {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"})
    waits = {
        "name": "wait-gcs-ready",
        "image": container.get("image", ""),
        "command": ["/bin/bash", "-c", "--"],
        "args": [_WAIT_FOR_GCS.format(head=head, port=_head_port(cluster))],
        "env": copy.deepcopy(container.get("env") or []),
        "volumeMounts": copy.deepcopy(container.get("volumeMounts") or []),
    }
    if "securityContext" in container:
        waits["securityContext"] = container["securityContext"]
    pod["spec"].setdefault("initContainers", []).append(waits)
    names = {"FQ_RAY_IP": head, "RAY_IP": service_name(cluster)}
    for each in (*pod["spec"]["initContainers"], container):
        _set(each, names)
    _finish(cluster, pod, head, _ray_start(False, params))
    return pod


def _pod(cluster: Mapping[str, Any], group: Mapping[str, Any], kind: str, group_name: str) -> Pod:
    template = copy.deepcopy(dict(group["template"]))
    metadata = template.setdefault("metadata", {})
    name = cluster["metadata"]["name"]
    prefix = f"{name}-head-" if kind == HEAD else f"{name}-{group_name}-worker-"
    metadata |= {
        "name": prefix + secrets.token_hex(3)[:5],
        "namespace": cluster["metadata"]["namespace"],
        "labels": _labels(cluster, kind, group_name, metadata.get("labels") or {}),
        "ownerReferences": [_owner(cluster)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _finish(cluster: Mapping[str, Any], pod: Pod, head: str, command: str) -> None:
    """What head and workers have in common."""
    spec = cluster["spec"]
    container = pod["spec"]["containers"][0]
    _add_shared_memory(pod, container)
    _set(container, {"KUBERAY_GEN_RAY_START_CMD": command})
    fields = {
        "RAY_CLUSTER_NAME": f"metadata.labels['{CLUSTER_LABEL}']",
        "RAY_CLOUD_INSTANCE_ID": "metadata.name",
        "RAY_NODE_TYPE_NAME": f"metadata.labels['{GROUP_LABEL}']",
    }
    _set(container, {name: {"fieldRef": {"fieldPath": path}} for name, path in fields.items()})
    port = _head_port(cluster)
    _add(container, {"RAY_PORT": port, "RAY_ADDRESS": f"{head}:{port}"})
    _add(container, {"RAY_USAGE_STATS_KUBERAY_IN_USE": "1"})
    auth = spec.get("authOptions")
    if auth is not None and auth.get("mode", "token") == "token":
        secret = auth.get("secretName") or cluster["metadata"]["name"]
        token = {"secretKeyRef": {"name": secret, "key": "auth_token"}}
        inits = pod["spec"].get("initContainers") or ()
        for each in (container, *(init for init in inits if init["name"] == "wait-gcs-ready")):
            _add(each, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    _add_probes(container)


def _fault_tolerance(
    cluster: Mapping[str, Any], options: Mapping[str, Any], container: dict[str, Any]
) -> dict[str, str]:
    """Add what the head needs; returns parameters of its `ray start`."""
    namespace = options.get("externalStorageNamespace") or cluster["metadata"]["uid"]
    _add(container, {"RAY_external_storage_namespace": namespace})
    _set(container, {"RAY_REDIS_ADDRESS": options["redisAddress"]})
    if (password := options.get("redisPassword")) is None:
        return {}
    _set(container, {"REDIS_PASSWORD": password.get("valueFrom", password.get("value", ""))})
    return {"redis-password": "$REDIS_PASSWORD"}


def _add_shared_memory(pod: Pod, container: dict[str, Any]) -> None:
    mounts = container.setdefault("volumeMounts", [])
    if all(mount["mountPath"] != _SHM["mountPath"] for mount in mounts):
        mounts.append(dict(_SHM))
        memory = {"name": _SHM["name"], "emptyDir": {"medium": "Memory"}}
        pod["spec"].setdefault("volumes", []).append(memory)


def _add_probes(container: dict[str, Any]) -> None:
    """KubeRay asks Ray's agent, which serves HTTP only where Ray was installed as `ray[default]`;
    here the raylet's socket is looked for."""
    container.setdefault("livenessProbe", _HAS_RAYLET | {"failureThreshold": 120})
    container.setdefault("readinessProbe", _HAS_RAYLET | {"failureThreshold": 10})


def _add(container: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Where the template does not say otherwise."""
    known = {each["name"] for each in container.get("env") or ()}
    _set(container, {name: value for name, value in values.items() if name not in known})


def _set(container: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Behind what there is: of two with one name the last one holds. Values: text, or a source."""
    env = container.setdefault("env", [])
    for name, value in values.items():
        key = "value" if isinstance(value, str) else "valueFrom"
        env.append({"name": name, key: value})


def _labels(
    cluster: Mapping[str, Any], kind: str, group_name: str, own: Mapping[str, str]
) -> dict[str, str]:
    """The template's own, but for those by which KubeRay finds its pods."""
    name = cluster["metadata"]["name"]
    fixed = {CLUSTER_LABEL: name, TYPE_LABEL: kind, GROUP_LABEL: group_name}
    usual = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{name}-{kind}",
        _APP_LABEL: "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    return {**usual, **own, **fixed}


def _owner(cluster: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "name": cluster["metadata"]["name"],
        "uid": cluster["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _head_name(cluster: Mapping[str, Any]) -> str:
    """Fully qualified."""
    return f"{service_name(cluster)}.{cluster['metadata']['namespace']}.svc.cluster.local"


def _head_port(cluster: Mapping[str, Any]) -> str:
    params = cluster["spec"]["headGroupSpec"].get("rayStartParams") or {}
    return str(params.get("port", GCS_PORT))


def _ray_start(is_head: bool, params: Mapping[str, str]) -> str:
    """A shell's command line: values stand in it as they are, quotes and all."""
    options = "".join(_option(name, value) for name, value in sorted(params.items()))
    return f"ray start {'--head ' if is_head else ''}{options}"


def _params(group: Mapping[str, Any]) -> dict[str, str]:
    container = group["template"]["spec"]["containers"][0]
    return {
        "metrics-export-port": str(METRICS_PORT),
        "dashboard-agent-listen-port": str(AGENT_PORT),
        **_resources(container.get("resources") or {}),
        **(group.get("rayStartParams") or {}),
        "block": "true",
    }


def _resources(resources: Mapping[str, Any]) -> dict[str, str]:
    """What Ray counts as the node's; a CPU that is only requested counts, too."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    params = {}
    if cpus := limits.get("cpu", requests.get("cpu")):
        params["num-cpus"] = str(math.ceil(quantity(cpus)))
    if memory := limits.get("memory"):
        params["memory"] = str(math.ceil(quantity(memory)))
    gpus = [count for name, count in sorted(limits.items()) if name.endswith("gpu")]
    if gpus and quantity(gpus[0]):
        params["num-gpus"] = str(math.ceil(quantity(gpus[0])))
    return params


def _option(name: str, value: str) -> str:
    if value.lower() in ("true", "false") and name not in _WITH_WORD:
        return f" --{name} " if value.lower() == "true" else ""
    return f" --{name}={value} "


def quantity(said: str | int | float) -> float:
    """Kubernetes' way to write a number: 500m, 8Gi."""
    found = _QUANTITY.fullmatch(str(said))
    assert found is not None, f"no quantity: {said}"
    return float(found[1]) * _UNITS.get(found[2], 1)


def quoted(resources: Mapping[str, float]) -> str:
    """For `rayStartParams.resources`, which goes through a shell."""
    return json.dumps(json.dumps(resources))
