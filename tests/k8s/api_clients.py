"""The operator's client for tests on a control plane."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from deploy.controller.kit.connection import USUAL, Call, Connection, Timeouts
from deploy.controller.kit.errors import KubeError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource
from deploy.controller.manifests.resources import PODS
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually
from tests.k8s.tcp_proxy import CutProxy

_NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)


def kube_of(control_plane: ControlPlane, manager: str = "test") -> Kube:
    return Kube(Connection.from_kubeconfig(control_plane.kubeconfig), manager)


def kube_through(
    proxy: CutProxy, control_plane: ControlPlane, folder: Path, timeout_s: float = 1.0
) -> Kube:
    """Impatient: a test that uses this proxy wants to cut the client off."""
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    for cluster in config["clusters"]:
        name = urlsplit(cluster["cluster"]["server"]).hostname
        cluster["cluster"] |= {"server": proxy.url, "tls-server-name": name}
    kubeconfig = folder / "through-proxy.kubeconfig"
    kubeconfig.touch(0o600)
    kubeconfig.write_text(json.dumps(config))
    connection = Connection.from_kubeconfig(kubeconfig)
    return Kube(connection, "test", Timeouts(timeout_s, timeout_s))


@contextlib.contextmanager
def fresh_namespace(kube: Kube) -> Iterator[str]:
    """One in which no pods are made; it is deleted afterwards, in its own time."""
    name = f"test-{secrets.token_hex(4)}"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    kube.create(_NAMESPACES, namespace)
    try:
        yield name
    finally:
        kube.delete(_NAMESPACES, Key("", name))


def wait_takes_pods(control_plane: ControlPlane, namespace: str) -> None:
    """Until controllers have made the default account, which every pod there runs as, and, before
    Kubernetes 1.24, its token: without them the server takes no pod."""
    connection = Connection.from_kubeconfig(control_plane.kubeconfig)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "asks", "namespace": namespace},
        "spec": {"containers": [{"name": "asks", "image": "none"}]},
    }
    call = Call("POST", PODS.path_of_all(namespace), {"dryRun": "All"}, pod)

    def takes_it() -> bool:
        try:
            connection.answer(call, USUAL)
        except KubeError:
            return False
        return True

    eventually(takes_it, f"{namespace} takes pods")
