"""The control plane that tests run on is a real one: what fakes get wrong holds here."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane

_TIMEOUT_S = 30.0
_POLL_S = 0.05


def until(happened: Callable[[], Any], what: str) -> None:
    """Poll: it is another process that does it."""
    give_up_at = time.monotonic() + _TIMEOUT_S
    while not happened():
        assert time.monotonic() < give_up_at, f"{what}: not within {_TIMEOUT_S} s"
        time.sleep(_POLL_S)


def config_map(
    namespace: str, name: str, data: dict[str, str], **metadata: object
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": name, **metadata},
        "data": data,
    }


def names(control_plane: ControlPlane, namespace: str, kind: str) -> list[str]:
    found = control_plane.read("--namespace", namespace, kind)
    return [item["metadata"]["name"] for item in found["items"]]


@pytest.fixture(scope="module")
def shelf(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace that most tests here share, under names of their own; no pods are made in it."""
    name = f"test-{secrets.token_hex(4)}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def kites(control_plane: ControlPlane) -> Iterator[str]:
    """The plural of a custom resource with status and scale subresources."""
    group, plural = "control-plane.test.baton.dev", "kites"
    number = {"type": "integer", "minimum": 0}
    part = {"type": "object", "properties": {"replicas": number}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": "kite", "kind": "Kite"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {"spec": part, "status": part},
                        }
                    },
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                        },
                    },
                }
            ],
        },
    }
    control_plane.apply(definition)
    control_plane.kubectl("wait", "--for=condition=established", f"crd/{plural}.{group}")
    yield f"{plural}.{group}"
    control_plane.kubectl("delete", "crd", f"{plural}.{group}", "--wait=false")


def test_the_server_answers_under_the_version_it_was_built_as(control_plane: ControlPlane) -> None:
    assert control_plane.version() >= (1, 20)
    assert control_plane.has_cel() == (control_plane.version() >= (1, 25))
    assert control_plane.kubectl("get", "--raw", "/readyz") == "ok"


def test_a_field_belongs_to_who_applied_it(control_plane: ControlPlane, shelf: str) -> None:
    def data() -> dict[str, str]:
        found: dict[str, str] = control_plane.read("--namespace", shelf, "configmap", "shared")[
            "data"
        ]
        return found

    control_plane.apply(config_map(shelf, "shared", {"a": "1", "b": "1"}), field_manager="one")
    control_plane.apply(config_map(shelf, "shared", {"a": "2"}), field_manager="one")
    assert data() == {"a": "2"}, "what its manager applies no longer goes"
    with pytest.raises(CommandError, match=r'conflict with "one": \.data\.a'):
        control_plane.apply(config_map(shelf, "shared", {"a": "3"}), field_manager="two")
    control_plane.apply(config_map(shelf, "shared", {"c": "3"}), field_manager="two")
    assert data() == {"a": "2", "c": "3"}


