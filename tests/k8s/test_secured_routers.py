"""Who is let in on pods: by routers behind TLS and tokens, and by the control service."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.client import Client
from baton.client.credentials import Tls
from baton.control.client import ControlClient
from baton.errors import PermissionDeniedError, UnauthenticatedError
from tests.certificates import Authority
from tests.identities import WORKER, identity
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.installed import MODEL, Installed, control_address, on_pods, router_address
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.objects import secret

pytestmark = on_pods(300)


def test_routers_serve_what_their_secrets_say_and_probes_find_them_ready(
    control_plane: ControlPlane,
    namespace: str,
    installed: Installed,
    kubelet: Kubelet,
    tmp_path: Path,
) -> None:
    name = f"default-router.{namespace}.svc"
    authority = Authority(tmp_path)
    made = authority.issue("front-door", host=name)
    pair = {"tls.crt": made.certificate.read_text(), "tls.key": made.key.read_text()}
    control_plane.apply(secret(namespace, "front-door", pair))
    tokens = {"red": "red-token-1", "blue": "blue-token-1\nblue-token-2\n"}
    control_plane.apply(secret(namespace, "tenants", tokens))
    installed.install(
        model={"name": str(MODEL)},
        router={
            "replicas": 1,
            "tls": {"secretName": "front-door"},
            "auth": {"tokenSecretName": "tenants"},
        },
    )
    installed.wait_available()
    address = router_address(kubelet)
    tls = Tls(str(authority.ca), server_name=name)
    for token in ("red-token-1", "blue-token-2"):
        with Client(address, tls=tls, token=token) as client:
            assert [model.name for model in client.models()] == ["demo"]
            with pytest.raises(PermissionDeniedError):
                client.text("Who is Hugo?", tenant="green")
    with Client(address, tls=tls) as nobody, pytest.raises(UnauthenticatedError):
        nobody.models()
    strangers = {
        WORKER: PermissionDeniedError,
        identity("operator", bytes(32)): UnauthenticatedError,
    }
    for stranger, refused in strangers.items():
        with (
            ControlClient(control_address(kubelet), identity=stranger) as control,
            pytest.raises(refused),
        ):
            control.set_replicas("decode", 0)
    endpoints = installed.read("servingcluster/default")["status"]["endpoints"]
    assert endpoints["grpc"] == f"grpcs://{name}:7100"
