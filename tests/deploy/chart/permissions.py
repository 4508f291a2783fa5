"""What the operator does at an API server, and what for: the chart grants this, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LEASE_NAME = "baton-controller"


class Where(Enum):
    """In which namespaces."""

    CLUSTERS = "those whose ServingClusters it looks after"
    LEASE = "that of its Lease alone"


@dataclass(frozen=True)
class Permission:
    group: str
    resource: str
    """With a subresource after a slash."""
    verbs: frozenset[str]
    why: str
    where: Where = Where.CLUSTERS
    name: str | None = None
    """Of this object alone; None: of all."""


def _needs(group: str, resource: str, verbs: str, why: str) -> Permission:
    return Permission(group, resource, frozenset(verbs.split()), why)


PERMISSIONS = (
    _needs("baton.dev", "servingclusters", "list watch patch", "follow; keep the finalizer"),
    _needs("baton.dev", "servingclusters/status", "patch", "tell"),
    _needs("baton.dev", "servingclusters/finalizers", "update",
           "own what holds up a cluster's deletion, where OwnerReferencesPermissionEnforcement is"),
    _needs("baton.dev", "workerpools", "list watch create patch delete", "one for each pool"),
    _needs("baton.dev", "workerpools/status", "patch", "tell"),
    _needs("ray.io", "rayclusters", "list watch create patch delete",
           "the pods of a unit; it goes before what they need"),
    _needs("apps", "deployments", "list watch create patch", "apply: the routers"),
    _needs("", "pods", "list watch", "see which are there"),
    _needs("", "configmaps", "create patch", "cluster.yaml of a unit, and of the routers"),
    _needs("", "serviceaccounts", "create patch", "apply: the pods' own, which may do nothing"),
    _needs("", "services", "create patch", "apply: the routers', the control service's"),
    _needs("", "secrets", "get create patch",
           "Ray's token, keys. It makes pods, which mount any Secret: to read opens no more doors"),
    _needs("", "events", "create patch", "what people read in kubectl describe"),
    _needs("policy", "poddisruptionbudgets", "create patch", "apply: one by one"),
    _needs("networking.k8s.io", "networkpolicies", "create patch", "apply: who may connect"),
    _needs("networking.k8s.io", "ingresses", "get create patch delete",
           "apply, for a name; remove its own alone"),
    _needs("gateway.networking.k8s.io", "grpcroutes", "get create patch delete",
           "apply, for a name and a Gateway; remove its own alone"),
    _needs("gateway.networking.k8s.io", "httproutes", "get create patch delete",
           "the same, to OpenAI's API"),
    _needs("cert-manager.io", "certificates", "get create patch delete",
           "apply, where routers name an issuer; remove its own alone"),
    _needs("monitoring.coreos.com", "podmonitors", "get create patch delete",
           "apply, where the chart asks for them; remove its own alone"),
    Permission("coordination.k8s.io", "leases", frozenset({"create"}), "lead", Where.LEASE),
    Permission("coordination.k8s.io", "leases", frozenset({"get", "patch"}), "lead", Where.LEASE,
               LEASE_NAME),
)  # fmt: skip
