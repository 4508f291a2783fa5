"""A HorizontalPodAutoscaler scales a pool: Kubernetes' own controller reads and writes /scale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.api.naming import API_VERSION
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import Operator, condition, eventually, operator_of
from tests.k8s.test_crds import cluster
from tests.k8s.units import group_sizes_in, unit_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crds", "ray_clusters"),
]

V2_SINCE = (1, 23)
LEAST, MOST = 2, 4
ACTS_WITHIN_S = 120.0
"""It looks every 15 s, and for new kinds every 30 s."""


def version_of(control_plane: ControlPlane) -> str:
    """Of autoscalers, the newest that is served."""
    return "v2" if control_plane.version() >= V2_SINCE else "v2beta2"


def autoscaler(control_plane: ControlPlane, namespace: str, pool: str) -> dict[str, Any]:
    """Which is told of the processors that the pods use, as most are."""
    target = {"type": "Utilization", "averageUtilization": 50}
    return {
        "apiVersion": f"autoscaling/{version_of(control_plane)}",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": pool, "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": "WorkerPool", "name": pool},
            "minReplicas": LEAST,
            "maxReplicas": MOST,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        },
    }


class Pool:
    """`decode` of a ServingCluster called `default`, whose size an HPA sets."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self._namespace = control_plane, namespace
        self._version = version_of(control_plane)

    def read(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = self._control_plane.read(what, "-n", self._namespace)
        return found

    def scale(self) -> dict[str, Any]:
        """Its subresource, as whoever scales it sees it."""
        path = f"/apis/{API_VERSION}/namespaces/{self._namespace}/workerpools/decode/scale"
        found: dict[str, Any] = json.loads(self._control_plane.kubectl("get", "--raw", path))
        return found

    def told(self, kind: str) -> tuple[str, str]:
        """A condition of the autoscaler: its status and reason."""
        found = condition(self.read(f"hpa.{self._version}.autoscaling/decode"), kind)
        return found.get("status", ""), found.get("reason", "")

    def asked_for(self) -> int:
        """Pods, of KubeRay."""
        unit = unit_of(self._control_plane, self._namespace)
        return 0 if unit is None else group_sizes_in(unit)["decode"]


@pytest.fixture
def operator(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Operator]:
    if not control_plane.has_controllers:
        pytest.skip("nobody looks at HorizontalPodAutoscalers here")
    with operator_of(control_plane, namespace, tmp_path) as running:
        yield running


def test_an_hpa_scales_a_pool_and_the_operator_follows_and_never_writes_its_size(
    control_plane: ControlPlane, namespace: str, operator: Operator
) -> None:
    pools = {
        "prefill": {"role": "prefill"},
        "decode": {"role": "decode", "maxReplicas": MOST, "scaling": {"mode": "hpa"}},
    }
    made = cluster(namespace, pools=pools)
    made["metadata"]["name"] = "default"
    control_plane.apply(made)
    pool = Pool(control_plane, namespace)
    eventually(lambda: control_plane.kubectl("-n", namespace, "get", "wp", "-o", "name"), "pools")
    eventually(lambda: pool.scale()["status"].get("selector"), "its pods' selector is told")
    assert pool.scale()["status"]["selector"] == f"{CLUSTER_LABEL}=default,{POOL_LABEL}=decode"
    assert pool.scale()["spec"]["replicas"] == 1
    control_plane.apply(autoscaler(control_plane, namespace, "decode"))

    is_scaled = lambda: pool.scale()["spec"]["replicas"] == LEAST  # noqa: E731
    eventually(is_scaled, "the HPA has given it its least size", ACTS_WITHIN_S)
    eventually(lambda: pool.asked_for() == LEAST, "the operator follows")
    well = ("True", "SucceededGetScale")
    eventually(lambda: pool.told("AbleToScale") == well, "it reads /scale", ACTS_WITHIN_S)
    unmeasured = (
        "False",
        "FailedGetResourceMetric",
    )  # nobody measures here; of which pods it knows
    eventually(lambda: pool.told("ScalingActive") == unmeasured, "it asks for the pods' metrics")
    assert pool.scale()["spec"]["replicas"] == LEAST, "nobody has written it back"
