"""The routers: Deployment and Service, and what their processes read of TLS and bearer tokens.

Secrets may change while the routers run: they read the files again.
"""

from __future__ import annotations

from baton.config.router import AuthConfig, RouterConfig, TlsConfig
from baton.config.settings import changed
from baton.process.log import SETTINGS_VARIABLE
from deploy.api.naming import GROUP
from deploy.api.serving_cluster import RouterSpec, RouterTls, ServingClusterSpec
from deploy.controller.manifests.common import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    CONTAINER_SECURITY,
    CONTROL_PORT,
    HEALTH_PORT,
    HTTP_PORT,
    LAST_WORDS,
    METRICS_PORT,
    POD_ENV,
    POD_SECURITY,
    ROUTER_PORT,
    SECRET_MODE,
    Object,
    Owner,
    Release,
    config_volume,
    container_port,
    env,
    manifest,
    probe_of,
    pull_secrets,
)
from deploy.controller.manifests.identity import identity_of
from deploy.controller.manifests.merge import with_settings

ROUTER_CONTAINER = "router"
FIRST_ROUTERS = 2
"""How many routers there are while nobody says."""
_DRAIN_MARGIN_S = 15
_CONFIG_HASH = f"{GROUP}/config-hash"
_TLS_FOLDER = "/etc/baton-tls"
_TOKENS_FOLDER = "/etc/baton-tokens"


def router_settings(spec: ServingClusterSpec) -> RouterConfig:
    """Return the settings of a cluster's routers in their pods."""
    router = spec.router
    return changed(
        spec.advanced.router,
        host="0.0.0.0",
        port=ROUTER_PORT,
        http={"port": HTTP_PORT},
        metrics={"port": METRICS_PORT, "host": "0.0.0.0"},
        traces={"endpoint": router.trace_endpoint},
        health_port=None if router.tls is None else HEALTH_PORT,
        tls=None if router.tls is None else _tls_files(router.tls),
        auth=None if router.auth is None else AuthConfig(_TOKENS_FOLDER, router.auth.operators),
    )


def _tls_files(tls: RouterTls) -> TlsConfig:
    client_ca = f"{_TLS_FOLDER}/ca.crt" if tls.require_client_certificate else None
    return TlsConfig(f"{_TLS_FOLDER}/tls.crt", f"{_TLS_FOLDER}/tls.key", client_ca)


def tls_secret(owner: Owner, tls: RouterTls) -> str:
    """Name the Secret of the routers' certificate: the given one, or what the issuer signs."""
    return tls.secret_name or f"{owner.router_name}-tls"


def router_deployment(
    owner: Owner,
    spec: ServingClusterSpec,
    release: Release,
    settings_hash: str,
    *,
    has_grpc_probes: bool = True,
) -> Object:
    """Routers roll one by one. One that leaves lets its streams finish. The next one finds requests
    whose router is gone.

    `settings_hash`: of all that a router must be restarted for; `has_grpc_probes`: whether the API
    server knows them, since 1.24.
    """
    router, labels = spec.router, owner.labels("router")
    own = {
        "metadata": {"labels": labels, "annotations": {_CONFIG_HASH: settings_hash}},
        "spec": _router_pod(owner, spec, release, has_grpc_probes),
    }
    made = {
        **({} if router.replicas is None else {"replicas": router.replicas}),
        "selector": {"matchLabels": labels},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": with_settings(own, router, ROUTER_CONTAINER),
    }
    return manifest("apps/v1", "Deployment", owner.metadata(owner.router_name, "router"), spec=made)


def first_routers(deployment: Object) -> Object:
    """Return the Deployment as it is made where nobody has said how many routers there are."""
    return deployment | {"spec": {"replicas": FIRST_ROUTERS} | deployment["spec"]}


def _router_pod(
    owner: Owner, spec: ServingClusterSpec, release: Release, has_grpc_probes: bool
) -> Object:
    router = spec.router
    ports = {"grpc": ROUTER_PORT, "http": HTTP_PORT, "metrics": METRICS_PORT}
    if router.tls is not None:
        ports["health"] = HEALTH_PORT
    probe = probe_of(ports.get("health", ROUTER_PORT), has_grpc_probes)
    secrets = _secrets(owner, spec)
    container = {
        "name": ROUTER_CONTAINER,
        "image": spec.images.router or release.router_image,
        "imagePullPolicy": spec.images.pull_policy,
        "command": ["python", "-m", "router"],
        "args": [
            *("--control", owner.control_address),
            *("--config", CONFIG_FILE),
            *("--listen", f"0.0.0.0:{ROUTER_PORT}"),
        ],
        "env": [*POD_ENV, env(SETTINGS_VARIABLE, CONFIG_FILE), env("HOME", "/tmp")],
        "ports": [container_port(name, port) for name, port in ports.items()],
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": probe | {"periodSeconds": 5},
        "livenessProbe": probe | {"periodSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [
            CONFIG_MOUNT,
            *({"name": name, "mountPath": folder, "readOnly": True} for name, folder, _ in secrets),
        ],
        "securityContext": dict(CONTAINER_SECURITY),
        **LAST_WORDS,
    }
    return {
        "serviceAccountName": f"{owner.name}-pods",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": int(spec.advanced.router.drain_timeout_s)
        + _DRAIN_MARGIN_S,
        "securityContext": dict(POD_SECURITY),
        "containers": [container],
        "volumes": [
            config_volume(owner.config_name),
            *(
                {"name": name, "secret": {"secretName": secret, "defaultMode": SECRET_MODE}}
                for name, _, secret in secrets
            ),
        ],
        **pull_secrets(spec.images),
    }


def _secrets(owner: Owner, spec: ServingClusterSpec) -> list[tuple[str, str, str]]:
    """Return each volume's name, its folder and its Secret."""
    router, found = spec.router, [identity_of(owner, spec, "router")]
    if router.tls is not None:
        found.append(("tls", _TLS_FOLDER, tls_secret(owner, router.tls)))
    if router.auth is not None:
        found.append(("tokens", _TOKENS_FOLDER, router.auth.token_secret_name))
    return found


def control_service(owner: Owner, unit: str) -> Object:
    """Make the Service of the oldest unit's head. Its address stays when that is another."""
    port = {"name": "control", "port": CONTROL_PORT, "targetPort": "control", "protocol": "TCP"}
    spec = {"selector": owner.unit_labels("head", unit), "ports": [port]}
    return manifest("v1", "Service", owner.metadata(owner.control_name, "head"), spec=spec)


def router_service(owner: Owner, router: RouterSpec) -> Object:
    is_plain = router.tls is None
    spoken = {
        "grpc": (ROUTER_PORT, "kubernetes.io/h2c" if is_plain else "https"),
        "http": (HTTP_PORT, "http" if is_plain else "https"),
    }
    ports = [
        {
            "name": name,
            "port": port,
            "targetPort": name,
            "protocol": "TCP",
            "appProtocol": protocol,
        }
        for name, (port, protocol) in spoken.items()
    ]
    spec = {"type": router.service_type, "selector": owner.labels("router"), "ports": ports}
    return manifest("v1", "Service", owner.metadata(owner.router_name, "router"), spec=spec)
