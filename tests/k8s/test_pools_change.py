"""Pools that come and go, and settings that change, while 50 streams run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import condition, eventually
from tests.k8s.patches import check_patches
from tests.k8s.streaming import streaming
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine
from tests.k8s.units import group_sizes_in, unit_of, units_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.cluster,
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NUM_TOKENS = 150
CHANGED_WITHIN_S = 400.0
POOLS: dict[str, Any] = {
    "prefill": {"role": "prefill"},
    "decode": {"role": "decode", "initialReplicas": 2},
}


@pytest.fixture
def installed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Installed:
    made = Installed(control_plane, namespace, tmp_path)
    made.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        pools=POOLS,
        router={"replicas": 1},
    )
    made.wait_available()
    eventually(lambda: is_whole(made, "decode", 2), "both decode workers are live", 150)
    return made


def change(control_plane: ControlPlane, namespace: str, **pools: Any) -> None:
    """None takes a pool away."""
    patch = json.dumps({"spec": {"pools": pools}})
    control_plane.kubectl(
        "-n", namespace, "patch", "servingcluster/default", "--type=merge", "-p", patch
    )


def is_whole(installed: Installed, pool: str, replicas: int) -> bool:
    """All of its workers serve, and no other one is left."""
    found = installed.read(f"wp/{pool}")
    status = found.get("status", {})
    told = [status.get(name) for name in ("readyReplicas", "replicas")]
    is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
    return is_seen and told == [replicas] * 2 and not status.get("draining")


def unit_named(installed: Installed) -> str:
    """By the ServingCluster's status."""
    return str(installed.read("servingcluster/default")["status"].get("unit"))


def test_a_version_that_does_not_start_leaves_the_one_before_as_it_is(
    installed: Installed, control_plane: ControlPlane, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    before = unit_of(control_plane, installed.namespace)
    assert before
    broken = {"name": "ray-worker", "args": ["echo this version is broken; exit 3"]}
    template = {"spec": {"containers": [broken]}}
    with streaming(kubelet, NUM_TOKENS) as streams:
        change(control_plane, installed.namespace, decode={"podTemplate": template})

        def is_stuck() -> bool:
            streams.check()
            told = condition(installed.read("servingcluster/default"), "Progressing")
            return "exit code 3" in told.get("message", "")

        eventually(is_stuck, "the cluster says what keeps it from starting", 240)
        assert len(units_of(control_plane, installed.namespace)) == 2
        change(control_plane, installed.namespace, decode={"podTemplate": None})
        is_alone = lambda: len(units_of(control_plane, installed.namespace)) == 1  # noqa: E731
        eventually(is_alone, "the version before serves alone", CHANGED_WITHIN_S)
        streams.wait_round()
    after = unit_of(control_plane, installed.namespace)
    assert after
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert is_whole(installed, "decode", 2)


def test_a_pool_is_added_to_a_running_cluster_and_taken_away_again(
    installed: Installed, control_plane: ControlPlane, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    before = unit_of(control_plane, installed.namespace)
    assert before
    with streaming(kubelet, NUM_TOKENS) as streams:
        change(control_plane, installed.namespace, more={"role": "decode"})
        eventually(lambda: "more" in pools_of(installed), "there is one", 30)
        eventually(lambda: is_whole(installed, "more", 1), "its worker is live", CHANGED_WITHIN_S)
        streams.check()
        change(control_plane, installed.namespace, more=None)
        eventually(lambda: "more" not in pools_of(installed), "it is gone", CHANGED_WITHIN_S)
        streams.check()
    unit = unit_of(control_plane, installed.namespace)
    assert unit
    assert unit["metadata"]["uid"] == before["metadata"]["uid"], "it stays the same unit"
    assert group_sizes_in(unit) == {"prefill": 1, "decode": 2}
    assert len(check_patches(kuberay)) == 1


def test_a_pool_that_is_deleted_and_that_the_spec_names_serves_on(
    installed: Installed, control_plane: ControlPlane, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    labels = "app.kubernetes.io/component=worker"
    names = {pod["metadata"]["name"] for pod in kubelet.pods(labels)}
    before = installed.read("wp/decode")["metadata"]["uid"]
    with streaming(kubelet, NUM_TOKENS) as streams:
        arguments = ("-n", installed.namespace, "delete", "wp/decode", "--timeout=30s")
        control_plane.kubectl(*arguments)
        is_again = lambda: "decode" in pools_of(installed)  # noqa: E731
        eventually(is_again, "it is made again", 30)
        assert installed.read("wp/decode")["metadata"]["uid"] != before
        eventually(lambda: is_whole(installed, "decode", 2), "both workers are its own", 60)
        rounds = streams.num_rounds
        eventually(lambda: streams.num_rounds > rounds + 1, "streams begin and end", 120)
        streams.check()
    assert {pod["metadata"]["name"] for pod in kubelet.pods(labels)} == names


def pools_of(installed: Installed) -> set[str]:
    return {pool["metadata"]["name"] for pool in installed.read("wp")["items"]}
