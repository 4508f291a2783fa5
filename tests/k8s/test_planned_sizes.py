"""One writer of a pool's size at a time: where the planner is that, what a person sets is the
planner's again, and people read so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import eventually
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

PLANNER = {
    "panicWindowSeconds": 2.0,
    "stableWindowSeconds": 6.0,
    "scaleInHoldSeconds": 1.0,
    "warmUpSeconds": 1.0,
}
PLANNED = {
    "role": "decode",
    "initialReplicas": 1,
    "minReplicas": 1,
    "maxReplicas": 2,
    "scaling": {"mode": "planner"},
}
PLANNED_WITHIN_S = 90.0
"""A loaded machine's; the planner looks every few seconds."""


def test_what_a_person_scales_in_planner_mode_is_the_planners_again_and_is_told(
    control_plane: ControlPlane,
    namespace: str,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, planner=PLANNER),
        pools={"decode": PLANNED},
        router={"replicas": 1},
    )
    installed.wait_available()
    installed.scale("decode", 2)

    def size() -> int:
        return int(installed.read("wp/decode")["spec"]["replicas"])

    eventually(lambda: size() == 1, "nothing is asked for: one is enough", PLANNED_WITHIN_S)

    def events() -> str:
        described = control_plane.kubectl("-n", namespace, "describe", "wp/decode")
        return described.partition("Events:")[2]

    eventually(lambda: "ScaledIn" in events(), "it is told")
    told = events()
    for reason, message in (
        ("ScaledOut", "from 1 to 2 replicas"),
        ("Planned", "from 2 to 1 replicas: "),
        ("ScaledIn", "from 2 to 1 replicas"),
    ):
        assert any(reason in line and message in line for line in told.splitlines()), told
    assert installed.read("wp/decode")["status"]["desiredReplicas"] == 1
