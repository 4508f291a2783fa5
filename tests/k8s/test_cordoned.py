"""A node that is cordoned while 50 streams run: its workers move, none of them loses a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.api.chart import CHART
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.streaming import NUM_STREAMS, Streaming, streaming
from tests.k8s.test_rolling import NUM_TOKENS, POOLS, is_whole, live_of
from tests.k8s.test_serving import FAKE, MODEL, Installed

pytestmark = [
    pytest.mark.full,
    pytest.mark.cluster,
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

MOVED_WITHIN_S = 400.0


@pytest.fixture
def installed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Installed:
    made = Installed(control_plane, namespace, tmp_path)
    made.install(
        model={"name": str(MODEL)},
        engine=FAKE,
        pools=POOLS,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    follows = ["--reuse-values", "--set", "operator.followNodes=true"]
    control_plane.helm("upgrade", "baton", CHART, "-n", namespace, *follows)
    made.wait_available()
    eventually(lambda: is_whole(made, "decode", 2), "both decode workers are live", 150)
    return made


def cordon(control_plane: ControlPlane, node: str, is_cordoned: bool) -> None:
    patch = json.dumps({"spec": {"unschedulable": is_cordoned}})
    control_plane.kubectl("patch", f"node/{node}", "--type=merge", "-p", patch)


def nodes_of(kubelet: Kubelet, pool: str) -> list[str]:
    """Of each of its pods."""
    pods = kubelet.pods(f"baton.dev/pool={pool}")
    return [pod["spec"].get("nodeName", "") for pod in pods]


def until_all_run(streams: Streaming) -> None:
    """They have most of their tokens to come. Raises what has failed."""

    def all_run() -> bool:
        streams.check()
        return streams.num_running == NUM_STREAMS

    eventually(all_run, "all streams of a round run", 120)


@pytest.mark.timeout(900)
def test_workers_of_a_cordoned_node_move_one_by_one_and_come_back_when_it_is_uncordoned(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet
) -> None:
    node = nodes_of(kubelet, "decode")[0]
    with (
        streaming(kubelet, NUM_TOKENS) as streams,
        live_of(kubelet, "decode") as live,
        live_of(kubelet, "prefill") as live_prefill,
    ):
        until_all_run(streams)
        cordon(control_plane, node, True)

        def has_moved() -> bool:
            streams.check()
            there = [*nodes_of(kubelet, "decode"), *nodes_of(kubelet, "prefill")]
            is_over = is_whole(installed, "decode", 2) and is_whole(installed, "prefill", 1)
            return node not in there and is_over

        eventually(has_moved, f"no worker is on {node}", MOVED_WITHIN_S)
        until_all_run(streams)
        assert (live.fewest, live_prefill.fewest) == (2, 1)
        cordon(control_plane, node, False)
        installed.scale("decode", 3)
        eventually(lambda: is_whole(installed, "decode", 3), "a third worker", MOVED_WITHIN_S)
        assert node in nodes_of(kubelet, "decode")
