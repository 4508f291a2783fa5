"""A version whose workers start, but whose requests all fail: its share is taken back by itself,
and no client hears of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.controller.manifests.common import POOL_LABEL
from deploy.controller.manifests.pods import REVISION_LABEL
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import condition, eventually
from tests.k8s.streaming import streaming
from tests.k8s.test_serving import MODEL, Installed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crds", "kuberay"),
]

NUM_TOKENS = 100
ENGINE: dict[str, Any] = {
    "backend": "fake",
    "fake": {"prefillTokenS": 0.002, "decodeStepS": 0.03},
    "maxNumSeqs": 64,
}
ROLLOUT = {"weights": [50, 100], "step": "30s", "maxItlFactor": 100}
FAILING = {
    "engine": {"blockSize": 32, "fake": {"prefillTokenS": 0.4}},
    "transfer": {"renewWithinS": 0.001},
}
"""Blocks of another size make it a cohort. Its leases end when a millisecond goes by without a word
of their writer, which is long before a prompt is prefilled: none ever puts out a token."""
MENDED: dict[str, Any] = {
    "engine": {"blockSize": None, "fake": ENGINE["fake"]},
    "transfer": {"renewWithinS": None},
}
TAKEN_BACK_WITHIN_S = 240.0
_WHY = re.compile(
    r"(\d+\.\d)% of its requests failed at a share of 50%, (\d+\.\d)% of the old one's"
)


class Failing:
    """The release's ServingCluster while it is changed."""

    def __init__(self, control_plane: ControlPlane, installed: Installed, kubelet: Kubelet) -> None:
        self._control_plane, self._installed, self._kubelet = control_plane, installed, kubelet

    def change(self, spec: dict[str, Any]) -> None:
        self._control_plane.kubectl(
            *("-n", self._installed.namespace, "patch", "servingcluster/default"),
            *("--type=merge", "-p", json.dumps({"spec": spec})),
        )

    def told(self, kind: str) -> tuple[str, str, str]:
        """A condition: its status, reason and message."""
        found = condition(self._installed.read("servingcluster/default"), kind)
        return found["status"], found["reason"], found["message"]

    def revisions(self) -> set[str]:
        """Of which there are pods."""
        pods = [pod["metadata"]["labels"] for pod in self._kubelet.pods(POOL_LABEL)]
        return {labels[REVISION_LABEL] for labels in pods if REVISION_LABEL in labels}


def test_a_cohort_whose_requests_fail_is_taken_back_and_every_stream_is_served_by_the_old_one(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        engine=ENGINE,
        rollout=ROLLOUT,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    failing = Failing(control_plane, installed, kubelet)
    before = failing.revisions()
    with streaming(kubelet, NUM_TOKENS) as streams:
        failing.change(FAILING)

        def taken_back() -> str:
            streams.check()
            _, reason, message = failing.told("Degraded")
            return message if reason == "CohortTakenBack" else ""

        why = eventually(taken_back, "the failing one is taken back", TAKEN_BACK_WITHIN_S)
        print(why)
        found = _WHY.search(why)
        assert found is not None
        assert float(found[1]) > 50
        assert float(found[2]) == 0
        eventually(lambda: failing.revisions() == before, "nothing is left of it", 150)
        assert failing.told("Progressing")[:2] == ("False", "CohortReturned")
        streams.wait_round()
        failing.change(MENDED)
        as_wanted = ("False", "AsWanted")
        eventually(lambda: failing.told("Progressing")[:2] == as_wanted, "all is well again", 60)
        streams.wait_round()
    assert failing.told("Degraded")[:2] == ("False", "Sound")
    assert failing.revisions() == before, "the pods that served are still those of the beginning"
