"""What the operator writes beside a cluster, on a real API server: it is there, it is put back, it
goes; and what people read of it all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.objects import evict
from tests.k8s.operating import Operator, condition, eventually
from tests.k8s.test_crds import BAD_FIELD, BAD_ROUTER, cluster
from tests.k8s.units import unit_of

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("crds", "ray_clusters")]

PUT_BACK_S = 60.0
"""What nobody follows is applied again within half a minute."""


class Beside:
    """kubectl in one namespace."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self._namespace = control_plane, namespace

    def kubectl(self, *arguments: str) -> str:
        return self._control_plane.kubectl("-n", self._namespace, *arguments)

    def names(self, kind: str) -> set[str]:
        return set(self.kubectl("get", kind, "-o", "jsonpath={.items[*].metadata.name}").split())

    def spec(self, what: str) -> dict[str, Any]:
        spec: dict[str, Any] = self._control_plane.read(what, "-n", self._namespace)["spec"]
        return spec

    def change(self, spec: dict[str, Any]) -> None:
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", "servingcluster/main", "--type=merge", "-p", patch)


@pytest.fixture
def beside(control_plane: ControlPlane, namespace: str) -> Beside:
    return Beside(control_plane, namespace)


BUDGETS = {"main-router", "main-prefill-workers", "main-decode-workers"}
POLICIES = {"main-head-ports", "main-worker-ports", "main-router-ports"}


def test_what_stands_beside_a_cluster_is_there_is_put_back_and_goes(
    control_plane: ControlPlane, namespace: str, operator: Operator, beside: Beside
) -> None:
    ingress = {"className": "edge", "annotations": {"team": "red"}, "tlsSecretName": "public"}
    router = {"hostname": "llm.example.com", "ingress": ingress}
    control_plane.apply(cluster(namespace, router=router))
    eventually(lambda: beside.names("ingress") == {"main-router"}, "a way in")
    assert beside.spec("ingress/main-router")["ingressClassName"] == "edge"
    assert beside.names("pdb") == BUDGETS
    assert beside.names("networkpolicy") == POLICIES
    rules = beside.spec("networkpolicy/main-worker-ports")["ingress"]
    opened = json.dumps({"spec": {"ingress": [{}]}})
    beside.kubectl("patch", "networkpolicy/main-worker-ports", "--type=merge", "-p", opened)
    beside.kubectl("delete", "pdb/main-router")
    closed = lambda: beside.spec("networkpolicy/main-worker-ports")["ingress"] == rules  # noqa: E731
    eventually(closed, "what was opened is closed again", PUT_BACK_S)
    eventually(lambda: beside.names("pdb") == BUDGETS, "the budget is back", PUT_BACK_S)
    beside.change({"router": {"hostname": None, "ingress": None}})
    eventually(lambda: beside.names("ingress") == set(), "no way in any more")
    beside.change({"pools": {"prefill": None}})
    eventually(lambda: beside.names("pdb") == BUDGETS - {"main-prefill-workers"}, "with its pool")
    beside.kubectl("delete", "servingcluster/main", "--wait=false")
    eventually(lambda: not beside.names("pdb,networkpolicy"), "all of it goes with the cluster", 60)


def test_an_ingress_that_is_somebody_elses_is_left_alone(
    control_plane: ControlPlane, namespace: str, operator: Operator, beside: Beside
) -> None:
    beside.kubectl("create", "ingress", "main-router", "--rule=shop.example.com/=shop:80")
    control_plane.apply(cluster(namespace))
    eventually(lambda: beside.names("pdb") == BUDGETS, "all of it is written")
    beside.change({"logLevel": "debug"})
    config = lambda: beside.kubectl("get", "configmap/main-config", "-o", "yaml")  # noqa: E731
    eventually(lambda: "log_level: debug" in config(), "another look")
    assert beside.names("ingress") == {"main-router"}


