"""The operator on a real API server that does not know KubeRay's kind: it says so, and goes on by
itself once it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.open_crd import serve_ray_clusters
from tests.k8s.operating import Operator, eventually
from tests.k8s.seen import Seen

RAY = "crd/rayclusters.ray.io"


@pytest.fixture
def no_kuberay(control_plane: ControlPlane, crds: None, ray_clusters: None) -> Iterator[None]:
    if control_plane.servers is None:
        pytest.skip("somebody else's KubeRay is not taken away")
    control_plane.kubectl("delete", RAY, "--timeout=30s")
    yield
    serve_ray_clusters(control_plane)


def test_without_kuberay_it_is_ready_says_so_and_goes_on_once_it_is_there(
    no_kuberay: None, control_plane: ControlPlane, operator: Operator, seen: Seen
) -> None:
    def is_missing(what: str) -> bool:
        conditions = (seen.soon(what).get("status") or {}).get("conditions") or []
        reasons = {each["type"]: (each["status"], each["reason"]) for each in conditions}
        return reasons == {
            "Available": ("False", "KubeRayMissing"),
            "Progressing": ("False", "KubeRayMissing"),
            "Degraded": ("True", "KubeRayMissing"),
        }

    seen.make()
    eventually(lambda: is_missing("servingcluster/main"), "it is reported")
    eventually(operator.is_ready, "helm install --wait ends")
    message = seen.condition("servingcluster/main", "Degraded")["message"]
    assert "rayclusters.ray.io (v1) are not served" in message
    serve_ray_clusters(control_plane)
    seen.condition_soon("servingcluster/main", "Degraded", "Sound")
    assert seen.unit()
    control_plane.kubectl("delete", RAY, "--timeout=30s")
    for what in ("servingcluster/main", "wp/main-decode"):
        eventually(lambda what=what: is_missing(what), f"{what}: KubeRay was taken away")
    seen.kubectl("delete", "servingcluster/main", "--timeout=30s")
