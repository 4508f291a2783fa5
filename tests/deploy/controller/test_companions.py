"""What stands beside a cluster: read as Kubernetes reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from deploy.controller.manifests.common import (
    CONTROL_PORT,
    HEALTH_PORT,
    HTTP_PORT,
    METRICS_PORT,
    RAY_PORT,
    ROUTER_PORT,
    WORKER_PORT,
    PodMonitors,
    Release,
)
from deploy.controller.manifests.companions import BudgetKind
from deploy.controller.manifests.resources import BUDGETS
from deploy.controller.manifests.routers import router_service
from deploy.controller.observed.fleet import NOTHING_HEARD
from deploy.controller.observed.pod import Pod
from deploy.controller.observed.view import ClusterView, PoolView, UnitView
from deploy.controller.reconcile.companions import companions
from deploy.controller.rollout.rollout import Record, UnitPlan
from deploy.controller.status.cluster_status import cluster_status
from tests.deploy.controller.clusters import (
    OWNER,
    RELEASE,
    group_of,
    pools_of,
    ray_of,
    routers_of,
    spec_of,
)
from tests.deploy.controller.views import pod, view_of
from tests.deploy.schemas import check_kubernetes

NAMESPACE_NAME = "kubernetes.io/metadata.name"
MONITORED = Release("w", "r", "2.60.0", pod_monitors=PodMonitors("30s", {"release": "prometheus"}))
Labels = Mapping[str, str]


def made(
    view: ClusterView,
    release: Release = RELEASE,
    namespace: str | None = "baton",
    lets_unready_go: bool = True,
) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    budgets = BudgetKind(BUDGETS[0], lets_unready_go)
    wanted = companions(view, release, budgets, namespace)
    manifests = [each.manifest for each in wanted if each.manifest is not None]
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def test_kubernetes_takes_what_is_its_own() -> None:
    router = {"hostname": "llm.example.com", "tls": {"secretName": "edge"}}
    by_kind = {kind: each for (kind, _), each in made(view_of(router=router)).items()}
    assert set(by_kind) == {"PodDisruptionBudget", "NetworkPolicy", "Ingress"}
    head = made(view_of())["NetworkPolicy", "main-head-ports"]
    for manifest in (*by_kind.values(), head):
        check_kubernetes(manifest)


def test_all_of_it_belongs_to_the_cluster_and_a_pools_budget_to_its_pool() -> None:
    for (kind, name), manifest in made(view_of(), MONITORED).items():
        (owner,) = manifest["metadata"]["ownerReferences"]
        wanted = ("ServingCluster", "main", OWNER.uid)
        if name == "main-decode-workers" and kind == "PodDisruptionBudget":
            wanted = ("WorkerPool", "main-decode", "uid-of-decode")
        elif name == "main-prefill-workers":
            wanted = ("WorkerPool", "main-prefill", "uid-of-prefill")
        assert (owner["kind"], owner["name"], owner["uid"]) == wanted


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pods", "num_staying"),
    [
        ([], 1),
        ([pod("a"), pod("b")], 1),
        ([pod("a"), pod("b", is_going=True)], 1),  # one leaves: no other may
        ([pod("a"), pod("b"), pod("c"), pod("d")], 3),  # scaled in: all of them still serve
        ([pod("a"), pod("b"), pod("c", is_ready=False)], 1),  # one more that never gets ready
    ],
)
def test_pods_of_a_pool_are_evicted_one_by_one(pods: list[Pod], num_staying: int) -> None:
    budget = made(view_of(pods))["PodDisruptionBudget", "main-decode-workers"]
    assert budget["spec"]["minAvailable"] == num_staying


def test_the_only_pod_of_a_pool_may_be_evicted_or_its_node_could_never_be_drained() -> None:
    view = view_of()
    pools = pools_of(view.spec, replicas=1)
    one = PoolView({"metadata": {"uid": "u"}}, pools["decode"], [pod("a")], None)
    small = dataclasses.replace(view, pools={"decode": one})
    budget = made(small)["PodDisruptionBudget", "main-decode-workers"]
    assert budget["spec"]["minAvailable"] == 0


@pytest.mark.parametrize("name", ["main-router", "main-decode-workers"])
def test_a_pod_that_never_gets_ready_holds_up_no_drain_where_a_budget_can_say_so(name: str) -> None:
    newer, older = (
        made(view_of(), lets_unready_go=known)["PodDisruptionBudget", name]["spec"]
        for known in (True, False)
    )
    assert newer == older | {"unhealthyPodEvictionPolicy": "AlwaysAllow"}


def labels_of(view: ClusterView) -> dict[str, Labels]:
    """Of the pods that are made: the head, the routers, and each pool's."""
    ray = ray_of(view.spec)["spec"]
    made = {"head": ray["headGroupSpec"], "router": routers_of(view.spec)["spec"]}
    made |= {each["groupName"]: each for each in ray["workerGroupSpecs"]}
    return {name: each["template"]["metadata"]["labels"] for name, each in made.items()}


