"""The operator under its own account: what the chart grants is what the code does, and no more."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import urllib3

from deploy.api.generate import CHART
from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.kit.connection import Call, Connection, Timeouts
from deploy.controller.kit.errors import StatusError
from deploy.controller.kit.events import EVENTS
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource, Selection
from deploy.controller.manifests.common import PodMonitors, Release
from deploy.controller.manifests.resources import (
    CERTIFICATES,
    CONFIG_MAPS,
    DEPLOYMENTS,
    GRPC_ROUTES,
    HTTP_ROUTES,
    INGRESSES,
    POD_MONITORS,
    PODS,
    RAY_CLUSTERS,
    SECRETS,
    SERVING_CLUSTERS,
    WORKER_POOLS,
)
from tests.deploy.chart.chart import NO_HELM
from tests.deploy.chart.permissions import LEASE_NAME, PERMISSIONS, Where
from tests.k8s.api_clients import fresh_namespace, kube_of
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.open_crd import open_crd, served
from tests.k8s.operating import eventually
from tests.k8s.seen import BAD_ROUTER, cluster

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters")

Rule = tuple[str, str, str, str | None]
"""Group, resource with its subresource, verb, the one object's name."""

ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
RULES_REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectrulesreviews", namespaced=False)

NEVER_CALLED = {("baton.dev", "servingclusters/finalizers", "update")}
"""What is needed without a call of its own: permissions.py says for what."""

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/[^/]+)?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[^/]+))?)?$"
)


class RecordingConnection(Connection):
    """Notes which verb each call was, and whether it was refused."""

    used: set[tuple[str, str, str]]
    refused: set[str]

    def _send(self, call: Call, timeouts: Timeouts, *, streamed: bool) -> urllib3.BaseHTTPResponse:
        try:
            response = super()._send(call, timeouts, streamed=streamed)
        except StatusError as error:
            self._note(call, error.code)
            raise
        self._note(call, response.status)
        return response

    def _note(self, call: Call, status: int) -> None:
        if status == HTTPStatus.FORBIDDEN:
            self.refused.add(str(call))
        if match := _PATH.match(call.path):
            named = match["plural"] + (f"/{match['subresource']}" if match["subresource"] else "")
            for verb in _verbs(call, match["name"], status):
                self.used.add((match["group"] or "", named, verb))


def _verbs(call: Call, name: str | None, status: int) -> Iterator[str]:
    if call.method == "GET":
        yield "get" if name else "watch" if "watch" in call.query else "list"
    elif call.method == "POST":
        yield "create"
    else:
        yield {"PATCH": "patch", "DELETE": "delete"}[call.method]
        if status == HTTPStatus.CREATED:  # an apply that made the object, which asks for both
            yield "create"


