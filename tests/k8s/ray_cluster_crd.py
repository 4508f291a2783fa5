"""KubeRay's RayCluster, trimmed: an API server of 1.20 rejects today's schema."""

from __future__ import annotations

from typing import Any

from deploy.controller.resources import RAY_CLUSTERS
from tests.k8s.open_crd import open_crd


def ray_cluster_crd() -> dict[str, Any]:
    return open_crd(RAY_CLUSTERS, "RayCluster")