def test_status_and_spec_are_written_apart(
    control_plane: ControlPlane, shelf: str, kites: str
) -> None:
    kind = {"apiVersion": f"{kites.partition('.')[2]}/v1", "kind": "Kite"}
    kite: dict[str, Any] = {**kind, "metadata": {"namespace": shelf, "name": "red"}}
    control_plane.apply({**kite, "spec": {"replicas": 2}, "status": {"replicas": 9}})

    stored = control_plane.read("--namespace", shelf, kites, "red")
    assert "status" not in stored, "a write of the object leaves its status alone"
    path = f"/apis/{kind['apiVersion']}/namespaces/{shelf}/kites/red/status"
    stored |= {"status": {"replicas": 1}, "spec": {"replicas": 7}}
    control_plane.kubectl("replace", "--raw", path, "-f", "-", stdin=json.dumps(stored))
    stored = control_plane.read("--namespace", shelf, kites, "red")
    assert (stored["spec"], stored["status"]) == ({"replicas": 2}, {"replicas": 1})

    control_plane.kubectl("--namespace", shelf, "scale", f"{kites}/red", "--replicas=4")
    scale = json.loads(control_plane.kubectl("get", "--raw", path.removesuffix("status") + "scale"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (4, 1)


def test_a_schema_refuses_what_it_forbids(
    control_plane: ControlPlane, shelf: str, kites: str
) -> None:
    kite = {
        "apiVersion": f"{kites.partition('.')[2]}/v1",
        "kind": "Kite",
        "metadata": {"namespace": shelf, "name": "blue"},
        "spec": {"replicas": -1},
    }
    with pytest.raises(CommandError, match=r"spec\.replicas.*greater than or equal to 0"):
        control_plane.apply(kite)


def test_a_deployment_makes_a_replica_set_and_its_pods(
    control_plane: ControlPlane, namespace: str
) -> None:
    if not control_plane.has_controllers:
        pytest.skip("this control plane has no controllers")
    arguments = ("create", "deployment", "front", "--image=registry.invalid/front:1")
    control_plane.kubectl("--namespace", namespace, *arguments)
    until(lambda: len(names(control_plane, namespace, "pods")) == 1, "the deployment's pod")
    (replica_set,) = names(control_plane, namespace, "replicasets")
    (pod,) = names(control_plane, namespace, "pods")
    assert pod.startswith(f"{replica_set}-")


def test_garbage_goes_with_its_owner(control_plane: ControlPlane, shelf: str) -> None:
    if not control_plane.has_controllers:
        pytest.skip("this control plane has no controllers")
    control_plane.apply(config_map(shelf, "owner", {}))
    owner = control_plane.read("--namespace", shelf, "configmap", "owner")["metadata"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["uid"]}
    control_plane.apply(
        config_map(shelf, "owned", {}, ownerReferences=[reference]),
        config_map(shelf, "free", {}),
    )
    control_plane.kubectl("--namespace", shelf, "delete", "configmap", "owner")
    until(lambda: "owned" not in names(control_plane, shelf, "configmaps"), "collection")
    assert "free" in names(control_plane, shelf, "configmaps")


def test_a_service_account_may_do_what_its_role_says_and_no_more(
    control_plane: ControlPlane, shelf: str
) -> None:
    run = ("--namespace", shelf, "create")
    control_plane.kubectl(*run, "serviceaccount", "reader")
    control_plane.kubectl(*run, "role", "reader", "--verb=get,list", "--resource=configmaps")
    account = f"--serviceaccount={shelf}:reader"
    control_plane.kubectl(*run, "rolebinding", "reader", "--role=reader", account)
    control_plane.apply(config_map(shelf, "book", {"page": "1"}))

    kubeconfig = control_plane.service_account_kubeconfig(shelf, "reader")

    def as_reader(*arguments: str) -> str:
        return control_plane.kubectl("--kubeconfig", kubeconfig, "--namespace", shelf, *arguments)

    assert as_reader("get", "configmap", "book", "-o", "jsonpath={.data.page}") == "1"
    with pytest.raises(CommandError, match=r"Forbidden.*cannot delete resource"):
        as_reader("delete", "configmap", "book")
    with pytest.raises(CommandError, match=r"Forbidden.*cannot list resource"):
        as_reader("get", "configmaps", "--all-namespaces")


def test_of_two_who_update_a_lease_one_is_told_of_the_conflict(
    control_plane: ControlPlane, shelf: str
) -> None:
    control_plane.apply(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": shelf, "name": "leader"},
        }
    )
    seen_by_both = control_plane.read("--namespace", shelf, "lease", "leader")

    def claim(holder: str) -> None:
        claimed = {**seen_by_both, "spec": {"holderIdentity": holder}}
        control_plane.kubectl("replace", "-f", "-", stdin=json.dumps(claimed))

    claim("first")
    with pytest.raises(CommandError, match="Conflict"):
        claim("second")
    lease = control_plane.read("--namespace", shelf, "lease", "leader")
    assert lease["spec"]["holderIdentity"] == "first"


@pytest.mark.full
def test_a_restarted_api_server_knows_what_it_knew(control_plane: ControlPlane, shelf: str) -> None:
    if control_plane.servers is None:
        pytest.skip("somebody else's API server is not restarted")
    control_plane.apply(config_map(shelf, "kept", {"page": "1"}))
    before = control_plane.read("--namespace", shelf, "configmap", "kept")
    with control_plane.without_api_server(), pytest.raises(CommandError, match="refused"):
        control_plane.kubectl("get", "namespaces")
    assert control_plane.read("--namespace", shelf, "configmap", "kept") == before


def test_helm_installs_upgrades_and_removes_a_chart(
    control_plane: ControlPlane, shelf: str, tmp_path: Path
) -> None:
    if control_plane.clients.helm is None:
        pytest.skip("no helm beside kubectl or on PATH")
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: tale, version: 0.1.0}\n")
    (chart / "values.yaml").write_text("page: '1'\n")
    template = config_map("{{ .Release.Namespace }}", "tale", {"page": "{{ .Values.page }}"})
    (chart / "templates" / "tale.yaml").write_text(json.dumps(template))

    def page() -> str:
        read = ("get", "configmap", "tale", "-o", "jsonpath={.data.page}")
        return control_plane.kubectl("--namespace", shelf, *read)

    place = ("--namespace", shelf)
    control_plane.helm("install", "tale", str(chart), *place)
    assert page() == "1"
    control_plane.helm("upgrade", "tale", str(chart), "--set-string", "page=2", *place)
    assert page() == "2"
    control_plane.helm("rollback", "tale", "1", *place)
    assert page() == "1"
    control_plane.helm("uninstall", "tale", *place)
    assert "tale" not in names(control_plane, shelf, "configmaps")