@pytest.fixture(scope="module")
def installed(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace whose release looks after it alone; nothing runs its operator but the tests."""
    if control_plane.clients.helm is None:
        pytest.skip(NO_HELM)
    with fresh_namespace(kube_of(control_plane)) as namespace:
        values = {"watchNamespaces": [namespace], "operator": {"replicas": 0}}
        _install(control_plane, namespace, values)
        yield namespace


def _install(control_plane: ControlPlane, namespace: str, values: dict[str, Any]) -> None:
    path = control_plane.folder / f"{namespace}-values.json"
    path.write_text(json.dumps(values))
    control_plane.helm("install", "baton", CHART, "--namespace", namespace, "--values", path)


@pytest.fixture(scope="module")
def account(control_plane: ControlPlane, installed: str) -> Path:
    """A kubeconfig with a token of the operator's account."""
    return control_plane.service_account_kubeconfig(installed, "baton")


@pytest.fixture(scope="module")
def further_kinds(control_plane: ControlPlane) -> Iterator[None]:
    """What the operator writes of others' kinds."""
    kinds = {GRPC_ROUTES: "GRPCRoute", HTTP_ROUTES: "HTTPRoute",
             POD_MONITORS: "PodMonitor", CERTIFICATES: "Certificate"}  # fmt: skip
    crds = [open_crd(resource, kind) for resource, kind in kinds.items()]
    with served(control_plane, *crds):
        yield


def test_the_operators_life_takes_every_permission_and_no_other(
    control_plane: ControlPlane, installed: str, account: Path, further_kinds: None
) -> None:
    connection = RecordingConnection.from_kubeconfig(account)
    connection.used, connection.refused = set(), set()
    life = Life(control_plane, kube_of(control_plane), installed)
    monitored = Release("worker", "router", "2.60.0", pod_monitors=PodMonitors("15s", {}))
    with running(connection, installed, monitored):
        life.begin()
    with running(connection, installed, Release("worker", "router", "2.60.0")):
        life.end()
    assert not connection.refused
    called = {(each.group, each.resource, verb) for each in PERMISSIONS for verb in each.verbs}
    assert connection.used == called - NEVER_CALLED


@contextlib.contextmanager
def running(connection: Connection, namespace: str, release: Release) -> Iterator[None]:
    settings = ControllerSettings(Key(namespace, LEASE_NAME), "one", release, namespace)
    controller = Controller(Kube(connection, "baton-controller"), settings)
    controller.start()
    try:
        yield
    finally:
        controller.stop()


@dataclass(frozen=True)
class Life:
    """A cluster that comes, is reached from outside by one way and by another, loses a pool, and
    goes."""

    control_plane: ControlPlane
    administrator: Kube
    namespace: str

    def begin(self) -> None:
        tls = {"issuerRef": {"name": "internal"}}
        router = {"hostname": "llm.b", "httpHostname": "api.b", "tls": tls}
        self.control_plane.apply(cluster(self.namespace, router=router))
        self._until(WORKER_POOLS, {"main-prefill", "main-decode"})
        self._until(INGRESSES, {"main-router", "main-http"})
        self._until(CERTIFICATES, {"main-router"})
        self._until(POD_MONITORS, {"main"})
        eventually(self._conditions, "conditions")
        for count in (1, 2):  # what happens again raises its event's count
            self._change({"router": BAD_ROUTER})
            eventually(lambda: ("InvalidSpec", count) in self._events(), "refused")  # noqa: B023
            self._change({"router": {"podTemplate": None}})
            eventually(lambda: ("Recovered", count) in self._events(), "taken back")  # noqa: B023
        (unit,) = self._names(RAY_CLUSTERS)
        self._change({"servedModelName": "chat"})
        eventually(lambda: self._names(RAY_CLUSTERS) not in ({unit}, set()), "another unit")
        self._change({"router": {"gateway": "edge"}})
        self._until(GRPC_ROUTES, {"main-router"})
        self._until(HTTP_ROUTES, {"main-http"})
        self._until(INGRESSES, set())

    def end(self) -> None:
        self._until(POD_MONITORS, set())
        self._change({"router": dict.fromkeys(("gateway", "hostname", "httpHostname", "tls"))})
        self._until(GRPC_ROUTES, set())
        self._until(HTTP_ROUTES, set())
        self._until(CERTIFICATES, set())
        self._change({"pools": {"prefill": None}})
        self._until(WORKER_POOLS, {"main-decode"})
        self.administrator.delete(SERVING_CLUSTERS, self._main)
        self._until(SERVING_CLUSTERS, set())

    @property
    def _main(self) -> Key:
        return Key(self.namespace, "main")

    def _change(self, spec: dict[str, Any]) -> None:
        self.administrator.merge_patch(SERVING_CLUSTERS, self._main, {"spec": spec})

    def _conditions(self) -> Any:
        found = self.administrator.get(SERVING_CLUSTERS, self._main)
        return found.get("status", {}).get("conditions")

    def _events(self) -> set[tuple[str, int]]:
        listing = self.administrator.list(EVENTS, Selection(namespace=self.namespace))
        return {(each["reason"], each["count"]) for each in listing.items}

    def _until(self, resource: Resource, names: set[str]) -> None:
        eventually(lambda: self._names(resource) == names, f"{resource}: {names}")

    def _names(self, resource: Resource) -> set[str]:
        listing = self.administrator.list(resource, Selection(namespace=self.namespace))
        return {each["metadata"]["name"] for each in listing.items}


def test_in_its_namespace_the_account_may_do_what_the_operator_does(
    control_plane: ControlPlane, installed: str, account: Path
) -> None:
    granted = _rules(account, installed) - _rules_of_anybody(control_plane, installed)
    assert granted == {
        (each.group, each.resource, verb, each.name) for each in PERMISSIONS for verb in each.verbs
    }


def test_elsewhere_the_account_of_a_watched_namespace_may_do_nothing(
    control_plane: ControlPlane, installed: str, account: Path
) -> None:
    anybody = _rules_of_anybody(control_plane, installed)
    for elsewhere in ("default", "kube-system"):
        assert _rules(account, elsewhere) <= anybody


@pytest.mark.full
def test_a_cluster_wide_account_has_its_lease_in_its_own_namespace_alone(
    control_plane: ControlPlane, installed: str
) -> None:
    with fresh_namespace(kube_of(control_plane)) as namespace:
        values = {"operator": {"replicas": 0}, "fullnameOverride": f"wide-{namespace}"}
        _install(control_plane, namespace, values)
        account = control_plane.service_account_kubeconfig(namespace, f"wide-{namespace}")
        anybody = _rules_of_anybody(control_plane, namespace)
        assert _rules(account, "default") - anybody == {
            (each.group, each.resource, verb, each.name)
            for each in PERMISSIONS
            if each.where is not Where.LEASE
            for verb in each.verbs
        }
        if control_plane.has_controllers:
            _check_people(control_plane)
        control_plane.helm("uninstall", "baton", "--namespace", namespace)


def _check_people(control_plane: ControlPlane) -> None:
    """Kubernetes' own roles have taken in what the chart adds to them."""

    def verbs(role: str) -> set[str]:
        rules = control_plane.read(f"clusterrole/{role}")["rules"]
        ours = [each for each in rules if "servingclusters" in each.get("resources", ())]
        return {verb for each in ours for verb in each["verbs"]}

    for role in ("edit", "admin"):
        eventually(lambda: {"get", "create"} <= verbs(role), role)  # noqa: B023
    assert verbs("view") == {"get", "list", "watch"}


def test_what_would_open_more_doors_is_refused(installed: str, account: Path) -> None:
    kube = Kube(Connection.from_kubeconfig(account), "baton-controller")
    mine = Selection(namespace=installed)
    token = Key(installed, "main-ray-token")
    wildcard = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    more = {"metadata": {"name": "more", "namespace": installed}, "rules": [wildcard]}
    elsewhere = {"metadata": {"name": "x", "namespace": "default"}}
    tries = (
        lambda: kube.get(SECRETS, Key("default", "x")),
        lambda: kube.list(SECRETS, mine),
        lambda: kube.delete(SECRETS, token),
        lambda: kube.create(SECRETS, elsewhere),
        lambda: kube.create(PODS, elsewhere | {"metadata": {"name": "x", "namespace": installed}}),
        lambda: kube.merge_patch(PODS, Key(installed, "x"), {"spec": {}}),
        lambda: kube.get(PODS, Key(installed, "x"), "exec"),
        lambda: kube.list(PODS),
        lambda: kube.list(CONFIG_MAPS, mine),
        lambda: kube.delete(DEPLOYMENTS, Key(installed, "baton")),
        lambda: kube.delete(SERVING_CLUSTERS, Key(installed, "main")),
        lambda: kube.list(SERVING_CLUSTERS, Selection(namespace="default")),
        lambda: kube.merge_patch(LEASES, Key(installed, "another"), {"spec": {}}),
        lambda: kube.create(ROLES, more),
        lambda: kube.merge_patch(ROLES, Key(installed, "baton"), {"rules": [wildcard]}),
        lambda: kube.create(BINDINGS, more),
    )
    for attempt in tries:
        with pytest.raises(StatusError, match="403"):
            attempt()


def _rules_of_anybody(control_plane: ControlPlane, namespace: str) -> set[Rule]:
    """What an account may do to which nobody grants anything."""
    name = "serviceaccount/default"
    eventually(lambda: name in control_plane.kubectl("-n", namespace, "get", name, "-o", "name",
                                                     "--ignore-not-found"), name)  # fmt: skip
    return _rules(control_plane.service_account_kubeconfig(namespace, "default"), namespace)


def _rules(account: Path, namespace: str) -> set[Rule]:
    """What an account may do in a namespace, as the API server lists it."""
    review = {
        "apiVersion": RULES_REVIEWS.api_version,
        "kind": "SelfSubjectRulesReview",
        "metadata": {"name": ""},
        "spec": {"namespace": namespace},
    }
    kube = Kube(Connection.from_kubeconfig(account), "test")
    status = kube.create(RULES_REVIEWS, review)["status"]
    assert not status["incomplete"]
    return {
        (group, resource, verb, name)
        for rule in status["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames") or [None]
    }
