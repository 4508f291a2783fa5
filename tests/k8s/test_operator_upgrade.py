"""The operator of another release takes over while 50 streams run: what it finds running it leaves
as it is, and it goes on with the pools' sizes."""

from __future__ import annotations

import time
from typing import Any

from tests.k8s.installed import OPERATOR, Installed, on_pods
from tests.k8s.kubelet.hosts import is_ready
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.objects import name_of, restarts_of
from tests.k8s.operating import eventually
from tests.k8s.streaming import streaming

pytestmark = on_pods(900)

NUM_TOKENS = 150
RAY_PODS = "ray.io/is-ray-node=yes"
SETTLED_S = 20.0
"""A new leader rolls nothing before the supervisor has spoken for 15 s."""
OTHER_RELEASE: dict[str, Any] = {
    "images": {"tag": "next", "rayVersion": "2.61.0"},
    "operator": {"logLevel": "debug", "resources": {"requests": {"cpu": "50m"}}},
    "podMonitor": {"enabled": True},
}
ROUTER_IMAGE = "registry.example.com/baton/router:pinned"
"""Of the ServingCluster's own: the release's next one would roll the routers, which is no pool."""


class Running:
    """What an upgrade of the operator has to leave alone, and which operator leads."""

    def __init__(self, installed: Installed, kubelet: Kubelet) -> None:
        self._installed, self._kubelet = installed, kubelet

    def pods(self) -> dict[str, tuple[str, int]]:
        """Of Ray and routers: each one's identity, and how often its containers were started again,
        by name."""
        labels = (RAY_PODS, "app.kubernetes.io/component=router")
        pods = [pod for each in labels for pod in self._kubelet.pods(each)]
        return {name_of(pod): (pod["metadata"]["uid"], restarts_of(pod)) for pod in pods}

    def ray(self) -> dict[str, Any]:
        return self._installed.unit_soon()

    def generation(self) -> int:
        """Of the RayCluster: counts each change of its spec."""
        return int(self.ray()["metadata"]["generation"])

    def templates(self) -> dict[str, Any]:
        """By group, and the head's."""
        spec = self.ray()["spec"]
        groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
        return groups | {"": spec["headGroupSpec"]}

    def has_only_operator_of(self, tag: str) -> bool:
        """And it leads."""
        pods = self._kubelet.pods(OPERATOR)
        if len(pods) != 1 or not is_ready(pods[0]):
            return False
        image = str(pods[0]["spec"]["containers"][0]["image"])
        lease = self._installed.read("lease/baton-controller")["spec"]
        return image.endswith(f":{tag}") and lease["holderIdentity"].startswith(name_of(pods[0]))


def test_an_upgrade_of_the_operator_leaves_pools_alone_and_no_stream_changes(
    installed: Installed, kubelet: Kubelet
) -> None:
    installed.serve(images={"router": ROUTER_IMAGE})
    running = Running(installed, kubelet)
    with streaming(kubelet, NUM_TOKENS) as streams:
        pods, generation, templates = running.pods(), running.generation(), running.templates()
        assert len(pods) == 4, "a head, two workers, a router"
        installed.upgrade(**OTHER_RELEASE)
        eventually(lambda: running.has_only_operator_of("next"), "the next operator leads", 120)
        settled_at = time.monotonic() + SETTLED_S
        while time.monotonic() < settled_at:
            streams.wait_round()
        assert running.pods() == pods
        assert running.generation() == generation
        installed.scale("decode", 2)

        is_scaled = lambda: installed.is_whole("decode", 2)  # noqa: E731
        streams.wait(is_scaled, "the next operator goes on", 150)
        streams.wait_round()
    after = running.pods()
    assert pods.items() < after.items()
    assert len(after) == 5
    assert running.templates() == templates, "the new pod is of the version that was there"
