"""The operator's client for tests on a control plane."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from deploy.controller.connection import Connection, Timeouts
from deploy.controller.kube import Kube
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.cut_proxy import CutProxy


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
