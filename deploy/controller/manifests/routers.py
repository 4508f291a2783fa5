"""The routers: Deployment, Service, disruption budget, and the way in from outside."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.api.naming import GROUP
from deploy.api.serving_cluster import RouterSpec, ServingClusterSpec
from deploy.controller.manifests.common import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    CONTAINER_SECURITY,
    CONTROL_PORT,
    METRICS_PORT,
    POD_ENV,
    ROUTER_PORT,
    Object,
    Owner,
    Release,
    config_volume,
    env,
)
from deploy.controller.manifests.merge import with_settings
from deploy.controller.manifests.pods import probe_of, pull_secrets
from deploy.controller.manifests.router_access import HEALTH_PORT, access_mounts, access_volumes

ROUTER_CONTAINER = "router"
FIRST_ROUTERS = 2
"""As long as nobody says how many."""
_DRAIN_MARGIN_S = 15
_CONFIG_HASH = f"{GROUP}/config-hash"


@dataclass(frozen=True)
class RouterContext:
    """What the routers of one ServingCluster are made from."""

    owner: Owner
    spec: ServingClusterSpec
    release: Release
    settings_hash: str
    """Of all that a router must be restarted for."""
    has_grpc_probes: bool = True
    """Whether the API server knows them: since 1.24."""


def router_deployment(context: RouterContext) -> Object:
    """Rolled one by one: a router that leaves lets its streams finish, and requests whose router is
    gone are found again by the next."""
    owner, router = context.owner, context.spec.router
    labels = owner.labels("router")
    own = {
        "metadata": {"labels": labels, "annotations": {_CONFIG_HASH: context.settings_hash}},
        "spec": _router_pod(context),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(owner.router_name, "router"),
        "spec": {
            **({} if router.replicas is None else {"replicas": router.replicas}),
            "selector": {"matchLabels": labels},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": with_settings(own, router, ROUTER_CONTAINER),
        },
    }


def first_routers(deployment: Object) -> Object:
    """The Deployment as it is made, where nobody has said how many routers there are."""
    return deployment | {"spec": {"replicas": FIRST_ROUTERS} | deployment["spec"]}


def _router_pod(context: RouterContext) -> Object:
    owner, spec = context.owner, context.spec
    has_tls = spec.router.tls is not None
    image = spec.images.router or context.release.router_image
    probe = probe_of(HEALTH_PORT if has_tls else ROUTER_PORT, context.has_grpc_probes)
    container = {
        "name": ROUTER_CONTAINER,
        "image": image,
        "imagePullPolicy": spec.images.pull_policy,
        "command": ["python", "-m", "router"],
        "args": [
            *("--control", owner.control_address),
            *("--config", CONFIG_FILE),
            *("--listen", f"0.0.0.0:{ROUTER_PORT}"),
        ],
        "env": [*POD_ENV, env("HOME", "/tmp")],
        "ports": [
            {"name": "grpc", "containerPort": ROUTER_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
            *([{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}] * has_tls),
        ],
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": probe | {"periodSeconds": 5},
        "livenessProbe": probe | {"periodSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [CONFIG_MOUNT, *access_mounts(spec.router)],
        "securityContext": dict(CONTAINER_SECURITY),
    }
    drain_s = int(spec.advanced.router.drain_timeout_s)
    return {
        "serviceAccountName": f"{owner.name}-pods",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": drain_s + _DRAIN_MARGIN_S,
        "securityContext": {"fsGroup": 1000, "runAsUser": 1000, "runAsNonRoot": True},
        "containers": [container],
        "volumes": [
            config_volume(owner.config_name),
            *access_volumes(owner, spec.router),
        ],
        **pull_secrets(spec.images),
    }


def control_service(owner: Owner, unit: str) -> Object:
    """Leads to the head of the oldest unit: its address stays whichever that is."""
    port = {"name": "control", "port": CONTROL_PORT, "targetPort": "control", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.control_name, "head"),
        "spec": {"selector": owner.unit_labels("head", unit), "ports": [port]},
    }


def router_service(owner: Owner, router: RouterSpec) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.router_name, "router"),
        "spec": {
            "type": router.service_type,
            "selector": owner.labels("router"),
            "ports": [
                {
                    "name": "grpc",
                    "port": ROUTER_PORT,
                    "targetPort": "grpc",
                    "protocol": "TCP",
                    "appProtocol": "kubernetes.io/h2c" if router.tls is None else "https",
                }
            ],
        },
    }
