"""The operator loses the API server: what was asked for meanwhile is done soon after, and streams
do not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.kit.connection import Connection
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.cut_proxy import CutProxy, cut_proxy
from tests.k8s.kubelet.kubelet import Kubelet, running_kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.place import place
from tests.k8s.operating import eventually
from tests.k8s.streaming import streaming
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine
from tests.k8s.units import group_sizes_in

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crds"),
]

WITHIN_S = 60.0
"""From an outage's first moment on."""
SILENT_S = 5.0
"""For new connections: a watch that was open stays silent for ever."""
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

    def scaled(self, replicas: int, since: float, why: str) -> float:
        """When it has done what was asked for: seconds since an outage began."""

        def is_told() -> bool:
            (unit,) = self._installed.read("rayclusters.ray.io")["items"]
            return group_sizes_in(unit)["decode"] == replicas

        left_s = since + WITHIN_S - time.monotonic()
        eventually(is_told, f"{replicas} pods are asked for after {why}", left_s)
        return time.monotonic() - since


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
        **with_engine(FAKE, router={"localPrefill": "never"}),
        router={"replicas": 1},
        pools={"decode": {"role": "decode", "initialReplicas": 2}},
    )
    installed.wait_available()

    def is_whole() -> bool:
        return bool(installed.read("wp/decode").get("status", {}).get("readyReplicas") == 2)

    eventually(is_whole, "both workers are live", 150)
    sizes = Sizes(installed)
    with streaming(kubelet, NUM_TOKENS) as streams:
        silent_at = time.monotonic()
        proxy.silence()
        installed.scale("decode", 1)
        while time.monotonic() < silent_at + SILENT_S:
            streams.check()
            time.sleep(0.1)
        proxy.heal()
        print(f"after a silent cut: {sizes.scaled(1, silent_at, 'a silent cut'):.1f} s")
        killed_at = time.monotonic()
        control_plane.restart_api_server()
        installed.scale("decode", 2)
        print(f"after a restart: {sizes.scaled(2, killed_at, 'a restart'):.1f} s")