@pytest.mark.parametrize(
    ("kind", "name", "selected"),
    [
        ("PodDisruptionBudget", "main-router", {"router"}),
        ("PodDisruptionBudget", "main-decode-workers", {"decode"}),
        ("PodDisruptionBudget", "main-prefill-workers", {"prefill"}),
        ("NetworkPolicy", "main-router-ports", {"router"}),
        ("NetworkPolicy", "main-worker-ports", {"decode", "prefill"}),
        ("NetworkPolicy", "main-head-ports", {"head"}),
        ("PodMonitor", "main", {"router", "decode", "prefill"}),
    ],
)
def test_each_selects_the_pods_that_it_is_of(kind: str, name: str, selected: set[str]) -> None:
    spec = made(view_of(), MONITORED)[kind, name]["spec"]
    selector = spec.get("podSelector") or spec["selector"]
    found = {pod for pod, labels in labels_of(view_of()).items() if _selects(selector, labels)}
    assert found == selected


# --- who may connect ------------------------------------------------------------------------------


def _selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    wanted = selector.get("matchLabels", {})
    return wanted.items() <= labels.items() and all(
        each["key"] in labels and labels[each["key"]] in each.get("values", labels.values())
        for each in selector.get("matchExpressions", ())
    )


def _is_let_in(peer: Mapping[str, Any], namespace: Labels, pod: Labels) -> bool:
    if "namespaceSelector" in peer:
        is_there = _selects(peer["namespaceSelector"], namespace)
    else:
        is_there = namespace[NAMESPACE_NAME] == OWNER.namespace
    return is_there and _selects(peer["podSelector"], pod)


def _may(view: ClusterView, pod: Labels, namespace: str, to: Labels, port: int) -> bool:
    """As a network plugin reads the policies: nothing comes in but what one of those that select a
    pod lets in."""
    policies = [each for (kind, _), each in made(view).items() if kind == "NetworkPolicy"]
    selecting = [each["spec"] for each in policies if _selects(each["spec"]["podSelector"], to)]
    assert selecting, "no policy: everything is open"
    return any(
        ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        and (
            "from" not in rule
            or any(_is_let_in(peer, {NAMESPACE_NAME: namespace}, pod) for peer in rule["from"])
        )
        for spec in selecting
        for rule in spec["ingress"]
    )


ROUTER = OWNER.labels("router")
HEAD, WORKER = (OWNER.unit_labels(each, "2x4bz") for each in ("head", "worker"))
OTHER_UNITS = OWNER.unit_labels("worker", "9z8yx")
SCRAPER = {"app.kubernetes.io/name": "prometheus"}
STRANGER = {"app": "shop"}
LABELLED = {"baton.dev/cluster": OWNER.name}
OPERATOR = {"baton.dev/operator": "baton"}
KUBERAY = {"app.kubernetes.io/component": "kuberay-operator"}
UCX_PORT = 41234
MODELS = OWNER.namespace


