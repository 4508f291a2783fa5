"""A decode worker's pod has to go under 50 streams: it drains by itself and is replaced.

It is evicted while nobody else can help: no operator runs, and the API server is gone from right
after the eviction. Or its machine is called back by its cloud, and nobody deletes it. Or
its pool gets smaller, and larger again at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton.control.client import ControlClient
from deploy.controller.manifests.common import POOL_LABEL
from tests.cluster.metadata_server import Machines, serving_machines
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.installed import (
    OPERATOR,
    PREFILL_AND_TWO_DECODE,
    Installed,
    check_patches,
    control_address,
    on_pods,
    workers_of,
)
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.objects import evict, name_of
from tests.k8s.operating import eventually
from tests.k8s.streaming import NUM_STREAMS, Streaming, streaming

pytestmark = on_pods(900)

NUM_TOKENS = 600
OUTLAST_S = 5.0
"""After which others abort what still runs in a pod that is to go (ai-dynamo/dynamo#13565)."""
DRAINED_WITHIN_S = 180.0
NOTICE_S = 120.0
"""As long as aws gives; the streams take a fraction of it."""
_DRAINED = re.compile(r"pod_drain: pod \S+ is drained after ([\d.]+) s$", re.MULTILINE)
_HELD = re.compile(r"(\d+) running, .*; (\d+) s left$", re.MULTILINE)


class Drain:
    """What the pod says of its drain, in its container's own log."""

    def __init__(self, kubelet: Kubelet, pod: str) -> None:
        self._kubelet, self._pod = kubelet, pod

    @property
    def said(self) -> str:
        return self._kubelet.log(self._pod, "ray-worker-0")

    @property
    def has_begun(self) -> bool:
        return f"draining pod {self._pod}, within" in self.said

    def wait_over(self, streams: Streaming) -> None:
        """Streams go on meanwhile, and new ones are taken."""
        rounds = streams.num_rounds
        is_over = lambda: _DRAINED.search(self.said)  # noqa: E731
        streams.wait(is_over, "the pod is drained", DRAINED_WITHIN_S)
        streams.wait_rounds(rounds + 2 - streams.num_rounds)

    def check_held(self) -> None:
        """It has waited for streams that ran, long enough and for no other ones."""
        waits = [(int(running), int(left_s)) for running, left_s in _HELD.findall(self.said)]
        held = [each for each in waits if each[0]]
        assert held, self.said
        num_held, held_s = held[0][0], held[0][1] - held[-1][1]
        print(f"{num_held} streams held it for {held_s} s")
        assert 0 < num_held < NUM_STREAMS
        assert held_s > OUTLAST_S


def wait_replaced(kubelet: Kubelet, pod: str, workers: dict[str, str]) -> None:
    """`workers`: those of the pool before, with `pod` among their pods."""
    is_whole = lambda: len(workers_of(kubelet, "decode")) == 2  # noqa: E731
    eventually(is_whole, "another pod takes its place", 150)
    stayed = {worker: name for worker, name in workers.items() if name != pod}
    assert stayed.items() < workers_of(kubelet, "decode").items(), "the other one has stayed"


def test_an_evicted_pod_drains_without_operator_and_api_server_and_no_stream_changes(
    control_plane: ControlPlane, namespace: str, installed: Installed, kubelet: Kubelet
) -> None:
    installed.serve(PREFILL_AND_TWO_DECODE)
    workers = workers_of(kubelet, "decode")
    name = name_of(kubelet.pods(f"{POOL_LABEL}=decode")[0])
    drain = Drain(kubelet, name)
    with streaming(kubelet, NUM_TOKENS) as streams:
        installed.scale_operator(0)
        eventually(lambda: not kubelet.pods(OPERATOR), "the operator is down")
        streams.wait_round()
        evict(control_plane, namespace, name)
        eventually(lambda: drain.has_begun, "its preStop runs", 20)
        with control_plane.without_api_server():
            drain.wait_over(streams)
        eventually(lambda: name not in map(name_of, kubelet.pods()), "the pod goes")
        wait_replaced(kubelet, name, workers)
    drain.check_held()


@pytest.fixture
def metadata(kubelet: Kubelet) -> Iterator[Machines]:
    with serving_machines(kubelet.host_address) as served:
        yield served


def test_a_pod_whose_machine_is_called_back_drains_by_itself_and_no_stream_changes(
    installed: Installed, kubelet: Kubelet, metadata: Machines
) -> None:
    notices = {"cloud": "aws", "address": metadata.address}
    installed.serve(PREFILL_AND_TWO_DECODE, spotNotices=notices)
    workers = workers_of(kubelet, "decode")
    called_back, *_ = kubelet.pods(f"{POOL_LABEL}=decode")
    name = name_of(called_back)
    others = [each for each in kubelet.pods(POOL_LABEL) if name_of(each) != name]
    drain = Drain(kubelet, name)
    with streaming(kubelet, NUM_TOKENS) as streams:
        streams.wait_round()
        metadata.of(called_back["status"]["podIP"]).call_back("aws", in_s=NOTICE_S)
        eventually(lambda: drain.has_begun, "it drains", 20)
        drain.wait_over(streams)
        (still,) = (each for each in kubelet.pods(POOL_LABEL) if name_of(each) == name)
        assert "deletionTimestamp" not in still["metadata"], "it goes with its machine"
        installed.kubectl("delete", "pod", name, "--grace-period=0", "--force")
        wait_replaced(kubelet, name, workers)
    drain.check_held()
    ends = "spot_watch: this machine ends: terminate, at "
    assert ends in drain.said
    for pod in others:
        assert metadata.of(pod["status"]["podIP"]).asked, "every pod asks"
        assert ends not in Drain(kubelet, name_of(pod)).said, "of its own machine"


def test_a_pool_that_grows_again_while_its_pod_goes_gets_another_and_no_stream_changes(
    installed: Installed, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    installed.serve(PREFILL_AND_TWO_DECODE)
    gone = set[str]()

    def going() -> set[str]:
        (decode, _) = installed.units()[0]["spec"]["workerGroupSpecs"]  # by name
        return set(decode["scaleStrategy"]["workersToDelete"])

    def is_whole() -> bool:
        with ControlClient(control_address(kubelet)) as control:
            places = [place for pool in control.fleet().pools for place in pool.places]
        assert not gone & {place.pod_name for place in places}
        return installed.is_whole("decode", 2)

    with streaming(kubelet, 150) as streams:
        for _ in range(3):
            streams.wait_round()
            installed.scale("decode", 1)
            gone |= streams.wait(going, "a pod is named to go", DRAINED_WITHIN_S)
            installed.scale("decode", 2)
            streams.wait(is_whole, "two workers serve", DRAINED_WITHIN_S)
        streams.wait_round()
    assert len(gone) == len(check_patches(kuberay)) == 3
