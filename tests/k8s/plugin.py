"""`kubectl baton`, as the plugin that a real kubectl runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from baton.identity.keys import role_files
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.resources import SERVICES, SERVING_CLUSTERS
from tests.identities import ROOT
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.objects import secret
from tests.k8s.seen import cluster

_TIMEOUT_S = 60.0


class Plugin:
    """`kubectl baton ...` for one namespace."""

    def __init__(self, control_plane: ControlPlane, kube: Kube, folder: Path, name: str) -> None:
        self._control_plane, self._kube, self.namespace = control_plane, kube, name
        program = folder / "kubectl-baton"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli.kubectl "$@"\n')
        program.chmod(0o700)
        clients = control_plane.clients.kubectl.parent
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(folder), str(clients), os.environ["PATH"])),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "KUBECONFIG": str(control_plane.kubeconfig),
        }

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._control_plane.clients.kubectl), "baton", *arguments]
        return subprocess.run(
            [*command, "-n", self.namespace], env=self._environment, capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip

    def make_cluster(self, name: str) -> None:
        self._kube.create(SERVING_CLUSTERS, cluster(self.namespace, name))

    def report_endpoints(self, name: str) -> None:
        endpoints = {"control": f"{name}-control.{self.namespace}.svc:7101"}
        status: dict[str, Any] = {"status": {"endpoints": endpoints}}
        self._kube.merge_patch(SERVING_CLUSTERS, Key(self.namespace, name), status, "status")
        metadata = {"name": f"{name}-control", "namespace": self.namespace}
        ports = [{"name": "control", "port": 7101}]
        service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
                   "spec": {"ports": ports, "selector": {"head": name}}}  # fmt: skip
        self._kube.create(SERVICES, service)
        files = {each: text.decode() for each, text in role_files(ROOT, "operator").items()}
        self._control_plane.apply(secret(self.namespace, f"{name}-identity-operator", files))
