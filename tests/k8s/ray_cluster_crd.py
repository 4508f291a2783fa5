"""KubeRay's RayCluster, trimmed: an API server of 1.20 rejects today's schema."""

from __future__ import annotations

from typing import Any

_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def ray_cluster_crd() -> dict[str, Any]:
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {"type": "object", "properties": {"spec": _OPEN, "status": _OPEN}}
        },
        "subresources": {"status": {}},
    }
    names = {
        "kind": "RayCluster",
        "listKind": "RayClusterList",
        "plural": "rayclusters",
        "singular": "raycluster",
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayclusters.ray.io"},
        "spec": {"group": "ray.io", "names": names, "scope": "Namespaced", "versions": [version]},
    }
