"""A real API server for every test that asks for one. Where there is none they skip, and say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from deploy.api.generate import CRDS
from deploy.controller.kit.connection import Connection
from deploy.controller.kit.kube import Kube
from tests.k8s.api_clients import fresh_namespace, kube_of, wait_takes_pods
from tests.k8s.control_plane.assets import find
from tests.k8s.control_plane.errors import NotAtHandError
from tests.k8s.control_plane.plane import ControlPlane, control_plane_of
from tests.k8s.installed import Installed
from tests.k8s.kubelet.errors import NotPossibleError
from tests.k8s.kubelet.kubelet import Kubelet, running_kubelet
from tests.k8s.kubelet.kuberay import KubeRay, running_kuberay
from tests.k8s.kubelet.machine import Image, check_leaves_pods, check_possible, pod_machine
from tests.k8s.kubelet.network import links
from tests.k8s.open_crd import serve_ray_clusters, wait_served
from tests.k8s.operating import Operator, operator_of
from tests.k8s.plugin import Plugin
from tests.k8s.seen import Seen

_TAIL_CHARACTERS = 4000


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips here, not in the fixture: pytest then folds them all into one line of its summary."""
    fixtures = getattr(item, "fixturenames", ())
    if "control_plane" not in fixtures:
        return
    try:
        found = find()
    except NotAtHandError as error:
        pytest.skip(f"NO KUBERNETES CONTROL PLANE: {error}")
    if "kubelet" in fixtures:
        try:
            check_leaves_pods(found)
            check_possible(builds_images=item.get_closest_marker("images") is not None)
        except NotPossibleError as error:
            pytest.skip(f"NO PODS HERE: {error}")


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Started by the first test that asks, shared by all, ended after the last."""
    with control_plane_of(find()) as plane:
        yield plane


@pytest.fixture(scope="session")
def kube(control_plane: ControlPlane) -> Kube:
    """The operator's client, as the administrator."""
    return kube_of(control_plane)


@pytest.fixture
def namespace(control_plane: ControlPlane, kube: Kube) -> Iterator[str]:
    """A fresh one's name; pods may be made in it. It is deleted afterwards, in its own time."""
    with fresh_namespace(kube) as name:
        if control_plane.has_controllers:
            wait_takes_pods(control_plane, name)
        yield name


@pytest.fixture(scope="session")
def crds(control_plane: ControlPlane) -> None:
    """Baton's custom resources, served. A server without CEL does not know the rules' field."""
    for path in sorted(CRDS.glob("*.yaml")):
        control_plane.kubectl("apply", "--validate=false", "-f", path)
        wait_served(control_plane, path.stem)


@pytest.fixture(scope="session")
def ray_clusters(control_plane: ControlPlane) -> None:
    """KubeRay's resource, served; nobody turns one into pods."""
    serve_ray_clusters(control_plane)


@pytest.fixture
def images() -> Mapping[str, Image]:
    """By name: what containers are made of, in place of this machine's files."""
    return {}


@pytest.fixture
def kubelet(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, images: Mapping[str, Image]
) -> Iterator[Kubelet]:
    """Nothing of it is left after the test. pytest shows what its containers wrote last where the
    test has failed."""
    connection = Connection.from_kubeconfig(control_plane.kubeconfig)
    logs = tmp_path / "container-logs"
    try:
        with pod_machine(logs, images) as made:
            with running_kubelet(connection, control_plane.address, namespace, made) as running:
                yield running
            assert made.group.is_empty, "processes of pods are left"
    finally:
        for log in sorted(logs.glob("*/*.log")):
            print(f"--- {log.parent.name}: {log.stem}, in {log}")
            print(log.read_text(errors="replace")[-_TAIL_CHARACTERS:])
    assert not any(each.exists() for each in (made.group.path, made.folder, made.memory))
    assert made.network.link not in links()


@pytest.fixture
def kuberay(control_plane: ControlPlane, namespace: str, ray_clusters: None) -> Iterator[KubeRay]:
    """Makes pods of the namespace's RayClusters; a kubelet runs them."""
    connection = Connection.from_kubeconfig(control_plane.kubeconfig)
    with running_kuberay(connection, namespace) as running:
        yield running


@pytest.fixture
def operator(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Operator]:
    """One process of its own, for this namespace alone."""
    with operator_of(control_plane, namespace, tmp_path) as running:
        yield running


@pytest.fixture
def seen(control_plane: ControlPlane, namespace: str) -> Seen:
    return Seen(control_plane, namespace)


@pytest.fixture
def installed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Installed:
    return Installed(control_plane, namespace, tmp_path)


@pytest.fixture
def plugin(control_plane: ControlPlane, kube: Kube, namespace: str, tmp_path: Path) -> Plugin:
    return Plugin(control_plane, kube, tmp_path, namespace)
