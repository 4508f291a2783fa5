"""ServingClusters, their pools and their RayClusters, as the API server has them."""

from __future__ import annotations

from typing import Any

from deploy.api.naming import API_VERSION
from deploy.controller.manifests.common import CLUSTER_LABEL
from tests.k8s.control_plane.plane import ControlPlane

BAD_ROUTER = {"podTemplate": {"spec": {"containers": ["x"]}}}
"""Every API server takes it, with CEL or without, since no schema goes into templates. The operator
refuses it by the name of its field."""
BAD_FIELD = "spec.router.podTemplate.spec.containers[0]"


def cluster(namespace: str, name: str = "main", **spec: Any) -> dict[str, Any]:
    usual = {
        "model": {"name": "models/demo"},
        "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
    }
    metadata = {"name": name, "namespace": namespace}
    return {
        "apiVersion": API_VERSION,
        "kind": "ServingCluster",
        "metadata": metadata,
        "spec": usual | spec,
    }


def pool(namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "WorkerPool",
        "metadata": {"name": "decode", "namespace": namespace},
        "spec": {"role": "decode", "cluster": "main", "pool": "decode"} | spec,
    }


def units_of(
    control_plane: ControlPlane, namespace: str, cluster: str = "default"
) -> list[dict[str, Any]]:
    """The RayClusters of a ServingCluster."""
    label = f"{CLUSTER_LABEL}={cluster}"
    listed = control_plane.read("rayclusters.ray.io", "-n", namespace, "-l", label)
    found: list[dict[str, Any]] = listed["items"]
    return found


def unit_of(
    control_plane: ControlPlane, namespace: str, cluster: str = "default"
) -> dict[str, Any] | None:
    """The only RayCluster of a ServingCluster; None: there is none."""
    found = units_of(control_plane, namespace, cluster)
    assert len(found) <= 1, "never two units"
    return found[0] if found else None


def group_sizes_in(ray_cluster: dict[str, Any]) -> dict[str, int]:
    """The replicas of its worker groups, by pool."""
    groups = ray_cluster["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group["replicas"] for group in groups}
