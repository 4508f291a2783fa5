"""Ray's head is lost with its whole pod, under 50 streams, where the chart's own Redis keeps its
state: nobody but the head notices."""

from __future__ import annotations

import shutil

import pytest

from baton.errors import BatonError
from deploy.controller.manifests.common import POOL_LABEL
from tests.k8s.installed import (
    HEAD,
    PREFILL_AND_TWO_DECODE,
    Installed,
    on_pods,
    workers_of,
)
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.objects import name_of, restarts_of
from tests.k8s.streaming import streaming

pytestmark = [
    *on_pods(900),
    pytest.mark.skipif(
        shutil.which("redis-server") is None,
        reason="NO REDIS ON THIS MACHINE: redis-server is not on PATH (Debian's package of that "
        "name has it), so nobody shows that a lost head costs no worker",
    ),
]

NUM_TOKENS = 600
BACK_WITHIN_S = 150.0


def pods_of_workers(kubelet: Kubelet) -> list[tuple[str, int]]:
    """Each one's identity, and how often its containers were started again."""
    return sorted((pod["metadata"]["uid"], restarts_of(pod)) for pod in kubelet.pods(POOL_LABEL))


def workers(kubelet: Kubelet) -> dict[str, str]:
    """Their pods, by worker; empty while no supervisor answers."""
    try:
        return workers_of(kubelet, "prefill") | workers_of(kubelet, "decode")
    except (BatonError, KeyError, ValueError):  # no answer, no address, no pod
        return {}


def test_a_head_that_is_lost_costs_no_stream_and_no_worker(
    installed: Installed, kubelet: Kubelet
) -> None:
    installed.redis = {}
    installed.serve(PREFILL_AND_TWO_DECODE)
    spec = installed.read("servingcluster/default")["spec"]
    assert spec["ray"]["gcsFaultTolerance"]["redisAddress"] == "default-redis:6379"
    before, pods = workers(kubelet), pods_of_workers(kubelet)
    assert len(before) == 3
    (head,) = kubelet.pods(HEAD)
    with streaming(kubelet, NUM_TOKENS) as streams:
        streams.wait_round()
        installed.kubectl("delete", "pod", name_of(head), "--grace-period=0", "--force")

        def is_back() -> bool:
            others = [name_of(pod) != name_of(head) for pod in kubelet.pods(HEAD)]
            return others == [True] and bool(workers(kubelet))

        streams.wait(is_back, "another head's supervisor knows workers", BACK_WITHIN_S)

        def is_whole() -> bool:
            is_available = installed.own_condition("Available")["status"] == "True"
            return is_available and workers(kubelet) == before

        streams.wait(is_whole, "it knows all of them", BACK_WITHIN_S)
        streams.wait_rounds(2)
    assert pods_of_workers(kubelet) == pods
    assert workers(kubelet) == before
