"""The way to the routers: TLS, bearer tokens, and a GRPCRoute or Ingress from outside.

Secrets may change while the routers run: they read the files again.

A Gateway speaks to the routers as the Service's appProtocol says. Where they serve TLS it needs a
BackendTLSPolicy, which only those can write who know its authority.
"""

from __future__ import annotations

import dataclasses

from baton.config.router import AuthConfig, RouterConfig, TlsConfig
from deploy.api.serving_cluster import RouterIngress, RouterSpec, RouterTls, ServingClusterSpec
from deploy.controller.manifests.common import METRICS_PORT, ROUTER_PORT, Object, Owner

HEALTH_PORT = 7103
"""Of routers that serve TLS: Kubernetes' probes speak none."""

_TLS_FOLDER = "/etc/baton-tls"
_TOKENS_FOLDER = "/etc/baton-tokens"
_OWNER_AND_GROUP = 0o440


def router_settings(spec: ServingClusterSpec) -> RouterConfig:
    """What the routers of a cluster are to do, in a pod."""
    router = spec.router
    return dataclasses.replace(
        spec.advanced.router,
        host="0.0.0.0",
        port=ROUTER_PORT,
        metrics_port=METRICS_PORT,
        health_port=None if router.tls is None else HEALTH_PORT,
        tls=None if router.tls is None else _tls_files(router.tls),
        auth=None if router.auth is None else AuthConfig(_TOKENS_FOLDER),
    )


def _tls_files(tls: RouterTls) -> TlsConfig:
    client_ca = f"{_TLS_FOLDER}/ca.crt" if tls.require_client_certificate else None
    return TlsConfig(f"{_TLS_FOLDER}/tls.crt", f"{_TLS_FOLDER}/tls.key", client_ca)


def access_volumes(owner: Owner, router: RouterSpec) -> list[Object]:
    volumes = []
    if router.tls is not None:
        volumes.append(_secret("tls", tls_secret(owner, router.tls)))
    if router.auth is not None:
        volumes.append(_secret("tokens", router.auth.token_secret_name))
    return volumes


def access_mounts(router: RouterSpec) -> list[Object]:
    wanted = (("tls", router.tls, _TLS_FOLDER), ("tokens", router.auth, _TOKENS_FOLDER))
    return [
        {"name": name, "mountPath": folder, "readOnly": True}
        for name, section, folder in wanted
        if section is not None
    ]


def tls_secret(owner: Owner, tls: RouterTls) -> str:
    """Its name: given, or that of what the issuer signs."""
    return tls.secret_name or f"{owner.router_name}-tls"


def router_certificate(owner: Owner, router: RouterSpec) -> Object | None:
    """What cert-manager is asked to keep in the Secret, by all names of the routers' Service; None
    where a Secret is given."""
    tls = router.tls
    if tls is None or tls.issuer_ref is None:
        return None
    service = f"{owner.router_name}.{owner.namespace}.svc"
    names = [owner.router_name, f"{owner.router_name}.{owner.namespace}", service]
    names += [f"{service}.cluster.local", *([router.hostname] if router.hostname else [])]
    issuer = {"name": tls.issuer_ref.name, "kind": tls.issuer_ref.kind, "group": "cert-manager.io"}
    return {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Certificate",
        "metadata": owner.metadata(owner.router_name, "router"),
        "spec": {
            "secretName": tls_secret(owner, tls),
            "dnsNames": names,
            "usages": ["digital signature", "server auth"],
            "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            "issuerRef": issuer,
        },
    }


def _secret(name: str, secret: str) -> Object:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": _OWNER_AND_GROUP}}


def grpc_route(owner: Owner, router: RouterSpec) -> Object:
    assert router.hostname is not None
    assert router.gateway is not None
    namespace, _, name = router.gateway.rpartition("/")
    gateway = {"name": name} | ({"namespace": namespace} if namespace else {})
    backend = {"name": owner.router_name, "port": ROUTER_PORT}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GRPCRoute",
        "metadata": owner.metadata(owner.router_name, "router"),
        "spec": {
            "parentRefs": [gateway],
            "hostnames": [router.hostname],
            "rules": [{"backendRefs": [backend]}],
        },
    }


def ingress(owner: Owner, spec: ServingClusterSpec) -> Object:
    """gRPC is no part of the kind: our own annotations are ingress-nginx's, which others ignore; it
    gives a stream up that says nothing for its read timeout."""
    router = spec.router
    assert router.hostname is not None
    settings = router.ingress or RouterIngress()
    longest_s = str(int(spec.advanced.router.max_timeout_s))
    metadata = owner.metadata(owner.router_name, "router")
    metadata["annotations"] = {
        "nginx.ingress.kubernetes.io/backend-protocol": "GRPC" if router.tls is None else "GRPCS",
        "nginx.ingress.kubernetes.io/proxy-read-timeout": longest_s,
        "nginx.ingress.kubernetes.io/proxy-send-timeout": longest_s,
        **settings.annotations,
    }
    service = {"name": owner.router_name, "port": {"number": ROUTER_PORT}}
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
    made: Object = {"rules": [{"host": router.hostname, "http": {"paths": [path]}}]}
    if settings.class_name is not None:
        made["ingressClassName"] = settings.class_name
    secret = settings.tls_secret_name or (router.tls and tls_secret(owner, router.tls))
    if secret is not None:
        made["tls"] = [{"hosts": [router.hostname], "secretName": secret}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": metadata,
        "spec": made,
    }
