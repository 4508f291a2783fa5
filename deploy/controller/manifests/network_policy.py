"""Who may connect to a cluster's pods. Other policies may open more; what pods connect to is left
open: hubs, object stores, Redis.

| to | port | from |
| --- | --- | --- |
| head, workers | every one: Ray, UCX, the workers' own | head and workers of the cluster |
| head | ControlService | routers of the cluster, the operator |
| workers | gRPC | routers of the cluster |
| head | Ray's dashboard | KubeRay's operator |
| workers, routers | metrics | anywhere: who scrapes is not known |
| routers | gRPC | anywhere |

Pods are known by their labels, which whoever may make pods in the cluster's namespace may give to
any. A pod's own node, and so probes and `kubectl port-forward`, always may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.controller.manifests.common import (
    CLUSTER_LABEL,
    COMPONENT_LABEL,
    CONTROL_PORT,
    METRICS_PORT,
    OPERATOR_LABEL,
    ROUTER_PORT,
    WORKER_PORT,
    Object,
    Owner,
)

_DASHBOARD_PORT = 8265
_KUBERAY = {"matchLabels": {COMPONENT_LABEL: "kuberay-operator"}}
_OPERATOR = {"matchExpressions": [{"key": OPERATOR_LABEL, "operator": "Exists"}]}
_ANYWHERE: Mapping[str, object] = {}


def head_policy(owner: Owner, operator_namespace: str | None) -> Object:
    """`operator_namespace`: None where it is not known, or namespaces do not carry their names: any
    pod with the operator's label may then speak to the ControlService."""
    namespace = (
        {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}}
        if operator_namespace is not None
        else _ANYWHERE
    )
    operator = {"namespaceSelector": namespace, "podSelector": _OPERATOR}
    kuberay = {"namespaceSelector": _ANYWHERE, "podSelector": _KUBERAY}
    rules = [
        {"from": [_own_pods(owner, "head", "worker")]},
        {"from": [_own_pods(owner, "router"), operator], "ports": [_tcp(CONTROL_PORT)]},
        {"from": [kuberay], "ports": [_tcp(_DASHBOARD_PORT)]},
    ]
    return _policy(owner, "head", rules)


def worker_policy(owner: Owner) -> Object:
    routers = {"from": [_own_pods(owner, "router")], "ports": [_tcp(WORKER_PORT)]}
    peers = {"from": [_own_pods(owner, "head", "worker")]}
    return _policy(owner, "worker", [peers, routers, {"ports": [_tcp(METRICS_PORT)]}])


def router_policy(owner: Owner) -> Object:
    return _policy(owner, "router", [{"ports": [_tcp(ROUTER_PORT), _tcp(METRICS_PORT)]}])


def _own_pods(owner: Owner, *components: str) -> Object:
    """Of the cluster's own namespace."""
    among = {"key": COMPONENT_LABEL, "operator": "In", "values": list(components)}
    selector = {"matchLabels": {CLUSTER_LABEL: owner.name}, "matchExpressions": [among]}
    return {"podSelector": selector}


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _policy(owner: Owner, component: str, ingress: Sequence[Object]) -> Object:
    selected = {CLUSTER_LABEL: owner.name, COMPONENT_LABEL: component}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(f"{owner.name}-{component}-ports", component),
        "spec": {
            "podSelector": {"matchLabels": selected},
            "policyTypes": ["Ingress"],
            "ingress": list(ingress),
        },
    }
