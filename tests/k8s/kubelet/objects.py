"""Objects for tests of pods, and what is read of pods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.controller.kit.objects import Object
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.hosts import is_ready
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import condition, eventually

_EVICTION_V1_SINCE = (1, 22)


def python(program: str, *arguments: str) -> list[str]:
    return ["python", "-c", program, *arguments]


def container(name: str, command: Sequence[str], **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "not-looked-at", "command": list(command), **more}


def pod_spec(*containers: Mapping[str, Any], grace_s: int = 10, **more: Any) -> dict[str, Any]:
    return {"containers": containers, "terminationGracePeriodSeconds": grace_s, **more}


def pod(namespace: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def deployment(namespace: str, name: str, replicas: int, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Its pods have the label app=NAME."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def service(namespace: str, name: str, port: int) -> dict[str, Any]:
    """Of the pods with the label app=NAME."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": name}, "ports": [{"name": "x", "port": port}]},
    }


def secret(namespace: str, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(texts)}


def env_of(variable: str, kind: str, name: str, key: str) -> dict[str, Any]:
    """`kind`: configMapKeyRef or secretKeyRef."""
    return {"name": variable, "valueFrom": {kind: {"name": name, "key": key}}}


def evict(control_plane: ControlPlane, namespace: str, pod_name: str) -> None:
    """As `kubectl drain` does. Raises CommandError where a disruption budget is in the way."""
    version = "v1" if control_plane.version() >= _EVICTION_V1_SINCE else "v1beta1"
    eviction = {
        "apiVersion": f"policy/{version}",
        "kind": "Eviction",
        "metadata": {"name": pod_name, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{pod_name}/eviction"
    control_plane.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def until_ready(kubelet: Kubelet, labels: str, num_pods: int = 1) -> list[Object]:
    """The pods, by name, once there are `num_pods` and all are ready."""
    found: list[Object] = []

    def are_ready() -> bool:
        found[:] = kubelet.pods(labels)
        return len(found) == num_pods and all(map(is_ready, found))

    eventually(are_ready, f"{num_pods} pods {labels} are ready")
    return sorted(found, key=name_of)


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def is_unschedulable(pod: Object) -> bool:
    return condition(pod, "PodScheduled").get("reason") == "Unschedulable"


def num_restarts(kubelet: Kubelet, labels: str) -> int:
    """Of all containers of these pods."""
    return sum(map(restarts_of, kubelet.pods(labels)))


def restarts_of(pod: Object) -> int:
    """Of all its containers."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return sum(int(status["restartCount"]) for status in statuses)
