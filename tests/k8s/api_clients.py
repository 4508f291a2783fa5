"""The operator's client for tests on a control plane."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from deploy.controller.kit.connection import Connection, Timeouts
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.cut_proxy import CutProxy

_NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)


def kube_of(control_plane: ControlPlane, manager: str = "test") -> Kube:
    return Kube(Connection.from_kubeconfig(control_plane.kubeconfig), manager)


def kube_through(
    proxy: CutProxy, control_plane: ControlPlane, folder: Path, timeout_s: float = 1.0
) -> Kube:
    """Impatient: who goes through this proxy wants to be cut off."""
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
    """Where no pods are made, nobody need wait for accounts; and kubectl takes longer to make one
    than most tests of the client take."""
    name = f"test-{secrets.token_hex(4)}"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    kube.create(_NAMESPACES, namespace)
    try:
        yield name
    finally:
        kube.delete(_NAMESPACES, Key("", name))
