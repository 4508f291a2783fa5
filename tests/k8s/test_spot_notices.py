"""A pod whose machine is called back by its cloud, under 50 streams: it drains by itself, nobody
deletes it, and another takes its place when its machine has gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.manifests.common import POOL_LABEL
from tests.cluster.metadata_server import Machines, serving_machines
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.objects import name_of
from tests.k8s.operating import eventually
from tests.k8s.streaming import NUM_STREAMS, streaming
from tests.k8s.test_evictions import DRAINED_WITHIN_S, NUM_TOKENS, OUTLAST_S, Drain
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine, workers_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NOTICE_S = 120.0
"""As long as aws gives; the streams take a fraction of it."""


@pytest.fixture
def metadata(control_plane: ControlPlane, kubelet: Kubelet) -> Iterator[Machines]:
    (host,) = (
        each["address"]
        for each in control_plane.read("node/node-a")["status"]["addresses"]
        if each["type"] == "InternalIP"
    )
    with serving_machines(host) as served:
        yield served


@pytest.fixture
def installed(
    control_plane: ControlPlane, namespace: str, metadata: Machines, tmp_path: Path
) -> Installed:
    made = Installed(control_plane, namespace, tmp_path)
    made.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        spotNotices={"cloud": "aws", "address": metadata.address},
        pools={"prefill": {"role": "prefill"}, "decode": {"role": "decode", "initialReplicas": 2}},
        router={"replicas": 1},
    )
    made.wait_available()

    def is_whole() -> bool:
        return bool(made.read("wp/decode").get("status", {}).get("readyReplicas") == 2)

    eventually(is_whole, "both decode workers are live", 150)
    return made


def test_a_pod_whose_machine_is_called_back_drains_by_itself_and_no_stream_changes(
    control_plane: ControlPlane,
    namespace: str,
    installed: Installed,
    kubelet: Kubelet,
    metadata: Machines,
) -> None:
    workers = workers_of(kubelet, "decode")
    called_back, *_ = kubelet.pods(f"{POOL_LABEL}=decode")
    name = name_of(called_back)
    others = [each for each in kubelet.pods(POOL_LABEL) if name_of(each) != name]
    drain = Drain(kubelet, name)
    with streaming(kubelet, NUM_TOKENS) as streams:
        streams.wait_round()
        metadata.of(called_back["status"]["podIP"]).call_back("aws", in_s=NOTICE_S)
        eventually(lambda: drain.has_begun, "it drains", 20)
        rounds = streams.num_rounds

        def is_drained() -> bool:
            streams.check()
            return drain.ended_after_s() is not None

        eventually(is_drained, "the pod is drained", DRAINED_WITHIN_S)

        def goes_on() -> bool:
            streams.check()
            return streams.num_rounds >= rounds + 2

        eventually(goes_on, "new streams are taken, too", DRAINED_WITHIN_S)
        (still,) = (each for each in kubelet.pods(POOL_LABEL) if name_of(each) == name)
        assert "deletionTimestamp" not in still["metadata"], "it goes with its machine"
        end = ("delete", "pod", name, "--grace-period=0", "--force")
        control_plane.kubectl("-n", namespace, *end)
        back = lambda: len(workers_of(kubelet, "decode")) == 2  # noqa: E731
        eventually(back, "another pod takes its place", 150)
        stayed = {worker: pod for worker, pod in workers.items() if pod != name}
        assert stayed.items() < workers_of(kubelet, "decode").items(), "the other one has stayed"
    num_held, held_s = drain.held_s()
    print(f"{num_held} streams held it for {held_s:.0f} s; drained after {drain.ended_after_s()} s")
    assert 0 < num_held < NUM_STREAMS
    assert held_s > OUTLAST_S
    ends = "spot_watch: this machine ends: terminate, at "
    assert ends in drain.said
    for pod in others:
        assert metadata.of(pod["status"]["podIP"]).asked, "all ask"
        assert ends not in Drain(kubelet, name_of(pod)).said, "and are told of their own machine"