@pytest.mark.parametrize(
    ("pod", "namespace", "to", "port", "may"),
    [
        (WORKER, MODELS, WORKER, UCX_PORT, True),
        (WORKER, MODELS, HEAD, RAY_PORT, True),
        (OTHER_UNITS, MODELS, WORKER, UCX_PORT, False),
        (OTHER_UNITS, MODELS, HEAD, RAY_PORT, False),
        (HEAD, MODELS, WORKER, UCX_PORT, True),
        (HEAD, MODELS, HEAD, RAY_PORT, True),
        (ROUTER, MODELS, WORKER, WORKER_PORT, True),
        (ROUTER, MODELS, WORKER, UCX_PORT, False),
        (ROUTER, MODELS, HEAD, CONTROL_PORT, True),
        (ROUTER, MODELS, HEAD, RAY_PORT, False),
        (ROUTER, "other", WORKER, WORKER_PORT, False),
        (LABELLED, MODELS, WORKER, UCX_PORT, False),
        (LABELLED, MODELS, WORKER, WORKER_PORT, False),
        (LABELLED, MODELS, HEAD, CONTROL_PORT, False),
        (WORKER, "other", WORKER, UCX_PORT, False),  # its labels can be anyone's there
        (STRANGER, MODELS, WORKER, UCX_PORT, False),
        (STRANGER, MODELS, HEAD, RAY_PORT, False),
        (STRANGER, MODELS, HEAD, CONTROL_PORT, False),
        (STRANGER, MODELS, HEAD, 8265, False),
        (OPERATOR, "baton", HEAD, CONTROL_PORT, True),
        (OPERATOR, "baton", HEAD, RAY_PORT, False),
        (OPERATOR, "other", HEAD, CONTROL_PORT, False),
        (KUBERAY, "kuberay", HEAD, 8265, True),
        (KUBERAY, "kuberay", HEAD, RAY_PORT, False),
        (STRANGER, "shop", ROUTER, ROUTER_PORT, True),
        (SCRAPER, "monitoring", ROUTER, METRICS_PORT, True),
        (SCRAPER, "monitoring", WORKER, METRICS_PORT, True),
        (STRANGER, "monitoring", WORKER, METRICS_PORT, False),
        (STRANGER, "shop", WORKER, HEALTH_PORT, False),
        (STRANGER, "shop", ROUTER, UCX_PORT, False),
    ],
)
def test_a_port_is_open_to_whom_it_is_meant_for(
    pod: Labels, namespace: str, to: Labels, port: int, may: bool
) -> None:
    view = view_of()
    ray = ray_of(view.spec)
    ray["metadata"]["uid"] = "uid-of-ray"
    unit = UnitView(UnitPlan("2x4bz", {}, Record()), ray, NOTHING_HEARD, {})
    assert _may(dataclasses.replace(view, units=[unit]), pod, namespace, to, port) is may


def test_where_namespaces_do_not_carry_their_names_the_operator_is_still_let_in() -> None:
    policy = made(view_of(), namespace=None)["NetworkPolicy", "main-head-ports"]
    _, peer = policy["spec"]["ingress"][0]["from"]
    assert _is_let_in(peer, {}, OPERATOR)
    assert not _is_let_in(peer, {}, STRANGER)


# --- the way in, and metrics ----------------------------------------------------------------------


def routes(**router: Any) -> dict[str, dict[str, Any]]:
    found = made(view_of(router=router))
    ways = ("GRPCRoute", "HTTPRoute", "Ingress")
    return {kind: each for (kind, _), each in found.items() if kind in ways}


def test_without_a_name_there_is_no_way_in_from_outside() -> None:
    assert routes() == {}


def test_a_name_alone_is_an_ingress_that_speaks_grpc_to_the_routers() -> None:
    (ingress,) = routes(hostname="llm.example.com").values()
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = router_service(OWNER, spec_of().router)
    backend = path["backend"]["service"]
    assert rule["host"] == "llm.example.com"
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    assert ingress["metadata"]["annotations"][PROTOCOL] == "GRPC"
    assert not {"tls", "ingressClassName"} & set(ingress["spec"])


PROTOCOL = "nginx.ingress.kubernetes.io/backend-protocol"
NAMED = {
    "className": "public",
    "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "9", "team": "red"},
    "tlsSecretName": "public-cert",
}


