"""Pools that come and go, and settings that change, while 50 streams run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.installed import PREFILL_AND_TWO_DECODE, Installed, check_patches, on_pods
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import eventually
from tests.k8s.streaming import streaming

pytestmark = on_pods(900)

NUM_TOKENS = 150
CHANGED_WITHIN_S = 400.0


@pytest.fixture
def unit(installed: Installed, kubelet: Kubelet) -> dict[str, Any]:
    """The one that serves."""
    installed.serve(PREFILL_AND_TWO_DECODE)
    return installed.unit_soon()


def test_a_version_that_does_not_start_leaves_the_one_before_as_it_is(
    installed: Installed, kubelet: Kubelet, unit: dict[str, Any]
) -> None:
    broken = {"name": "ray-worker", "args": ["echo this version is broken; exit 3"]}
    template = {"spec": {"containers": [broken]}}
    with streaming(kubelet, NUM_TOKENS) as streams:
        installed.change(pools={"decode": {"podTemplate": template}})
        why = lambda: installed.own_condition("Progressing").get("message", "")  # noqa: E731
        what = "the cluster says what keeps it from starting"
        streams.wait(lambda: "exit code 3" in why(), what, 240)
        assert len(installed.units()) == 2
        installed.change(pools={"decode": {"podTemplate": None}})
        is_alone = lambda: len(installed.units()) == 1  # noqa: E731
        streams.wait(is_alone, "the version before serves alone", CHANGED_WITHIN_S)
        streams.wait_round()
    assert installed.unit_soon()["metadata"]["uid"] == unit["metadata"]["uid"]
    assert installed.is_whole("decode", 2)


def test_a_pool_is_added_and_taken_away_again_and_one_that_is_deleted_serves_on(
    installed: Installed,
    kubelet: Kubelet,
    kuberay: KubeRay,
    unit: dict[str, Any],
) -> None:
    labels = "app.kubernetes.io/component=worker"
    pods = {pod["metadata"]["name"] for pod in kubelet.pods(labels)}
    with streaming(kubelet, NUM_TOKENS) as streams:
        installed.change(pools={"more": {"role": "decode"}})
        streams.wait(lambda: "more" in installed.names("wp"), "there is one", 30)
        is_live = lambda: installed.is_whole("more", 1)  # noqa: E731
        streams.wait(is_live, "its worker is live", CHANGED_WITHIN_S)
        installed.change(pools={"more": None})
        is_gone = lambda: "more" not in installed.names("wp")  # noqa: E731
        streams.wait(is_gone, "it is gone", CHANGED_WITHIN_S)

        before = installed.read("wp/decode")["metadata"]["uid"]
        installed.kubectl("delete", "wp/decode", "--timeout=30s")
        eventually(lambda: "decode" in installed.names("wp"), "it is made again", 30)
        assert installed.read("wp/decode")["metadata"]["uid"] != before
        installed.wait_whole("decode", 2)
        streams.wait_rounds(2)
    assert {pod["metadata"]["name"] for pod in kubelet.pods(labels)} == pods
    after = installed.unit_soon()
    assert after["metadata"]["uid"] == unit["metadata"]["uid"], "it stays the same unit"
    assert installed.group_sizes() == {"prefill": 1, "decode": 2}
    assert len(check_patches(kuberay)) == 1
