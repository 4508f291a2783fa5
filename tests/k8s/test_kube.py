"""The client's verbs, on a real API server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes.config import incluster_config

from deploy.controller.kit.connection import Connection
from deploy.controller.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    NotConfiguredError,
    NotFoundError,
    StatusError,
)
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource, Selection, key_of
from deploy.controller.kit.watch_stream import WatchEventType, Window
from tests.deploy.controller.things import CONFIG_MAPS, config_map
from tests.k8s.api_clients import kube_of
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.open_crd import open_crd, served

KITES = Resource("kube.test.baton.dev", "v1", "kites")


@pytest.fixture(scope="module")
def kites(control_plane: ControlPlane) -> Iterator[None]:
    """A custom resource with status and scale."""
    numbers = {name: {"type": "integer", "minimum": 0} for name in ("replicas", "length")}
    part = {"type": "object", "properties": numbers}
    crd = open_crd(KITES, "Kite")
    (version,) = crd["spec"]["versions"]
    version["schema"]["openAPIV3Schema"]["properties"] = {"spec": part, "status": part}
    replicas = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    version["subresources"]["scale"] = replicas
    with served(control_plane, crd):
        yield


def kite(key: Key, **parts: Any) -> dict[str, Any]:
    metadata = {"namespace": key.namespace, "name": key.name}
    return {"apiVersion": KITES.api_version, "kind": "Kite", "metadata": metadata, **parts}


def test_what_was_written_is_read(kube: Kube, namespace: str) -> None:
    key = Key(namespace, "a")
    created = kube.create(CONFIG_MAPS, config_map(key, {"x": "1"}))
    assert kube.get(CONFIG_MAPS, key) == created
    with pytest.raises(AlreadyExistsError, match='"a" already exists'):
        kube.create(CONFIG_MAPS, config_map(key))
    kube.merge_patch(CONFIG_MAPS, key, {"data": {"x": None, "y": "2"}})
    assert kube.get(CONFIG_MAPS, key)["data"] == {"y": "2"}
    kube.delete(CONFIG_MAPS, key)
    with pytest.raises(NotFoundError, match='"a" not found'):
        kube.get(CONFIG_MAPS, key)
    with pytest.raises(NotFoundError):
        kube.delete(CONFIG_MAPS, key)


def test_a_patch_of_a_version_that_is_no_more_is_refused(kube: Kube, namespace: str) -> None:
    key = Key(namespace, "a")
    seen = kube.create(CONFIG_MAPS, config_map(key, {"x": "1"}))
    kube.merge_patch(CONFIG_MAPS, key, {"data": {"x": "2"}})
    version = {"resourceVersion": seen["metadata"]["resourceVersion"]}
    with pytest.raises(ConflictError, match="has been modified"):
        kube.merge_patch(CONFIG_MAPS, key, {"metadata": version, "data": {"x": "3"}})
    assert kube.get(CONFIG_MAPS, key)["data"] == {"x": "2"}


def test_a_field_that_two_managers_want_is_named(
    control_plane: ControlPlane, namespace: str
) -> None:
    one, two = kube_of(control_plane, "one"), kube_of(control_plane, "two")
    key = Key(namespace, "a")
    one.apply(CONFIG_MAPS, config_map(key, {"x": "1", "y": "1"}), force=False)
    with pytest.raises(ConflictError, match=r'conflict with "one": \.data\.x'):
        two.apply(CONFIG_MAPS, config_map(key, {"x": "2"}), force=False)
    two.apply(CONFIG_MAPS, config_map(key, {"x": "2"}), force=True)
    one.apply(CONFIG_MAPS, config_map(key, {}), force=False)
    assert one.get(CONFIG_MAPS, key)["data"] == {"x": "2"}, "what its manager names no more goes"


@pytest.mark.usefixtures("kites")
def test_a_scale_is_read_and_patched(kube: Kube, namespace: str) -> None:
    key = Key(namespace, "red")
    kube.apply(KITES, kite(key, spec={"length": 5}), force=False)
    kube.merge_patch(KITES, key, {"spec": {"replicas": 3}}, subresource="scale")
    assert kube.get(KITES, key, "scale")["spec"] == {"replicas": 3}
    kube.apply(KITES, kite(key, spec={"length": 6}), force=False)
    assert kube.get(KITES, key)["spec"] == {"length": 6, "replicas": 3}, "nobody applied replicas"


@pytest.mark.usefixtures("kites")
def test_what_a_schema_forbids_is_refused_with_the_field(kube: Kube, namespace: str) -> None:
    with pytest.raises(StatusError, match=r"spec\.length.*greater than or equal to 0"):
        kube.apply(KITES, kite(Key(namespace, "red"), spec={"length": -1}), force=False)


def test_a_deletion_of_another_object_of_that_name_is_refused(kube: Kube, namespace: str) -> None:
    key = Key(namespace, "a")
    first = kube.create(CONFIG_MAPS, config_map(key))["metadata"]
    kube.delete(CONFIG_MAPS, key, uid=first["uid"])
    kube.create(CONFIG_MAPS, config_map(key))
    with pytest.raises(ConflictError, match="in the precondition"):
        kube.delete(CONFIG_MAPS, key, uid=first["uid"])
    kube.get(CONFIG_MAPS, key)


def test_a_selection_is_listed(kube: Kube, namespace: str) -> None:
    for name in "abcde":
        obj = config_map(Key(namespace, name))
        obj["metadata"]["labels"] = {"vowel": "yes" if name in "ae" else "no"}
        kube.create(CONFIG_MAPS, obj)

    def names(selection: Selection) -> list[str]:
        items = kube.list(CONFIG_MAPS, selection).items
        assert all((item["kind"], item["apiVersion"]) == ("ConfigMap", "v1") for item in items)
        return [key_of(item).name for item in items if key_of(item).name in "abcde"]

    assert names(Selection(namespace)) == ["a", "b", "c", "d", "e"]
    assert names(Selection(namespace, labels="vowel=no")) == ["b", "c", "d"]
    assert names(Selection(namespace, fields="metadata.name=c")) == ["c"]


def test_a_watch_shows_what_follows_and_ends_when_it_was_asked_to(
    kube: Kube, namespace: str
) -> None:
    kube.create(CONFIG_MAPS, config_map(Key(namespace, "a")))
    selection = Selection(namespace, fields="metadata.name!=kube-root-ca.crt")
    version = kube.list(CONFIG_MAPS, selection).resource_version
    kube.create(CONFIG_MAPS, config_map(Key(namespace, "b")))
    kube.delete(CONFIG_MAPS, Key(namespace, "a"))
    with kube.watch(CONFIG_MAPS, selection, version, Window(watch_s=1)) as stream:
        events = [event for event in stream if event.type is not WatchEventType.BOOKMARK]
    seen = [(event.type.value, key_of(event.object).name) for event in events]
    assert seen == [("ADDED", "b"), ("DELETED", "a")]


def test_an_unknown_token_is_refused(control_plane: ControlPlane, tmp_path: Path) -> None:
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": "nobody's"}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    with pytest.raises(StatusError, match="401"):
        Kube(Connection.from_kubeconfig(kubeconfig), "test").list(CONFIG_MAPS)


def test_a_pod_finds_its_api_server_and_is_its_service_account(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_plane.kubectl("--namespace", namespace, "create", "serviceaccount", "operator")
    kubeconfig = control_plane.service_account_kubeconfig(namespace, "operator")
    config = yaml.safe_load(kubeconfig.read_text())
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text(config["users"][0]["user"]["token"])
    encoded = config["clusters"][0]["cluster"]["certificate-authority-data"]
    authority.write_bytes(base64.b64decode(encoded))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    address = urlsplit(control_plane.address)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port or 443))
    pod = Kube(Connection.in_cluster(), "test")
    with pytest.raises(StatusError, match=f"{namespace}:operator.*cannot list"):
        pod.list(CONFIG_MAPS)


def test_without_a_configuration_there_is_no_client(control_plane: ControlPlane) -> None:
    with pytest.raises(NotConfiguredError, match="no-such"):
        Connection.from_kubeconfig(control_plane.folder / "no-such")
    with pytest.raises(NotConfiguredError, match="service account"):
        Connection.in_cluster()