@pytest.mark.parametrize(
    ("router", "spoken", "certificate"),
    [
        ({"ingress": NAMED}, "GRPC", "public-cert"),
        ({"ingress": NAMED, "tls": {"secretName": "inside"}}, "GRPCS", "public-cert"),
        ({"tls": {"secretName": "edge"}}, "GRPCS", "edge"),
    ],
)
def test_an_ingress_is_as_it_is_named_and_has_the_routers_certificate_unless_another_is(
    router: dict[str, Any], spoken: str, certificate: str
) -> None:
    (ingress,) = routes(hostname="llm.example.com", **router).values()
    check_kubernetes(ingress)
    named = router.get("ingress", {})
    annotations = ingress["metadata"]["annotations"]
    assert annotations.items() >= named.get("annotations", {}).items()
    assert annotations[PROTOCOL] == spoken
    assert ingress["spec"].get("ingressClassName") == named.get("className")
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": certificate}]


@pytest.mark.parametrize(
    ("gateway", "parent"),
    [("edge", {"name": "edge"}), ("infra/edge", {"name": "edge", "namespace": "infra"})],
)
def test_a_gateway_has_a_grpc_route_instead(gateway: str, parent: dict[str, str]) -> None:
    found = routes(hostname="llm.example.com", gateway=gateway)
    assert set(found) == {"GRPCRoute"}
    assert found["GRPCRoute"]["spec"] == {
        "parentRefs": [parent],
        "hostnames": ["llm.example.com"],
        "rules": [{"backendRefs": [{"name": "main-router", "port": ROUTER_PORT}]}],
    }


def test_openais_api_has_a_way_in_of_its_own_hostname_that_is_said_where_people_look() -> None:
    view = view_of(
        router={"httpHostname": "api.b", "hostname": "llm.b", "tls": {"secretName": "x"}}
    )
    ingress, grpc = (made(view)["Ingress", f"main-{name}"] for name in ("http", "router"))
    check_kubernetes(ingress)
    (rule,) = ingress["spec"]["rules"]
    service = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], service["port"]["number"]) == ("api.b", HTTP_PORT)
    assert ingress["metadata"]["annotations"][PROTOCOL] == "HTTPS"
    assert ingress["spec"]["tls"] == grpc["spec"]["tls"], "cert-manager keeps it for one of both"
    (route,) = routes(httpHostname="api.b", gateway="edge").values()
    backend = {"name": "main-router", "port": HTTP_PORT}
    assert (route["kind"], route["spec"]["hostnames"]) == ("HTTPRoute", ["api.b"])
    assert route["spec"]["rules"] == [{"backendRefs": [backend]}]
    assert cluster_status(view, [])["endpoints"]["externalOpenai"] == "https://api.b/v1"


def test_where_an_issuer_is_named_the_certificate_is_kept_beside_the_cluster() -> None:
    issued = made(view_of(router={"tls": {"issuerRef": {"name": "internal"}}}))
    assert ("Certificate", "main-router") in issued
    assert not [kind for kind, _ in made(view_of()) if kind == "Certificate"]


def test_a_monitor_scrapes_routers_and_workers_by_a_port_that_they_have() -> None:
    assert not [kind for kind, _ in made(view_of()) if kind == "PodMonitor"]
    view = view_of()
    monitor = made(view, MONITORED)["PodMonitor", "main"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert "authorization" not in endpoint
    auth = {"tokenSecretName": "tenants", "operators": ["prometheus"]}
    locked = made(view_of(router={"auth": auth}), MONITORED)["PodMonitor", "main"]
    token = {"credentials": {"name": "tenants", "key": "prometheus"}}
    assert locked["spec"]["podMetricsEndpoints"] == [endpoint | {"authorization": token}]
    assert endpoint["interval"] == "30s"
    for each in (routers_of(view.spec)["spec"], group_of(ray_of(view.spec), "decode")):
        (container,) = each["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports[endpoint["port"]] == METRICS_PORT
