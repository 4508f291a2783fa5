"""A ServingCluster is deleted: streams that run end as ever, and nothing of it is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import eventually, operator_of
from tests.k8s.streaming import NUM_STREAMS, Streaming, streaming
from tests.k8s.test_crds import cluster
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crds"),
]

NUM_TOKENS = 600
ROUTER = {"localPrefill": "never", "drainTimeoutSeconds": 1.0}
"""A router that goes before the streams have ended loses them."""
KINDS = (
    "servingclusters,workerpools,rayclusters.ray.io,deployments,replicasets,pods,services,"
    "configmaps,secrets,serviceaccounts,poddisruptionbudgets,networkpolicies"
)


@pytest.fixture
def installed(
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    kubelet: Kubelet,
    kuberay: KubeRay,
) -> Installed:
    made = Installed(control_plane, namespace, tmp_path)
    made.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router=ROUTER),
        router={"replicas": 1},
    )
    made.wait_available()
    return made


class Deletion:
    """Of the release's ServingCluster, and what is left of it."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self._namespace = control_plane, namespace

    def begin(self) -> None:
        self._kubectl("delete", "servingcluster/default", "--wait=false")

    def left(self) -> list[str]:
        """What the operator made, and what was made of that; the release's own is none of it."""
        items = self._control_plane.read(KINDS, "-n", self._namespace)["items"]
        return [
            f"{item['kind']}/{item['metadata']['name']}"
            for item in items
            if item["kind"] in ("ServingCluster", "WorkerPool", "RayCluster")
            or item["metadata"].get("labels", {}).get("app.kubernetes.io/instance") == "default"
            or "ray.io/cluster" in item["metadata"].get("labels", {})
        ]

    def wait_over(self) -> None:
        eventually(lambda: not self.left(), "nothing is left", 120)

    def scale_operator(self, replicas: int) -> None:
        component = "app.kubernetes.io/component=operator"
        self._kubectl("scale", "deployment", "-l", component, f"--replicas={replicas}")

    def _kubectl(self, *arguments: str) -> None:
        self._control_plane.kubectl("-n", self._namespace, *arguments)


def wait_all_run(streams: Streaming) -> None:
    def all_run() -> bool:
        streams.check()
        return streams.num_running == NUM_STREAMS

    eventually(all_run, "all streams of a round run", 60)


def test_streams_that_run_end_with_all_their_tokens_and_then_nothing_is_left(
    control_plane: ControlPlane, namespace: str, installed: Installed, kubelet: Kubelet
) -> None:
    deletion = Deletion(control_plane, namespace)
    assert any(name.startswith("RayCluster/") for name in deletion.left())
    with streaming(kubelet, NUM_TOKENS) as streams:
        wait_all_run(streams)
        streams.enough()
        deletion.begin()
        eventually(lambda: _draining(installed), "the decode pool drains", 60)
        assert streams.num_running == NUM_STREAMS, "it was told in time"
    assert streams.num_rounds == 2
    deletion.wait_over()


def test_a_cluster_that_is_deleted_while_no_operator_runs_goes_on_until_one_is_back(
    control_plane: ControlPlane, namespace: str, installed: Installed, kubelet: Kubelet
) -> None:
    deletion = Deletion(control_plane, namespace)
    with streaming(kubelet, NUM_TOKENS) as streams:
        deletion.scale_operator(0)
        operator = "app.kubernetes.io/component=operator"
        eventually(lambda: not kubelet.pods(operator), "the operator is down", 60)
        deletion.begin()
        rounds = streams.num_rounds
        eventually(lambda: streams.num_rounds >= rounds + 2, "new streams are taken", 120)
        streams.check()
        wait_all_run(streams)
        streams.enough()
        deletion.scale_operator(1)
    deletion.wait_over()


def test_the_account_that_empties_the_redis_of_rays_head_goes_after_it(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, kuberay: KubeRay
) -> None:
    """Nothing runs the pods here."""
    made = cluster(
        namespace,
        pools={"decode": {"role": "decode", "initialReplicas": 0}},
        ray={"gcsFaultTolerance": {"redisAddress": "redis:6379"}},
    )
    made["metadata"]["name"] = "default"
    deletion = Deletion(control_plane, namespace)
    with operator_of(control_plane, namespace, tmp_path):
        control_plane.apply(made)
        eventually(lambda: _num_of_heads(deletion), "the head has a pod", 60)
        deletion.begin()
        deletion.wait_over()


def _num_of_heads(deletion: Deletion) -> int:
    return sum(name.startswith("Pod/default-") and "-head-" in name for name in deletion.left())


def _draining(installed: Installed) -> list[object]:
    found: list[object] = installed.read("wp/decode").get("status", {}).get("draining") or []
    return found
