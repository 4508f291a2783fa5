"""`kubectl baton` by a real kubectl, as the plugin that it runs, on a real API server.

The kubelet stand-in serves no port-forward: what is forwarded is tried with a stand-in for kubectl
(tests/deploy/kubectl); here kubectl finds clusters, and says itself why it forwards nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.kubectl import RIGHTS
from deploy.api.naming import API_VERSION
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.resources import PODS, SERVICES, SERVING_CLUSTERS
from tests.baton.small_router import SmallControl
from tests.k8s.api_clients import fresh_namespace, kube_of
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("crds"), pytest.mark.timeout(300)]

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
        spec = {"model": {"name": "models/demo"}, "pools": {"decode": {"role": "decode"}}}
        metadata = {"name": name, "namespace": self.namespace}
        self._kube.create(
            SERVING_CLUSTERS,
            {"apiVersion": API_VERSION, "kind": "ServingCluster", "metadata": metadata,
             "spec": spec},
        )  # fmt: skip

    def tell_endpoints(self, name: str) -> None:
        endpoints = {"control": f"{name}-control.{self.namespace}.svc:7101"}
        told: dict[str, Any] = {"status": {"endpoints": endpoints}}
        self._kube.merge_patch(SERVING_CLUSTERS, Key(self.namespace, name), told, "status")
        metadata = {"name": f"{name}-control", "namespace": self.namespace}
        ports = [{"name": "control", "port": 7101}]
        service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
                   "spec": {"ports": ports, "selector": {"head": name}}}  # fmt: skip
        self._kube.create(SERVICES, service)


@pytest.fixture
def plugin(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Plugin]:
    kube = kube_of(control_plane)
    with fresh_namespace(kube) as namespace:
        yield Plugin(control_plane, kube, tmp_path, namespace)


def told(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 3, done.stdout
    return done.stderr


def test_it_says_at_each_step_what_is_missing(plugin: Plugin) -> None:
    assert "no ServingCluster in this namespace" in told(plugin("status"))
    plugin.make_cluster("blue")
    assert "blue is not served yet" in told(plugin("status"))
    plugin.make_cluster("green")
    assert "there are several: blue, green" in told(plugin("top"))
    assert "no ServingCluster 'red'" in told(plugin("top", "--cluster", "red"))


def test_a_service_without_pods_is_told_in_kubectls_own_words(plugin: Plugin) -> None:
    plugin.make_cluster("green")
    plugin.tell_endpoints("green")
    said = told(plugin("drain", "decode-0", "--cluster", "green"))
    assert "service/green-control: " in said
    assert "forwards nothing" not in said
    assert "get pods,service" in said


def test_it_asks_an_address_as_baton_does(plugin: Plugin) -> None:
    with SmallControl().serve() as address:
        done = plugin("status", "--address", address)
    assert done.returncode == 0, done.stderr
    assert "decode-0" in done.stdout


class Account:
    """Who may do in one namespace what its role says."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self._namespace = control_plane, namespace
        create = ("-n", namespace, "create")
        control_plane.kubectl(*create, "serviceaccount", "reader")
        binding = ("rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace}:reader")
        control_plane.kubectl(*create, *binding)
        self.kubeconfig = control_plane.service_account_kubeconfig(namespace, "reader")

    def may(self, rights: Iterable[tuple[str, str]]) -> None:
        """Resources, `resource.group`, each with a verb."""
        rules: list[dict[str, Any]] = []
        for what, verb in rights:
            resource, _, group = what.partition(".")
            rules.append({"apiGroups": [group], "resources": [resource], "verbs": [verb]})
        self._control_plane.apply({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "rules": rules,
            "metadata": {"name": "reader", "namespace": self._namespace},
        })  # fmt: skip


def test_the_rights_that_it_names_are_all_needed_and_enough(
    control_plane: ControlPlane, plugin: Plugin
) -> None:
    plugin.make_cluster("green")
    plugin.tell_endpoints("green")
    account = Account(control_plane, plugin.namespace)
    make_head(kube_of(control_plane), plugin.namespace)

    def said() -> str:
        return told(plugin("status", "--kubeconfig", str(account.kubeconfig)))

    rights = {(what, verb) for what, verbs in RIGHTS.items() for verb in verbs}
    for what, verb in sorted(rights):
        account.may(rights - {(what, verb)})
        missing = f'cannot {verb} resource "{what.partition(".")[0]}"'
        eventually(lambda missing=missing: missing in said(), missing)
    account.may(rights)
    eventually(lambda: "does not have a host assigned" in said(), "no kubelet is there to ask")


def make_head(kube: Kube, namespace: str) -> None:
    """A pod behind the cluster's Service that says it runs, on no node."""
    metadata = {"name": "green-head", "namespace": namespace, "labels": {"head": "green"}}
    spec = {
        "serviceAccountName": "reader", "automountServiceAccountToken": False,
        "schedulerName": "nobody", "containers": [{"name": "ray-head", "image": "none"}],
    }  # fmt: skip
    kube.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    kube.merge_patch(PODS, Key(namespace, "green-head"), {"status": {"phase": "Running"}}, "status")
