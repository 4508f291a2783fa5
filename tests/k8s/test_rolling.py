"""Pools that become others while 50 streams run: a setting that changes, one that cannot start, a
pool that comes and one that goes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.control_client import ControlClient
from baton.errors import BatonError
from baton.v1 import control_pb2
from deploy.controller.manifests.ray_cluster import revision_in
from tests.k8s.addresses import control_address
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import condition, eventually
from tests.k8s.patches import check_patches
from tests.k8s.streaming import streaming
from tests.k8s.test_serving import FAKE, MODEL, Installed

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.cluster,
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NUM_TOKENS = 150
ROLLED_WITHIN_S = 600.0
POOLS: dict[str, Any] = {
    "prefill": {"role": "prefill"},
    "decode": {
        "role": "decode",
        "initialReplicas": 2,
        "rollout": {"maxSurge": 1, "maxUnavailable": 0, "readyTimeout": "10m"},
    },
}
STOPS_SOON = {"rollout": {"readyTimeout": "30s"}}


class Live:
    """Own a thread that hears of every change of the fleet: the fewest workers of a pool that
    served at once."""

    def __init__(self, address: str, pool: str) -> None:
        self._client, self._pool = ControlClient(address), pool
        self.fewest = 1 << 10
        self._is_over = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="live")
        self._listening = self._thread.submit(self._listen)

    def _listen(self) -> None:
        try:
            for told in self._client.watch_fleet(3600.0):
                live = [
                    worker
                    for worker in told.workers
                    if worker.state == control_pb2.WORKER_STATE_LIVE
                    and worker.info.pool.rpartition("-")[0] == self._pool
                ]
                self.fewest = min(self.fewest, len(live))
        except (BatonError, ValueError):
            if not self._is_over:  # it heard no more of what it is asked about
                raise

    def stop(self) -> None:
        """Raises what it has not heard to the end for."""
        self._is_over = True
        self._client.close()
        self._listening.result(10)
        self._thread.shutdown()


@contextlib.contextmanager
def live_of(kubelet: Kubelet, pool: str) -> Iterator[Live]:
    live = Live(control_address(kubelet), pool)
    try:
        yield live
    finally:
        live.stop()


@pytest.fixture
def installed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Installed:
    made = Installed(control_plane, namespace, tmp_path)
    made.install(
        model={"name": str(MODEL)},
        engine=FAKE,
        pools=POOLS,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
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
    """All workers are of the newest version, and no older one is left."""
    found = installed.read(f"wp/{pool}")
    status = found.get("status", {})
    told = [status.get(name) for name in ("readyReplicas", "updatedReplicas", "replicas")]
    is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
    return is_seen and told == [replicas] * 3 and len(status["revisions"]) == 1


def revisions(installed: Installed, pool: str) -> list[str]:
    found = installed.read(f"wp/{pool}").get("status", {}).get("revisions", [])
    return [each["name"] for each in found]


def most_pods(kuberay: KubeRay, pool: str) -> int:
    """That the RayCluster ever asked for at once, over all revisions."""
    asked: list[int] = []
    for spec in kuberay.specs("default"):
        groups = [each for each in spec["workerGroupSpecs"] if revision_in(each).pool == pool]
        asked.append(sum(group["replicas"] for group in groups))
    return max(asked)


def test_a_pools_setting_is_rolled_under_50_streams_within_surge_and_availability(
    installed: Installed, control_plane: ControlPlane, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    (before,) = revisions(installed, "decode")
    running = streaming(kubelet, NUM_TOKENS)
    with running as streams, live_of(kubelet, "decode") as live:
        change(control_plane, installed.namespace, decode={"engine": {"maxNumSeqs": 48}})

        def is_rolled() -> bool:
            streams.check()
            return before not in revisions(installed, "decode") and is_whole(installed, "decode", 2)

        eventually(is_rolled, "both workers are of the new version", ROLLED_WITHIN_S)
    assert live.fewest == 2, "maxUnavailable is 0"
    assert most_pods(kuberay, "decode") == 3, "maxSurge is 1"
    assert streams.num_rounds >= 2
    assert len(check_patches(kuberay)) == 2, "the workers of the old version"
    told = condition(installed.read("wp/decode"), "Progressing")
    assert (told["status"], told["reason"]) == ("False", "AsWanted")


def test_a_version_that_does_not_start_stops_and_the_old_one_serves_on_until_it_is_gone_back_to(
    installed: Installed, control_plane: ControlPlane, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    (before,) = revisions(installed, "decode")
    running = streaming(kubelet, NUM_TOKENS)
    with running as streams, live_of(kubelet, "decode") as live:
        broken = {"name": "ray-worker", "args": ["echo this version is broken; exit 3"]}
        template = {"spec": {"containers": [broken]}}
        change(control_plane, installed.namespace, decode={"template": template} | STOPS_SOON)

        def is_stopped() -> bool:
            streams.check()
            told = condition(installed.read("wp/decode"), "Progressing")
            return (told["status"], told["reason"]) == ("False", "RolloutStopped")

        eventually(is_stopped, "the rollout stops", 240)
        told = condition(installed.read("wp/decode"), "Progressing")["message"]
        assert told.startswith("0 of 2 updated")
        told = condition(installed.read("servingcluster/default"), "Progressing")["reason"]
        assert told == "RolloutStopped"
        change(control_plane, installed.namespace, decode={"template": None})
        eventually(lambda: is_whole(installed, "decode", 2), "it is gone back", ROLLED_WITHIN_S)
        streams.check()
    assert revisions(installed, "decode") == [before], "what still ran was used again"
    assert live.fewest == 2
    assert most_pods(kuberay, "decode") == 3
    assert len(check_patches(kuberay)) == 1, "the pod of the version that did not start"


def test_a_pool_is_added_to_a_running_cluster_and_taken_away_again(
    installed: Installed, control_plane: ControlPlane, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    with streaming(kubelet, NUM_TOKENS) as streams:
        change(control_plane, installed.namespace, more={"role": "decode"})
        eventually(lambda: "more" in pools_of(installed), "there is one", 30)
        eventually(lambda: is_whole(installed, "more", 1), "its worker is live", ROLLED_WITHIN_S)
        streams.check()
        change(control_plane, installed.namespace, more=None)
        eventually(lambda: "more" not in pools_of(installed), "it is gone", ROLLED_WITHIN_S)
        streams.check()
    groups = kuberay.specs("default")[-1]["workerGroupSpecs"]
    assert {revision_in(group).pool for group in groups} == {"prefill", "decode"}
    assert len(check_patches(kuberay)) == 1


def pools_of(installed: Installed) -> set[str]:
    return {pool["metadata"]["name"] for pool in installed.read("wp")["items"]}
