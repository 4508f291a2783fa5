"""Pure: the nodes that pods are given to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from deploy.controller.kit.objects import Resource
from tests.k8s.kubelet.container import now_text

NODES = Resource("", "v1", "nodes", namespaced=False)
_HAS = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}


def node(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": own | dict(labels)},
        "spec": {},
    }


def node_status(address: str) -> dict[str, Any]:
    now = now_text()
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "the tests' kubelet",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {
        "capacity": _HAS,
        "allocatable": _HAS,
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [ready],
    }


def place_for(
    pod: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]], pods: Collection[Mapping[str, Any]]
) -> str | None:
    """The node that has the fewest pods, of those that take this one; None when none does."""
    wanted = (pod["spec"].get("nodeSelector") or {}).items()
    fit = [
        each["metadata"]["name"]
        for each in nodes
        if not each["spec"].get("unschedulable")
        and wanted <= (each["metadata"].get("labels") or {}).items()
    ]
    counts = {name: sum(p["spec"].get("nodeName") == name for p in pods) for name in fit}
    return min(fit, key=lambda name: (counts[name], name), default=None)
