"""A kubelet for a test's namespace. A test that fails shows what its containers wrote last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.kit.connection import Connection
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet, running_kubelet
from tests.k8s.kubelet.kuberay import KubeRay, running_kuberay
from tests.k8s.kubelet.network import links
from tests.k8s.kubelet.place import Place, place

_TAIL_CHARACTERS = 4000
_GRPC_PROBES_SINCE = (1, 24)


@pytest.fixture
def kubelet(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Kubelet]:
    """Nothing of it is left after the test. Where it cannot be, conftest.py skips the test."""
    connection = Connection.from_kubeconfig(control_plane.kubeconfig)
    logs = tmp_path / "container-logs"
    try:
        with place(logs) as made:
            with running_kubelet(connection, control_plane.address, namespace, made) as kubelet:
                yield kubelet
            assert made.group.is_empty, "processes of pods are left"
    finally:
        _print_tails(logs)
    _check_nothing_left(made)


@pytest.fixture
def kuberay(control_plane: ControlPlane, namespace: str, ray_clusters: None) -> Iterator[KubeRay]:
    """Makes pods of the namespace's RayClusters; it takes a kubelet, too, for them to run."""
    connection = Connection.from_kubeconfig(control_plane.kubeconfig)
    takes_grpc_probes = control_plane.version() >= _GRPC_PROBES_SINCE
    with running_kuberay(connection, namespace, takes_grpc_probes) as kuberay:
        yield kuberay


def _check_nothing_left(made: Place) -> None:
    assert not made.group.path.exists()
    assert not made.folder.exists()
    assert not made.memory.exists()
    assert made.network.link not in links()


def _print_tails(logs: Path) -> None:
    """pytest shows what is printed here with a test that has failed, and only then."""
    for log in sorted(logs.glob("*/*.log")):
        print(f"--- {log.parent.name}: {log.stem}, in {log}")
        print(log.read_text(errors="replace")[-_TAIL_CHARACTERS:])
