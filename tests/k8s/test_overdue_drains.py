"""A drain that takes longer than its pool lets it: what holds it is told while it goes on, and its
streams end as ever."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.streaming import NUM_STREAMS, streaming
from tests.k8s.test_rolling import change
from tests.k8s.test_serving import MODEL, Installed, workers_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

SLOW: dict[str, Any] = {"backend": "fake", "fake": {"decodeStepS": 0.1}, "maxNumSeqs": 64}
NUM_TOKENS = 600
"""A minute's: a drain is overdue half a minute after its pool's drainTimeout."""
SHORT = "2s"
KEPT = {"drainTimeout": SHORT, "rollout": {"partition": 2}}
"""The workers that are there were made with the usual 10 minutes, and stay."""


class Pool:
    """`decode`, as the API server has it."""

    def __init__(self, control_plane: ControlPlane, installed: Installed) -> None:
        self._control_plane, self._installed = control_plane, installed

    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self._installed.read("wp/decode")["spec"]
        return spec

    def draining(self) -> list[dict[str, Any]]:
        status = self._installed.read("wp/decode").get("status", {})
        draining: list[dict[str, Any]] = status.get("draining") or []
        return draining

    def events(self, reason: str) -> list[str]:
        """Their lines in `kubectl describe`."""
        told = self._control_plane.kubectl(
            *("-n", self._installed.namespace, "describe", "wp/decode")
        )
        lines = told.partition("Events:")[2].splitlines()
        return [line for line in lines if reason in line.split()]


def test_a_drain_that_outlasts_its_pools_drain_timeout_says_what_holds_it(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        engine=SLOW,
        pools={"prefill": {"role": "prefill"}, "decode": {"role": "decode", "initialReplicas": 2}},
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    eventually(lambda: len(workers_of(kubelet, "decode")) == 2, "both workers are live", 150)
    pool = Pool(control_plane, installed)
    change(control_plane, namespace, decode=KEPT)
    eventually(lambda: pool.spec()["drainTimeout"] == SHORT, "the pool has it")
    workers = workers_of(kubelet, "decode")
    with streaming(kubelet, NUM_TOKENS) as streams:
        streams.wait_round()
        installed.scale("decode", 1)

        def held() -> list[dict[str, Any]]:
            streams.check()
            return [drain for drain in pool.draining() if "heldBy" in drain]

        (drain,) = eventually(held, "what holds the drain is told", 90)
        told = eventually(lambda: pool.events("DrainOverdue"), "people read so", 30)
        eventually(lambda: not pool.draining(), "it ends with its streams", 120)
    assert workers[drain["worker"]] == drain["pod"]
    assert drain["heldBy"] == f"{drain['numRunning']} requests still run"
    assert 0 < drain["numRunning"] < NUM_STREAMS
    datetime.datetime.fromisoformat(drain["since"])
    (event,) = told
    assert "Warning" in event
    assert f"worker {drain['worker']} in pod {drain['pod']} does not finish its drain" in event
    assert event.endswith(" requests still run")
    eventually(lambda: pool.events("Drained"), "people read so")
    assert workers_of(kubelet, "decode").items() < workers.items(), "the other one has stayed"
