"""The way in from outside, for a name: a GRPCRoute on somebody's Gateway, or an Ingress.

A Gateway speaks to the routers as the Service's appProtocol says; where these serve TLS, it needs a
BackendTLSPolicy, which only those can write who know its authority.
"""

from __future__ import annotations

from deploy.api.serving_cluster import RouterIngress, RouterSpec, ServingClusterSpec
from deploy.controller.manifests.common import ROUTER_PORT, Object, Owner
from deploy.controller.manifests.router_access import tls_secret


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
