"""A real API server for every test that asks for one. Where there is none they skip, and say so."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.api.generate import CRDS
from tests.k8s.control_plane.assets import find
from tests.k8s.control_plane.errors import CommandError, NotAtHandError
from tests.k8s.control_plane.plane import ControlPlane, control_plane_of
from tests.k8s.kubelet.errors import NotPossibleError
from tests.k8s.kubelet.fixtures import kubelet as kubelet
from tests.k8s.kubelet.fixtures import kuberay as kuberay
from tests.k8s.kubelet.possible import check_leaves_pods, check_possible
from tests.k8s.open_crd import wait_served
from tests.k8s.operating import Operator, operator_of
from tests.k8s.ray_cluster_crd import serve_ray_clusters

_ACCOUNT_TIMEOUT_S = 60.0
_POLL_S = 0.05


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
            check_possible()
        except NotPossibleError as error:
            pytest.skip(f"NO PODS HERE: {error}")


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Started by the first test that asks, shared by all, ended after the last."""
    with control_plane_of(find()) as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh one's name; pods may be made in it. It is deleted afterwards, in its own time."""
    name = f"test-{secrets.token_hex(4)}"
    control_plane.kubectl("create", "namespace", name)
    try:
        if control_plane.has_controllers:
            _wait_for_account(control_plane, name)
        yield name
    finally:
        control_plane.kubectl("delete", "namespace", name, "--wait=false")


def _wait_for_account(control_plane: ControlPlane, namespace: str) -> None:
    """Until controllers have made the default account, which every pod there runs as, and, before
    Kubernetes 1.24, its token: the server takes no pod without."""
    give_up_at = time.monotonic() + _ACCOUNT_TIMEOUT_S
    asks = ("run", "asks", "--image=none", "--restart=Never", "--dry-run=server")
    while True:
        try:
            control_plane.kubectl("--namespace", namespace, *asks)
            return
        except CommandError as error:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{namespace} takes no pod") from error
        time.sleep(_POLL_S)


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
def operator(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Operator]:
    """One process of its own, for this namespace alone."""
    with operator_of(control_plane, namespace, tmp_path) as running:
        yield running
