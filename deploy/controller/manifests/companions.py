"""What stands beside a cluster's RayCluster, routers and Service: who may connect, how many pods
may be evicted at once, the way in from outside with its certificate, what is scraped.

NetworkPolicies. Other policies may open more. What pods connect to stays open: hubs, object stores,
Redis.

| to | port | from |
| --- | --- | --- |
| head, workers | every one: Ray, UCX, the workers' own | head and workers of the unit |
| head | ControlService | routers of the cluster, the operator |
| workers | links | routers of the cluster |
| head | Ray's dashboard | KubeRay's operator |
| workers, routers | metrics | pods that are labelled as a Prometheus, of any namespace |
| routers | gRPC, HTTP | anywhere |

Pods are known by their labels. Whoever may make pods in the cluster's namespace may give these to
any pod. A pod's own node, and so probes and `kubectl port-forward`, always may connect.

PodDisruptionBudgets let one router go at once, and one pod of each pool. A pool's budget counts
pods that must stay. One that counts pods that may go asks the pods' owner for its scale: a
RayCluster has none, and Kubernetes then lets nothing go at all.

Budgets keep what serves. A pod that is not ready may go at any time: otherwise one that never gets
ready would hold up its node's drain for good. Streams in it drain as in any other. So a worker's
pod is ready while its worker takes requests, by a probe of our own. KubeRay's default probe asks
the agent of the pod's raylet, and that asks the head whether it knows the node. An ailing head
would make all of a pool's pods evictable. A pod whose worker still loads would count as serving.

A Gateway speaks to the routers as the Service's appProtocol says. Where they serve TLS it needs a
BackendTLSPolicy, which only those can write who know its authority.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deploy.api.serving_cluster import RouterAuth, RouterIngress, RouterSpec, ServingClusterSpec
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.kit.objects import Resource
from deploy.controller.manifests.common import (
    CLUSTER_LABEL,
    COMPONENT_LABEL,
    CONTROL_PORT,
    HTTP_PORT,
    METRICS_PORT,
    OPERATOR_LABEL,
    POOL_LABEL,
    ROUTER_PORT,
    UNIT_LABEL,
    WORKER_PORT,
    Object,
    Owner,
    PodMonitors,
    issued_certificate,
    manifest,
    ray_reference,
)
from deploy.controller.manifests.routers import tls_secret

_DASHBOARD_PORT = 8265
_KUBERAY = {"matchLabels": {COMPONENT_LABEL: "kuberay-operator"}}
_OPERATOR = {"matchExpressions": [{"key": OPERATOR_LABEL, "operator": "Exists"}]}
_NGINX = "nginx.ingress.kubernetes.io"
_ANYWHERE: Mapping[str, object] = {}
_SCRAPERS = {
    "namespaceSelector": _ANYWHERE,
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}


# --- who may connect ------------------------------------------------------------------------------


def network_policies(owner: Owner, operator_namespace: str | None) -> list[Object]:
    """Make a policy for each component. `operator_namespace`: None where it is not known, or
    namespaces carry no names. Any pod with the operator's label may then speak to the
    ControlService."""
    named = {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}}
    operator = {
        "namespaceSelector": _ANYWHERE if operator_namespace is None else named,
        "podSelector": _OPERATOR,
    }
    kuberay = {"namespaceSelector": _ANYWHERE, "podSelector": _KUBERAY}
    routers = _own_pods(owner, "router")
    metrics = {"from": [_SCRAPERS], "ports": [_tcp(METRICS_PORT)]}
    rules = {
        "head": [
            {"from": [routers, operator], "ports": [_tcp(CONTROL_PORT)]},
            {"from": [kuberay], "ports": [_tcp(_DASHBOARD_PORT)]},
        ],
        "worker": [{"from": [routers], "ports": [_tcp(WORKER_PORT)]}, metrics],
        "router": [{"ports": [_tcp(ROUTER_PORT), _tcp(HTTP_PORT)]}, metrics],
    }
    return [
        _policy(
            owner.metadata(f"{owner.name}-{component}-ports", component),
            _own_pods(owner, component),
            ingress,
        )
        for component, ingress in rules.items()
    ]


def unit_policy(owner: Owner, ray_cluster: Seen) -> Object:
    """Let the pods of a unit alone write into its workers' memory by UCX, or run code by Ray. The
    policy is deleted with the RayCluster."""
    unit = ray_cluster["metadata"]["labels"][UNIT_LABEL]
    metadata = owner.metadata(f"{owner.unit_name(unit)}-peers", "ray")
    metadata["ownerReferences"] = [ray_reference(ray_cluster)]
    peers = _own_pods(owner, "head", "worker")
    peers["podSelector"]["matchLabels"] |= {UNIT_LABEL: unit}
    return _policy(metadata, peers, [{"from": [peers]}])


def _policy(metadata: Object, pods: Object, ingress: Sequence[Object]) -> Object:
    spec = {**pods, "policyTypes": ["Ingress"], "ingress": list(ingress)}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", metadata, spec=spec)


def _own_pods(owner: Owner, *components: str) -> Object:
    """Select pods of the cluster, in its own namespace."""
    among = {"key": COMPONENT_LABEL, "operator": "In", "values": list(components)}
    selector = {"matchLabels": {CLUSTER_LABEL: owner.name}, "matchExpressions": [among]}
    return {"podSelector": selector}


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


# --- evictions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetKind:
    """What the API server knows of budgets."""

    resource: Resource
    """The version that is served."""
    lets_unready_go: bool
    """Whether a budget can say so."""

    def budget(self, metadata: Object, labels: Mapping[str, str], **kept: int) -> Object:
        spec = {**kept, "selector": {"matchLabels": labels}}
        if self.lets_unready_go:
            spec["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
        return manifest(self.resource.api_version, "PodDisruptionBudget", metadata, spec=spec)


def router_budget(owner: Owner, kind: BudgetKind) -> Object:
    metadata = owner.metadata(owner.router_name, "router")
    return kind.budget(metadata, owner.labels("router"), maxUnavailable=1)


def pool_budget(
    owner: Owner, pool: str, pool_uid: str, kind: BudgetKind, num_expected: int
) -> Object:
    """Make a pool's budget, which goes with it. `num_expected`: pods that it is to have, or has."""
    metadata = owner.metadata(f"{owner.pool_name(pool)}-workers", "pool")
    metadata["labels"] |= {POOL_LABEL: pool}
    metadata["ownerReferences"] = [owner.pool_reference(pool, pool_uid)]
    selected = {CLUSTER_LABEL: owner.name, POOL_LABEL: pool}
    return kind.budget(metadata, selected, minAvailable=max(0, num_expected - 1))


