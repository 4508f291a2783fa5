"""The RayClusters of a ServingCluster, as the API server has them."""

from __future__ import annotations

from typing import Any

from deploy.controller.manifests.common import CLUSTER_LABEL
from tests.k8s.control_plane.plane import ControlPlane


def units_of(
    control_plane: ControlPlane, namespace: str, cluster: str = "default"
) -> list[dict[str, Any]]:
    """There is one at most, but for what a test is to find out."""
    label = f"{CLUSTER_LABEL}={cluster}"
    listed = control_plane.read("rayclusters.ray.io", "-n", namespace, "-l", label)
    found: list[dict[str, Any]] = listed["items"]
    return found


def unit_of(
    control_plane: ControlPlane, namespace: str, cluster: str = "default"
) -> dict[str, Any] | None:
    """None: there is none."""
    found = units_of(control_plane, namespace, cluster)
    assert len(found) <= 1, "never two units"
    return found[0] if found else None


def group_sizes_in(ray_cluster: dict[str, Any]) -> dict[str, int]:
    """Of worker groups, by pool."""
    groups = ray_cluster["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group["replicas"] for group in groups}
