"""The operator loses the API server: what was asked for meanwhile is done soon after, and streams
do not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.connection import Connection
from deploy.controller.manifests.ray_cluster import revision_in
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.cut_proxy import CutProxy, cut_proxy
from tests.k8s.kubelet.kubelet import Kubelet, running_kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.place import place
from tests.k8s.operating import eventually
from tests.k8s.streaming import streaming
from tests.k8s.test_serving import FAKE, MODEL, Installed, router_address

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crds"),
]

WITHIN_S = 60.0
SILENT_S = 5.0
NUM_TOKENS = 150


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[CutProxy]:
    with cut_proxy(control_plane.address) as made:
        yield made


@pytest.fixture
def kubelet(
    control_plane: ControlPlane, namespace: str, proxy: CutProxy, tmp_path: Path
) -> Iterator[Kubelet]:
    """Its pods reach the API server through the proxy; it goes there itself."""
    connection = Connection.from_kubeconfig(control_plane.kubeconfig)
    with (
        place(tmp_path / "container-logs") as made,
        running_kubelet(connection, proxy.url, namespace, made) as running,
    ):
        yield running


class Sizes:
    """What the operator asks KubeRay for."""

    def __init__(self, installed: Installed) -> None:
        self._installed = installed

    def scaled(self, replicas: int, why: str) -> float:
        """In how many seconds from now it has done what was asked for before."""
        began_at = time.monotonic()

        def is_told() -> bool:
            groups = self._installed.read("rayclusters.ray.io/default")["spec"]["workerGroupSpecs"]
            return {revision_in(g).pool: g["replicas"] for g in groups}["decode"] == replicas

        eventually(is_told, f"{replicas} pods are asked for after {why}", WITHIN_S)
        return time.monotonic() - began_at


def test_a_silent_cut_and_a_restart_are_noticed_and_what_was_asked_meanwhile_is_done(
    control_plane: ControlPlane,
    namespace: str,
    proxy: CutProxy,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        engine=FAKE,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
        pools={"decode": {"role": "decode", "initialReplicas": 2}},
    )
    installed.wait_available()

    def is_whole() -> bool:
        return bool(installed.read("wp/decode").get("status", {}).get("readyReplicas") == 2)

    eventually(is_whole, "both workers are live", 150)
    sizes = Sizes(installed)
    with streaming(router_address(kubelet), NUM_TOKENS) as streams:
        proxy.silence()
        installed.scale("decode", 1)
        silent_until = time.monotonic() + SILENT_S
        while time.monotonic() < silent_until:
            streams.check()
            time.sleep(0.1)
        proxy.heal()  # for new connections: those that were there stay silent for ever
        print(f"after a silent cut: {sizes.scaled(1, 'a silent cut'):.1f} s")
        control_plane.restart_api_server()
        installed.scale("decode", 2)
        print(f"after a restart: {sizes.scaled(2, 'a restart'):.1f} s")
