"""What the objects of a ServingCluster share: names, labels, owners, ports, environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.api.naming import API_VERSION, GROUP
from deploy.api.serving_cluster import Images, IssuerRef
from deploy.controller.kit.objects import Object as Seen

Object = dict[str, Any]

CONTROL_PORT = 7101
ROUTER_PORT = 7100
METRICS_PORT = 7102
HTTP_PORT = 8000
"""The port of OpenAI's API at the routers."""
WORKER_PORT = 7104
"""The port of a worker's links."""
HEALTH_PORT = 7103
"""The port for probes alone, of workers and of routers that serve TLS."""
RAY_PORT = 6379

CONFIG_FOLDER = "/etc/baton/config"
CONFIG_FILE = f"{CONFIG_FOLDER}/cluster.yaml"
IDENTITY_FOLDER = "/etc/baton/identity"
"""Where processes look for their identity by default."""
RUN_FOLDER = "/var/run/baton"
WEIGHTS_FOLDER = "/var/cache/baton/weights"

CLUSTER_LABEL = f"{GROUP}/cluster"
POOL_LABEL = f"{GROUP}/pool"
ROLE_LABEL = f"{GROUP}/role"
UNIT_LABEL = f"{GROUP}/unit"
"""The code of the unit that an object belongs to."""
COMPONENT_LABEL = "app.kubernetes.io/component"
OPERATOR_LABEL = f"{GROUP}/operator"
"""The operator's own pods carry it."""


@dataclass(frozen=True)
class PodMonitors:
    """How the Prometheus operator is to scrape each cluster."""

    interval: str
    """The time between two scrapes, such as 15s."""
    labels: Mapping[str, str]
    """What a Prometheus selects PodMonitors by."""


@dataclass(frozen=True)
class Release:
    """What the operator was installed with."""

    worker_image: str
    router_image: str
    ray_version: str
    """What ServingClusters get that name no images or no version of Ray."""
    namespace: str | None = None
    """Where the operator's pods are; None: not in the cluster, or not known."""
    pod_monitors: PodMonitors | None = None
    """None: no PodMonitors are made."""


@dataclass(frozen=True)
class Owner:
    """The ServingCluster that everything belongs to, and is deleted with."""

    name: str
    namespace: str
    uid: str

    def reference(self) -> Object:
        return {
            "apiVersion": API_VERSION,
            "kind": "ServingCluster",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def pool_reference(self, pool: str, uid: str) -> Object:
        """Return the owner reference of what is deleted with a pool's WorkerPool."""
        name = self.pool_name(pool)
        return {"apiVersion": API_VERSION, "kind": "WorkerPool", "name": name, "uid": uid}

    def labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "baton",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": "baton-controller",
            COMPONENT_LABEL: component,
            CLUSTER_LABEL: self.name,
        }

    def metadata(self, name: str, component: str) -> Object:
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(component),
            "ownerReferences": [self.reference()],
        }

    def unit_labels(self, component: str, unit: str) -> dict[str, str]:
        return self.labels(component) | {UNIT_LABEL: unit}

    def unit_name(self, unit: str) -> str:
        """Name a unit's RayCluster and ConfigMap."""
        return f"{self.name}-{unit}"

    def head_host(self, unit: str) -> str:
        """Name KubeRay's Service of a unit's head pod, as pods of any namespace reach it."""
        return f"{self.unit_name(unit)}-head-svc.{self.namespace}.svc"

    def control_of(self, unit: str) -> str:
        """Return the address of a unit's control service."""
        return f"{self.head_host(unit)}:{CONTROL_PORT}"

    @property
    def control_name(self) -> str:
        """Name the Service of the oldest unit's head, which routers ask for all units."""
        return f"{self.name}-control"

    @property
    def control_host(self) -> str:
        return f"{self.control_name}.{self.namespace}.svc"

    @property
    def control_address(self) -> str:
        return f"{self.control_host}:{CONTROL_PORT}"

    @property
    def router_name(self) -> str:
        return f"{self.name}-router"

    @property
    def config_name(self) -> str:
        """Name the routers' ConfigMap."""
        return f"{self.name}-config"

    def pool_name(self, pool: str) -> str:
        """Name a pool's WorkerPool. The pools of the cluster called `default` have bare names."""
        return pool if self.name == "default" else f"{self.name}-{pool}"


def manifest(api_version: str, kind: str, metadata: Object, **parts: Any) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}


def ray_reference(ray_cluster: Seen) -> Object:
    """Return the owner reference of what is deleted with a RayCluster."""
    kind = {key: ray_cluster[key] for key in ("apiVersion", "kind")}
    return kind | {key: ray_cluster["metadata"][key] for key in ("name", "uid")}


def issued_certificate(
    metadata: Object, issuer: IssuerRef, secret: str, usages: Sequence[str], **names: Sequence[str]
) -> Object:
    """Make the Certificate that asks cert-manager to keep one in a Secret."""
    spec = {
        "secretName": secret,
        **names,
        "usages": ["digital signature", *usages],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "issuerRef": {"name": issuer.name, "kind": issuer.kind, "group": "cert-manager.io"},
    }
    return manifest("cert-manager.io/v1", "Certificate", metadata, spec=spec)


def env(name: str, value: str) -> Object:
    return {"name": name, "value": value}


POD_ENV: Sequence[Object] = tuple(
    {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    for name, path in (
        ("POD_NAME", "metadata.name"),
        ("POD_IP", "status.podIP"),
        ("NODE_NAME", "spec.nodeName"),
    )
)
"""What a process knows of its pod."""

CONTAINER_SECURITY: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""What the `restricted` pod security standard asks for."""
SECRET_MODE = 0o440
"""The mode of a Secret's files: the pod's user alone reads them."""
LAST_WORDS: Mapping[str, Any] = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""A container that fails leaves the end of its log in its pod's status."""
POD_SECURITY: Mapping[str, Any] = {
    "fsGroup": 1000,
    "fsGroupChangePolicy": "OnRootMismatch",  # else each start walks all files of a claim
    "runAsUser": 1000,
    "runAsNonRoot": True,
}

CONFIG_VOLUME = "config"
CONFIG_MOUNT: Mapping[str, Any] = {
    "name": CONFIG_VOLUME,
    "mountPath": CONFIG_FOLDER,
    "readOnly": True,
}


def config_volume(config_map: str) -> Object:
    return {"name": CONFIG_VOLUME, "configMap": {"name": config_map}}


def container_port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def probe_of(port: int, has_grpc_probes: bool) -> Object:
    """Ask whether the port's service serves; without gRPC probes, whether it listens."""
    return {"grpc" if has_grpc_probes else "tcpSocket": {"port": port}}


def pull_secrets(images: Images) -> Object:
    names = [{"name": name} for name in images.pull_secrets]
    return {"imagePullSecrets": names} if names else {}
