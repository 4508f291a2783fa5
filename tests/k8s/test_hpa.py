"""A HorizontalPodAutoscaler scales a pool: Kubernetes' own controller reads and writes /scale."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.api.naming import API_VERSION
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually
from tests.k8s.seen import Seen

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crds", "ray_clusters", "operator"),
]

V2_SINCE = (1, 23)
LEAST, MOST = 2, 4
ACTS_WITHIN_S = 120.0
"""It looks every 15 s, and for new kinds every 30 s."""


def version_of(control_plane: ControlPlane) -> str:
    """Of autoscalers, the newest that is served."""
    return "v2" if control_plane.version() >= V2_SINCE else "v2beta2"


def autoscaler(control_plane: ControlPlane, namespace: str, pool: str) -> dict[str, Any]:
    """Which goes by the processors that the pods use, as most do."""
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


def test_an_hpa_scales_a_pool_and_the_operator_follows_and_never_writes_its_size(
    control_plane: ControlPlane, namespace: str, seen: Seen
) -> None:
    if not control_plane.has_controllers:
        pytest.skip("nobody looks at HorizontalPodAutoscalers here")
    decode = {"role": "decode", "maxReplicas": MOST, "scaling": {"mode": "hpa"}}
    seen.make(pools={"prefill": {"role": "prefill"}, "decode": decode})
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/workerpools/main-decode/scale"

    def scale() -> Any:
        return json.loads(seen.kubectl("get", "--raw", path))

    def size() -> int:
        return int(scale()["spec"]["replicas"])

    seen.soon("wp/main-decode")
    eventually(lambda: scale()["status"].get("selector"), "its pods' selector is reported")
    assert scale()["status"]["selector"] == f"{CLUSTER_LABEL}=main,{POOL_LABEL}=decode"
    assert size() == 1
    control_plane.apply(autoscaler(control_plane, namespace, "main-decode"))
    what = "the HPA has given it its least size"
    eventually(lambda: size() == LEAST, what, ACTS_WITHIN_S)
    seen.wait_for_size("decode", LEAST)
    hpa = f"hpa.{version_of(control_plane)}.autoscaling/main-decode"

    def condition_is(kind: str, status: str, reason: str) -> bool:
        found = seen.condition(hpa, kind)
        return (found.get("status"), found.get("reason")) == (status, reason)

    reads = lambda: condition_is("AbleToScale", "True", "SucceededGetScale")  # noqa: E731
    eventually(reads, "it reads /scale", ACTS_WITHIN_S)
    # Nobody measures here; it knows of which pods it would have to be.
    asks = lambda: condition_is("ScalingActive", "False", "FailedGetResourceMetric")  # noqa: E731
    eventually(asks, "it asks for the pods' metrics")
    assert size() == LEAST, "nobody has written it back"
