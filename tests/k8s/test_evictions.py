"""A pod of a pool is evicted under 50 streams while nobody else can help: no operator runs, and the
API server is gone from right after the eviction. The pod's own `preStop` sees to its drain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.controller.manifests.common import POOL_LABEL
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.objects import evict, name_of
from tests.k8s.operating import eventually
from tests.k8s.streaming import NUM_STREAMS, streaming
from tests.k8s.test_deletion import Deletion
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine, workers_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NUM_TOKENS = 600
OUTLAST_S = 5.0
"""After which others abort what still runs in a pod that is to go (ai-dynamo/dynamo#13565)."""
DRAINED_WITHIN_S = 180.0
_DRAINED = re.compile(r"^pod \S+ is drained after ([\d.]+) s$", re.MULTILINE)
_HELD = re.compile(r"(\d+) running, .*; (\d+) s left$", re.MULTILINE)


class Drain:
    """What the pod's `preStop` says, in its container's own log."""

    def __init__(self, kubelet: Kubelet, pod: str) -> None:
        self._kubelet, self._pod = kubelet, pod

    @property
    def said(self) -> str:
        return self._kubelet.log(self._pod, "ray-worker-0")

    @property
    def has_begun(self) -> bool:
        return f"draining pod {self._pod}, within" in self.said

    def ended_after_s(self) -> float | None:
        """None: it goes on."""
        found = _DRAINED.search(self.said)
        return None if found is None else float(found[1])

    def held_s(self) -> tuple[int, float]:
        """How many streams it waited for at first, and for how long there were any."""
        told = [(int(running), int(left_s)) for running, left_s in _HELD.findall(self.said)]
        held = [each for each in told if each[0]]
        assert held, self.said
        return held[0][0], held[0][1] - held[-1][1]


@pytest.fixture
def installed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Installed:
    made = Installed(control_plane, namespace, tmp_path)
    made.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        pools={"prefill": {"role": "prefill"}, "decode": {"role": "decode", "initialReplicas": 2}},
        router={"replicas": 1},
    )
    made.wait_available()

    def is_whole() -> bool:
        return bool(made.read("wp/decode").get("status", {}).get("readyReplicas") == 2)

    eventually(is_whole, "both decode workers are live", 150)
    return made


def test_an_evicted_pod_drains_without_operator_and_api_server_and_no_stream_changes(
    control_plane: ControlPlane, namespace: str, installed: Installed, kubelet: Kubelet
) -> None:
    workers = workers_of(kubelet, "decode")
    pod, *_ = kubelet.pods(f"{POOL_LABEL}=decode")
    drain = Drain(kubelet, name_of(pod))
    with streaming(kubelet, NUM_TOKENS) as streams:
        Deletion(control_plane, namespace).scale_operator(0)
        operator = "app.kubernetes.io/component=operator"
        eventually(lambda: not kubelet.pods(operator), "the operator is down", 60)
        streams.wait_round()
        evict(control_plane, namespace, name_of(pod))
        eventually(lambda: drain.has_begun, "its preStop runs", 20)
        with control_plane.without_api_server():
            rounds = streams.num_rounds

            def is_drained() -> bool:
                streams.check()
                return drain.ended_after_s() is not None

            eventually(is_drained, "the pod is drained", DRAINED_WITHIN_S)

            def goes_on() -> bool:
                streams.check()
                return streams.num_rounds >= rounds + 2

            eventually(goes_on, "new streams are taken, too", DRAINED_WITHIN_S)
        gone = lambda: name_of(pod) not in map(name_of, kubelet.pods())  # noqa: E731
        eventually(gone, "the pod goes", 60)
        others = {worker: name for worker, name in workers.items() if name != name_of(pod)}
        back = lambda: len(workers_of(kubelet, "decode")) == 2  # noqa: E731
        eventually(back, "another pod takes its place", 150)
        assert others.items() < workers_of(kubelet, "decode").items(), "the other one has stayed"
    num_held, held_s = drain.held_s()
    print(f"{num_held} streams held it for {held_s:.0f} s; drained after {drain.ended_after_s()} s")
    assert 0 < num_held < NUM_STREAMS
    assert held_s > OUTLAST_S
