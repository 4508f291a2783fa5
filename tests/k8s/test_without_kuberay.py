"""The operator on a real API server that does not know KubeRay's kind: it says so, and goes on by
itself once it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import condition, eventually, operator_of
from tests.k8s.ray_cluster_crd import serve_ray_clusters
from tests.k8s.test_crds import cluster
from tests.k8s.units import unit_of

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters")

RAY = "crd/rayclusters.ray.io"
BACK_WITHIN_S = 40.0
"""The kind is asked for every 10 s, each cluster is looked at every 5 s."""


@pytest.fixture
def no_kuberay(control_plane: ControlPlane, ray_clusters: None) -> Iterator[None]:
    if control_plane.servers is None:
        pytest.skip("somebody else's KubeRay is not taken away")
    control_plane.kubectl("delete", RAY, "--timeout=30s")
    yield
    serve_ray_clusters(control_plane)


def told(control_plane: ControlPlane, namespace: str, what: str) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    found = control_plane.read(what, "-n", namespace)
    conditions: list[dict[str, Any]] = found.get("status", {}).get("conditions", [])
    return {each["type"]: (each["status"], each["reason"]) for each in conditions}


@pytest.mark.usefixtures("no_kuberay")
def test_without_kuberay_it_is_ready_says_so_and_goes_on_once_it_is_there(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    missing = {
        "Available": ("False", "KubeRayMissing"),
        "Progressing": ("False", "KubeRayMissing"),
        "Degraded": ("True", "KubeRayMissing"),
    }
    with operator_of(control_plane, namespace, tmp_path) as operator:
        control_plane.apply(cluster(namespace))
        seen = lambda: told(control_plane, namespace, "servingcluster/main")  # noqa: E731
        eventually(lambda: seen() == missing, "it is told")
        eventually(operator.is_ready, "helm install --wait ends")
        degraded = condition(control_plane.read("servingcluster/main", "-n", namespace), "Degraded")
        assert "rayclusters.ray.io (v1) are not served" in degraded["message"]
        serve_ray_clusters(control_plane)
        eventually(
            lambda: seen().get("Degraded") == ("False", "Sound"), "it goes on", BACK_WITHIN_S
        )
        assert unit_of(control_plane, namespace, "main")
        control_plane.kubectl("delete", RAY, "--timeout=30s")
        for what in ("servingcluster/main", "wp/main-decode"):
            eventually(
                lambda what=what: told(control_plane, namespace, what) == missing,
                f"{what}: KubeRay was taken away",
                BACK_WITHIN_S,
            )
        control_plane.kubectl("-n", namespace, "delete", "servingcluster/main", "--timeout=30s")
