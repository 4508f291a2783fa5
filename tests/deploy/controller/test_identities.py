"""How a cluster's processes know each other: what pods have, and how keys change meanwhile."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.identity.keys import ROLES, Keys
from deploy.controller.kit.applied import Applied
from deploy.controller.manifests.cluster_yaml import cluster_config
from deploy.controller.manifests.identity import role_certificates
from deploy.controller.reconcile.identities import EPOCH, Identities
from tests.certificates import Authority
from tests.deploy.controller.clusters import OWNER, group_of, ray_of, routers_of, spec_of
from tests.deploy.controller.scripted_api import kube_of, scripted
from tests.deploy.controller.test_router_access import secrets_mounted
from tests.deploy.controller.written import Server
from tests.deploy.schemas import check_kubernetes

ISSUED = {"issuerRef": {"name": "inside"}}


def written(epoch: str) -> dict[str, dict[str, Any]]:
    """The Secrets that an operator writes, by name."""
    metadata = {"name": OWNER.name, "namespace": OWNER.namespace, "annotations": {EPOCH: epoch}}
    server = Server({})
    with scripted(server) as running:
        kube = kube_of(running)
        Identities(kube, Applied(kube, {})).keep({"metadata": metadata}, OWNER, spec_of())
    return {each["metadata"]["name"]: each for each in server.written("secrets")}


def test_from_epoch_to_epoch_everybody_knows_everybody_and_from_the_second_on_nobody(
    tmp_path: Path,
) -> None:
    held = []
    for epoch in "0123":
        secrets = written(epoch)
        assert set(secrets) == {f"main-identity-{name}" for name in ("root", *ROLES)}
        for role in ROLES:
            folder = tmp_path / epoch / role
            folder.mkdir(parents=True)
            for name, text in secrets[f"main-identity-{role}"]["data"].items():
                (folder / name).write_bytes(base64.b64decode(text))
        for each in secrets.values():
            check_kubernetes(each)
            assert each["metadata"]["ownerReferences"] == [OWNER.reference()]
        held.append({role: Keys.in_folder(tmp_path / epoch / role, role) for role in ROLES})
    for (at, signers), (other, verifiers) in itertools.product(enumerate(held), repeat=2):
        for signer, verifier in itertools.product(ROLES, ROLES):
            signature = signers[signer].sign("a call", [b"body"])
            is_known = verifiers[verifier].verify([signer], "a call", [b"body"], signature)
            assert is_known is (abs(at - other) <= 1)
    with pytest.raises(ConfigError, match="identity-epoch must be a whole number, not 'next'"):
        written("next")


@pytest.mark.parametrize(
    ("tls", "secret"),
    [(None, "main-identity-{}"), ({}, "main-internal-{}"), (ISSUED, "main-internal-{}")],
)
def test_a_pod_has_its_own_roles_identity_alone_where_its_process_looks_for_it(
    tls: dict[str, Any] | None, secret: str
) -> None:
    spec = spec_of(internalTLS=tls)
    assert cluster_config(OWNER, spec, {}).internal.identity == ("keys" if tls is None else "tls")
    ray = ray_of(spec)
    head = ray["spec"]["headGroupSpec"]["template"]["spec"]
    pods = {"operator": head, "worker": group_of(ray, "decode")["template"]["spec"],
            "router": routers_of(spec)["spec"]["template"]["spec"]}  # fmt: skip
    for role, pod in pods.items():
        assert secrets_mounted(pod) == {f"/etc/baton/identity/{role}": secret.format(role)}
    asked = head["containers"][0]["readinessProbe"]
    assert ("grpc" in asked) == (tls is None), "kubelet has no certificate"
    issued = role_certificates(OWNER, spec)
    assert len(issued) == (3 if tls is ISSUED else 0)
    for role, made in zip(ROLES, issued, strict=False):
        assert made["metadata"]["name"] == f"main-internal-{role}"
        names = {"uris": [f"baton:{role}"], "dnsNames": [f"baton-{role}"]}
        assert made["spec"].items() >= (names | {"secretName": secret.format(role)}).items()


def test_the_operator_shows_the_certificate_that_the_secret_holds(tmp_path: Path) -> None:
    authority, server = Authority(tmp_path), Server({})
    pair = authority.issue("operator", host="baton:operator")
    files = {"ca.crt": authority.ca, "tls.crt": pair.certificate, "tls.key": pair.key}
    with scripted(server) as running:
        kube = kube_of(running)
        identities = Identities(kube, Applied(kube, {}))
        metadata = {"name": OWNER.name, "namespace": OWNER.namespace}
        look = lambda: identities.keep({"metadata": metadata}, OWNER, spec_of(internalTLS={}))  # noqa: E731
        server.refuses["GET", "main-internal-operator"] = (404, "NotFound")
        assert look() is None
        server.refuses.clear()
        server.secret = {name: path.read_bytes() for name, path in files.items()}
        first = look()
        assert first is not None
        assert first.tls is not None
        held = first.tls.now
        pair = authority.issue("renewed", host="baton:operator")
        server.secret |= {
            "tls.crt": pair.certificate.read_bytes(),
            "tls.key": pair.key.read_bytes(),
        }
        assert look() is first
        assert first.tls.now.pair != held.pair
        server.secret = server.secret | {"tls.key": b"none"}
        with pytest.raises(
            ConfigError, match=r"internalTLS: Secret models/main-internal-operator: "
        ):
            look()
