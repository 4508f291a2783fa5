"""The kinds that the operator reads or writes."""

from __future__ import annotations

from deploy.api.naming import GROUP, VERSION
from deploy.controller.kit.objects import Resource

SERVING_CLUSTERS = Resource(GROUP, VERSION, "servingclusters")
WORKER_POOLS = Resource(GROUP, VERSION, "workerpools")
RAY_CLUSTERS = Resource("ray.io", "v1", "rayclusters")
PODS = Resource("", "v1", "pods")
CONFIG_MAPS = Resource("", "v1", "configmaps")
SECRETS = Resource("", "v1", "secrets")
SERVICES = Resource("", "v1", "services")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts")
DEPLOYMENTS = Resource("apps", "v1", "deployments")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies")
INGRESSES = Resource("networking.k8s.io", "v1", "ingresses")
GRPC_ROUTES = Resource("gateway.networking.k8s.io", "v1", "grpcroutes")
HTTP_ROUTES = Resource("gateway.networking.k8s.io", "v1", "httproutes")
CERTIFICATES = Resource("cert-manager.io", "v1", "certificates")
POD_MONITORS = Resource("monitoring.coreos.com", "v1", "podmonitors")
BUDGETS = tuple(
    Resource("policy", version, "poddisruptionbudgets") for version in ("v1", "v1beta1")
)
"""The newest first; the latter before 1.21."""
