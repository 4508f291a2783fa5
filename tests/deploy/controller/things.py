"""Objects for tests that need some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.controller.kit.objects import Key, Resource

CONFIG_MAPS = Resource("", "v1", "configmaps")
UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
        }
    ],
}
"""A pod's status."""
REFUSED: dict[str, Any] = {
    "status": {
        "conditions": [
            {
                "type": "ReplicaFailure",
                "status": "True",
                "reason": "FailedCreate",
                "message": "pods is forbidden: exceeded quota: gpus",
            }
        ]
    }
}
"""A Deployment or RayCluster whose pods cannot be made."""


def config_map(
    key: Key, data: Mapping[str, str] | None = None, version: str | None = None
) -> dict[str, Any]:
    metadata = {"namespace": key.namespace, "name": key.name}
    if version is not None:
        metadata["resourceVersion"] = version
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": dict(data or {}),
    }


def config_map_list(
    *items: Mapping[str, Any], version: str = "1", token: str | None = None
) -> dict[str, Any]:
    """As an API server answers: the items lack their kind."""
    bare = [{k: v for k, v in item.items() if k not in ("apiVersion", "kind")} for item in items]
    metadata = {"resourceVersion": version} | ({"continue": token} if token is not None else {})
    return {"apiVersion": "v1", "kind": "ConfigMapList", "metadata": metadata, "items": bare}


def gone() -> dict[str, Any]:
    message = "too old resource version: 1 (100)"
    return {"kind": "Status", "code": 410, "reason": "Expired", "message": message}