# --- the way in -----------------------------------------------------------------------------------


def router_certificate(owner: Owner, router: RouterSpec) -> Object | None:
    """Ask cert-manager for a certificate with all names of the routers' Service; None where a
    Secret is given."""
    tls = router.tls
    if tls is None or tls.issuer_ref is None:
        return None
    service = f"{owner.router_name}.{owner.namespace}.svc"
    names = [owner.router_name, f"{owner.router_name}.{owner.namespace}", service]
    names += [f"{service}.cluster.local", *router.hostnames]
    metadata, secret = owner.metadata(owner.router_name, "router"), tls_secret(owner, tls)
    return issued_certificate(metadata, tls.issuer_ref, secret, ["server auth"], dnsNames=names)


class Way(NamedTuple):
    """How clients outside speak to the routers. `name` is that of its Ingress or route."""

    name: str
    hostname: str | None
    port: int
    protocol: str


def ways_in(owner: Owner, router: RouterSpec) -> tuple[Way, Way]:
    openai = Way(f"{owner.name}-http", router.http_hostname, HTTP_PORT, "HTTP")
    return Way(owner.router_name, router.hostname, ROUTER_PORT, "GRPC"), openai


def route(owner: Owner, router: RouterSpec, way: Way) -> Object | None:
    """Make a way's route. None: there is no Gateway, or no hostname for this way."""
    if router.gateway is None or way.hostname is None:
        return None
    namespace, _, name = router.gateway.rpartition("/")
    gateway = {"name": name} | ({"namespace": namespace} if namespace else {})
    backend = {"name": owner.router_name, "port": way.port}
    spec = {
        "parentRefs": [gateway],
        "hostnames": [way.hostname],
        "rules": [{"backendRefs": [backend]}],
    }
    metadata = owner.metadata(way.name, "router")
    return manifest("gateway.networking.k8s.io/v1", f"{way.protocol}Route", metadata, spec=spec)


def ingress(owner: Owner, spec: ServingClusterSpec, way: Way) -> Object | None:
    """The kind knows no protocols. Our own annotations are ingress-nginx's, others ignore them. It
    gives up a stream that is silent for its read timeout, and refuses bodies over 1 MiB unless told
    otherwise. Both Ingresses name all hosts of the certificate: cert-manager keeps it for one."""
    router = spec.router
    if way.hostname is None or not router.has_ingress:
        return None
    settings = router.ingress or RouterIngress()
    longest_s = str(int(spec.advanced.router.timeouts.max_s))
    metadata = owner.metadata(way.name, "router")
    metadata["annotations"] = {
        f"{_NGINX}/backend-protocol": way.protocol if router.tls is None else f"{way.protocol}S",
        f"{_NGINX}/proxy-body-size": str(spec.advanced.router.clients.max_message_bytes),
        f"{_NGINX}/proxy-read-timeout": longest_s,
        f"{_NGINX}/proxy-send-timeout": longest_s,
        **settings.annotations,
    }
    service = {"name": owner.router_name, "port": {"number": way.port}}
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
    made: Object = {"rules": [{"host": way.hostname, "http": {"paths": [path]}}]}
    if settings.class_name is not None:
        made["ingressClassName"] = settings.class_name
    secret = settings.tls_secret_name or (router.tls and tls_secret(owner, router.tls))
    if secret is not None:
        made["tls"] = [{"hosts": router.hostnames, "secretName": secret}]
    return manifest("networking.k8s.io/v1", "Ingress", metadata, spec=made)


# --- metrics --------------------------------------------------------------------------------------


def pod_monitor(owner: Owner, monitors: PodMonitors, auth: RouterAuth | None) -> Object:
    """Make what has the Prometheus operator scrape a cluster's routers and workers."""
    metadata = owner.metadata(owner.name, "monitor")
    metadata["labels"] |= monitors.labels
    # KubeRay gives the head a port of that name, too: of Ray's own, which its NetworkPolicy closes.
    scraped = {"key": COMPONENT_LABEL, "operator": "In", "values": ["router", "worker"]}
    endpoint: Object = {"port": "metrics", "interval": monitors.interval}
    if auth is not None and auth.operators:
        token = {"name": auth.token_secret_name, "key": auth.operators[0]}
        endpoint["authorization"] = {"credentials": token}
    spec = {
        "selector": {"matchLabels": {CLUSTER_LABEL: owner.name}, "matchExpressions": [scraped]},
        "podTargetLabels": [CLUSTER_LABEL, POOL_LABEL],
        "podMetricsEndpoints": [endpoint],
    }
    return manifest("monitoring.coreos.com/v1", "PodMonitor", metadata, spec=spec)
