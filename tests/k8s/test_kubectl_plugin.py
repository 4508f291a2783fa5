"""`kubectl baton` by a real kubectl, as the plugin that it runs, on a real API server.

The kubelet stand-in serves no port-forward: what is forwarded is tried with a stand-in for kubectl
(tests/deploy/kubectl). Here kubectl finds clusters, and says itself why it forwards nothing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any

import pytest

from cli.kubectl import RIGHTS
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.resources import PODS
from tests.baton.small_router import SmallControl
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually
from tests.k8s.plugin import Plugin

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("crds"), pytest.mark.timeout(300)]


def failure_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 3, done.stdout
    return done.stderr


def test_it_says_at_each_step_what_is_missing(plugin: Plugin) -> None:
    assert "no ServingCluster in this namespace" in failure_of(plugin("status"))
    plugin.make_cluster("blue")
    assert "blue is not served yet" in failure_of(plugin("status"))
    plugin.make_cluster("green")
    assert "there are several: blue, green" in failure_of(plugin("top"))
    assert "no ServingCluster 'red'" in failure_of(plugin("top", "--cluster", "red"))


def test_a_service_without_pods_is_reported_in_kubectls_own_words(plugin: Plugin) -> None:
    plugin.make_cluster("green")
    plugin.report_endpoints("green")
    said = failure_of(plugin("drain", "decode-0", "--cluster", "green"))
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
    control_plane: ControlPlane, kube: Kube, plugin: Plugin
) -> None:
    plugin.make_cluster("green")
    plugin.report_endpoints("green")
    account = Account(control_plane, plugin.namespace)
    make_head(kube, plugin.namespace)

    def said() -> str:
        return failure_of(plugin("status", "--kubeconfig", str(account.kubeconfig)))

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