def test_a_kind_that_is_not_served_is_told_and_everything_else_is_done(
    control_plane: ControlPlane, namespace: str, operator: Operator, beside: Beside
) -> None:
    router = {"hostname": "llm.example.com", "gateway": "edge"}
    control_plane.apply(cluster(namespace, router=router))

    def told() -> dict[str, Any]:
        found = control_plane.read("servingcluster/main", "-n", namespace)
        return condition(found, "Degraded")

    eventually(lambda: "grpcroutes" in told().get("message", ""), "it is told")
    assert "are not served" in told()["message"]
    assert beside.names("pdb") == BUDGETS
    described = lambda: beside.kubectl("describe", "servingcluster/main")  # noqa: E731
    eventually(lambda: "NotServed" in described() and "grpcroutes" in described(), "an event")
    assert "again in" not in operator.log.read_text(), "it is no error to be tried again"


def _pod(name: str, namespace: str, owner: dict[str, Any]) -> dict[str, Any]:
    """As KubeRay makes them: its RayCluster is their controller."""
    reference = {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True,
        "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
    }  # fmt: skip
    labels = {CLUSTER_LABEL: "main", POOL_LABEL: "decode"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels,
                     "ownerReferences": [reference]},
        "spec": {"containers": [{"name": "ray-worker", "image": "none"}]},
    }  # fmt: skip


def test_pods_of_a_pool_are_evicted_one_by_one(
    control_plane: ControlPlane, namespace: str, operator: Operator, beside: Beside
) -> None:
    if not control_plane.has_controllers:
        pytest.skip("nobody counts pods for budgets here")
    pools = {"decode": {"role": "decode", "initialReplicas": 2}}
    control_plane.apply(cluster(namespace, pools=pools))
    eventually(lambda: "main-decode-workers" in beside.names("pdb"), "a budget")
    ray = eventually(lambda: unit_of(control_plane, namespace, "main"), "a unit")
    control_plane.apply(*(_pod(name, namespace, ray) for name in ("one", "two")))
    ready = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    for name in ("one", "two"):
        # kubectl before 1.24 patches no subresource
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        pod = control_plane.read(f"pod/{name}", "-n", namespace) | ready
        file = control_plane.folder / f"{namespace}-{name}.json"
        file.write_text(json.dumps(pod))
        control_plane.kubectl("replace", "--raw", path, "-f", file)

    def allowed() -> int:
        found = control_plane.read("pdb/main-decode-workers", "-n", namespace)
        return int(found.get("status", {}).get("disruptionsAllowed", 0))

    eventually(lambda: allowed() == 1, "one may go")
    evict(control_plane, namespace, "one")
    eventually(lambda: "one" not in beside.names("pods"), "it is gone")
    with pytest.raises(CommandError, match="disruption budget"):
        evict(control_plane, namespace, "two")


def test_people_read_what_has_happened(
    control_plane: ControlPlane, namespace: str, operator: Operator, beside: Beside
) -> None:
    control_plane.apply(cluster(namespace))
    eventually(lambda: "main-decode" in beside.names("wp"), "its pool")
    eventually(lambda: "Type:" in beside.kubectl("describe", "wp/main-decode"), "a condition")
    beside.kubectl("scale", "wp/main-decode", "--replicas=3")
    pool = lambda: beside.kubectl("describe", "wp/main-decode")  # noqa: E731
    eventually(lambda: "ScaledOut" in pool(), "its size is told")
    assert "from 1 to 3 replicas" in pool()
    patch = json.dumps({"spec": {"replicas": 2}})
    beside.kubectl("patch", "wp/main-decode", "--type=merge", "-p", patch)
    eventually(lambda: "from 3 to 2 replicas, by kubectl-patch" in pool(), "and who scaled it")
    beside.change({"router": BAD_ROUTER})
    bad = lambda: beside.kubectl("describe", "servingcluster/main").partition("Events:")[2]  # noqa: E731
    eventually(lambda: "InvalidSpec" in bad(), "what is wrong with it")
    assert BAD_FIELD in bad()
    beside.change({"router": {"podTemplate": None}})
    eventually(lambda: "Recovered" in bad(), "it is well again")
