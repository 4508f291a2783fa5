"""Ray's head is lost with its whole pod, under 50 streams, where the chart's own Redis keeps its
state: nobody but the head notices."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.errors import BatonError
from deploy.controller.manifests.common import POOL_LABEL
from tests.k8s.addresses import HEAD
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.objects import name_of, restarts_of
from tests.k8s.operating import condition, eventually
from tests.k8s.streaming import streaming
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine, workers_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
    pytest.mark.skipif(
        shutil.which("redis-server") is None,
        reason="NO REDIS ON THIS MACHINE: redis-server is not on PATH (Debian's package of that "
        "name has it), so nobody shows that a lost head costs no worker",
    ),
]

NUM_TOKENS = 600
BACK_WITHIN_S = 150.0


class Cluster:
    """What runs of the release's ServingCluster."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def head(self) -> str:
        (pod,) = self._kubelet.pods(HEAD)
        return name_of(pod)

    def worker_pods(self) -> list[tuple[str, int]]:
        """Each one's identity, and how often its containers were started again."""
        return sorted(
            (pod["metadata"]["uid"], restarts_of(pod)) for pod in self._kubelet.pods(POOL_LABEL)
        )

    def workers(self) -> dict[str, str]:
        """Their pods, by worker; empty while no supervisor tells."""
        try:
            pools = ("prefill", "decode")
            return {w: p for pool in pools for w, p in workers_of(self._kubelet, pool).items()}
        except (BatonError, KeyError, ValueError):  # no answer, no address, no pod
            return {}


def test_a_head_that_is_lost_costs_no_stream_and_no_worker(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path, has_redis=True)
    installed.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        pools={"prefill": {"role": "prefill"}, "decode": {"role": "decode", "initialReplicas": 2}},
        router={"replicas": 1},
    )
    installed.wait_available()
    spec = installed.read("servingcluster/default")["spec"]
    assert spec["ray"]["gcsFaultTolerance"]["redisAddress"] == "default-redis:6379"
    cluster = Cluster(kubelet)
    eventually(lambda: len(cluster.workers()) == 3, "all three workers are live", BACK_WITHIN_S)
    workers, pods, lost = cluster.workers(), cluster.worker_pods(), cluster.head()
    with streaming(kubelet, NUM_TOKENS) as streams:
        streams.wait_round()
        end = ("delete", "pod", lost, "--grace-period=0", "--force")
        control_plane.kubectl("-n", namespace, *end)

        def is_back() -> bool:
            streams.check()
            heads = kubelet.pods(HEAD)
            return [name_of(pod) != lost for pod in heads] == [True] and bool(cluster.workers())

        eventually(is_back, "another head's supervisor tells of workers", BACK_WITHIN_S)

        def is_whole() -> bool:
            streams.check()
            told = condition(installed.read("servingcluster/default"), "Available")
            return told["status"] == "True" and cluster.workers() == workers

        eventually(is_whole, "it tells of all of them", BACK_WITHIN_S)
        rounds = streams.num_rounds
        eventually(lambda: streams.num_rounds >= rounds + 2, "streams go on", BACK_WITHIN_S)
        streams.check()
    assert cluster.worker_pods() == pods
    assert cluster.workers() == workers
