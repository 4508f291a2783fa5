"""KubeRay's RayCluster, trimmed: an API server of 1.20 rejects today's schema."""

from __future__ import annotations

from typing import Any

from deploy.controller.resources import RAY_CLUSTERS
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.open_crd import open_crd, wait_served


def ray_cluster_crd() -> dict[str, Any]:
    return open_crd(RAY_CLUSTERS, "RayCluster")


def serve_ray_clusters(control_plane: ControlPlane) -> None:
    """From now on; nobody turns one into pods."""
    control_plane.apply(ray_cluster_crd())
    wait_served(control_plane, "rayclusters.ray.io")
