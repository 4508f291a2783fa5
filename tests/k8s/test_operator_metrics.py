"""What the operator shows Prometheus over HTTP, of objects on a real API server."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator

import pytest

from deploy.controller.__main__ import serve_health
from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.kit.connection import Connection
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import Release
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.control_plane.process import free_port
from tests.k8s.operating import eventually
from tests.k8s.seen import cluster

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters")


@pytest.fixture
def scrape(control_plane: ControlPlane, namespace: str) -> Iterator[Callable[[], list[str]]]:
    """Lines of a running operator's metrics."""
    kube = Kube(Connection.from_kubeconfig(control_plane.kubeconfig), "baton-controller")
    release, lease = Release("worker", "router", "2.60.0"), Key(namespace, "baton-controller")
    controller = Controller(kube, ControllerSettings(lease, "one", release, namespace))
    port = free_port()
    server = serve_health(controller, port)
    controller.start()

    def scrape() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode()).splitlines()

    try:
        yield scrape
    finally:
        controller.stop()
        server.shutdown()
        server.server_close()


def test_it_shows_who_leads_and_what_is_wrong_with_each_resource(
    control_plane: ControlPlane, namespace: str, scrape: Callable[[], list[str]]
) -> None:
    assert 'baton_operator_reconciles_total{end="succeeded"} 0.0' in scrape()
    eventually(lambda: "baton_operator_is_leading 1.0" in scrape(), "it leads")
    control_plane.apply(cluster(namespace))
    for kind, name in (("ServingCluster", "main"), ("WorkerPool", "main-decode")):
        begins = f'baton_resource_condition{{kind="{kind}",reason='
        ends = f'resource="{name}",resource_namespace="{namespace}",type="Available"}} 0.0'

        def is_shown(begins: str = begins, ends: str = ends) -> bool:
            return any(line.startswith(begins) and line.endswith(ends) for line in scrape())

        eventually(is_shown, f"{name} is not available")
    size = 'role="decode",state="wanted"} 1.0'
    eventually(lambda: any(each.endswith(size) for each in scrape()), "a pool's size")
    ended = 'baton_operator_reconciles_total{end="succeeded"} '
    eventually(lambda: ended + "0.0" not in scrape(), "reconciles are counted")
