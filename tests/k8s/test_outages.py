"""The operator loses the API server: what was asked for meanwhile is done soon after, and streams
do not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.kit.connection import Connection
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.installed import PREFILL_AND_TWO_DECODE, Installed, on_pods
from tests.k8s.kubelet.kubelet import Kubelet, running_kubelet
from tests.k8s.kubelet.machine import pod_machine
from tests.k8s.streaming import streaming
from tests.k8s.tcp_proxy import CutProxy, cut_proxy

pytestmark = on_pods(600)

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
        pod_machine(tmp_path / "container-logs") as made,
        running_kubelet(connection, proxy.url, namespace, made) as running,
    ):
        yield running


def test_a_silent_cut_and_a_restart_are_noticed_and_what_was_asked_meanwhile_is_done(
    control_plane: ControlPlane, proxy: CutProxy, installed: Installed, kubelet: Kubelet
) -> None:
    installed.serve(PREFILL_AND_TWO_DECODE)

    def size() -> int:
        """Which the operator asks KubeRay for."""
        return installed.group_sizes()["decode"]

    with streaming(kubelet, NUM_TOKENS) as streams:
        silent_at = time.monotonic()
        proxy.silence()
        installed.scale("decode", 1)
        while time.monotonic() < silent_at + SILENT_S:
            streams.check()
            time.sleep(0.1)
        proxy.heal()
        left_s = silent_at + WITHIN_S - time.monotonic()
        streams.wait(lambda: size() == 1, "one pod is asked for after a silent cut", left_s)
        print(f"after a silent cut: {time.monotonic() - silent_at:.1f} s")
        killed_at = time.monotonic()
        control_plane.restart_api_server()
        installed.scale("decode", 2)
        left_s = killed_at + WITHIN_S - time.monotonic()
        streams.wait(lambda: size() == 2, "two pods are asked for after a restart", left_s)
        print(f"after a restart: {time.monotonic() - killed_at:.1f} s")
