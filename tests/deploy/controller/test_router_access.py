"""TLS and tokens of the routers, from a ServingCluster to what their processes read."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from baton.config.cluster import parse_config
from baton.errors import ConfigError
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.controller.manifests.companions import router_certificate
from deploy.controller.manifests.routers import router_service, router_settings
from tests.deploy.controller.clusters import OWNER, routers_of, spec_of
from tests.deploy.schemas import check_kubernetes

GIVEN = {"secretName": "front-door", "requireClientCertificate": True}
ISSUED = {"issuerRef": {"name": "internal"}}
TOKENS = {"tokenSecretName": "tenants", "operators": ["prometheus"]}


def pod_of(spec: ServingClusterSpec, has_grpc_probes: bool = True) -> dict[str, Any]:
    template = routers_of(spec, has_grpc_probes=has_grpc_probes)["spec"]["template"]
    pod: dict[str, Any] = template["spec"]
    return pod


def secrets_mounted(pod: dict[str, Any]) -> dict[str, str]:
    """Folder in the container -> Secret."""
    volumes = {each["name"]: each["secret"]["secretName"]
               for each in pod["volumes"] if "secret" in each}  # fmt: skip
    mounts = pod["containers"][0]["volumeMounts"]
    return {each["mountPath"]: volumes[each["name"]] for each in mounts if each["name"] in volumes}


def test_what_routers_are_told_to_read_lies_in_the_secrets_that_they_mount() -> None:
    spec = spec_of(router={"tls": GIVEN, "auth": TOKENS})
    settings = router_settings(spec)
    assert settings.tls is not None
    assert settings.auth is not None
    mounted = secrets_mounted(pod_of(spec))
    files = (settings.tls.certificate_file, settings.tls.key_file, settings.tls.client_ca_file)
    named = {PurePosixPath(file or "") for file in files}
    assert {path.name for path in named} == {"tls.crt", "tls.key", "ca.crt"}
    assert {mounted[str(path.parent)] for path in named} == {"front-door"}
    assert mounted[settings.auth.tokens] == "tenants"
    assert (settings.auth.operators, settings.metrics.host) == (("prometheus",), "0.0.0.0")
    for made in (routers_of(spec), router_service(OWNER, spec.router)):
        check_kubernetes(made)
    section = {"tls": vars(settings.tls), "auth": vars(settings.auth)}
    read = parse_config({"router": section}).router
    assert (read.tls, read.auth) == (settings.tls, settings.auth)
    pod = pod_of(spec)
    modes = [each["secret"]["defaultMode"] for each in pod["volumes"] if "secret" in each]
    assert modes == [0o440] * 3, "for the routers' user and nobody else"
    assert pod["securityContext"]["fsGroup"] == 1000


@pytest.mark.parametrize(("has_grpc_probes", "asks"), [(True, "grpc"), (False, "tcpSocket")])
def test_probes_which_speak_no_tls_ask_at_a_port_that_serves_health_alone(
    has_grpc_probes: bool, asks: str
) -> None:
    plain, secured = spec_of(), spec_of(router={"tls": GIVEN})
    assert router_settings(plain).health_port is None
    for spec in (plain, secured):
        settings = router_settings(spec)
        (container,) = pod_of(spec, has_grpc_probes)["containers"]
        asked = {container[f"{kind}Probe"][asks]["port"]
                 for kind in ("startup", "readiness", "liveness")}  # fmt: skip
        assert asked == {settings.health_port or settings.port}
        assert asked <= {port["containerPort"] for port in container["ports"]}


def test_without_tls_and_tokens_routers_ask_for_neither() -> None:
    spec = spec_of()
    settings = router_settings(spec)
    assert (settings.tls, settings.auth) == (None, None)
    assert router_certificate(OWNER, spec.router) is None


def test_a_certificate_is_asked_for_by_every_name_of_the_service() -> None:
    router = {"tls": ISSUED, "hostname": "llm.example.org"}
    spec = spec_of(router=router)
    made = router_certificate(OWNER, spec.router)
    assert made is not None
    assert made["spec"]["issuerRef"] == {
        "name": "internal",
        "kind": "Issuer",
        "group": "cert-manager.io",
    }
    names = made["spec"]["dnsNames"]
    assert {"main-router", "main-router.models.svc", "llm.example.org"} <= set(names)
    assert "server auth" in made["spec"]["usages"]
    assert secrets_mounted(pod_of(spec))["/etc/baton-tls"] == made["spec"]["secretName"]


def test_nobody_issues_what_is_given() -> None:
    assert router_certificate(OWNER, spec_of(router={"tls": GIVEN}).router) is None


def test_the_service_says_what_is_spoken_behind_it() -> None:
    for router, said in (({}, "kubernetes.io/h2c"), ({"tls": GIVEN}, "https")):
        ports = router_service(OWNER, spec_of(router=router).router)["spec"]["ports"]
        spoken = {port["name"]: port["appProtocol"] for port in ports}
        assert spoken == {"grpc": said, "http": "https" if router else "http"}


def test_files_of_a_pod_cannot_be_named_in_a_serving_cluster() -> None:
    with pytest.raises(ConfigError, match=r"spec\.advanced\.router\.auth"):
        spec_of(advanced={"router": {"auth": {"tokens": "/tokens"}}})
