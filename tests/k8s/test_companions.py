"""What the operator writes seen a cluster, on a real API server: it is there, it is put back, it
goes; and what people read of it all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL
from deploy.controller.manifests.resources import PODS
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.objects import evict
from tests.k8s.operating import Operator, eventually
from tests.k8s.seen import BAD_FIELD, BAD_ROUTER, Seen

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("crds", "ray_clusters", "operator")]

PUT_BACK_S = 60.0
"""What nobody follows is applied again within half a minute."""
BUDGETS = {"main-router", "main-prefill-workers", "main-decode-workers"}
POLICIES = {"main-head-ports", "main-worker-ports", "main-router-ports"}
"""Beside those of units."""


def test_what_stands_beside_a_cluster_is_there_is_put_back_and_goes(seen: Seen) -> None:
    ingress = {"className": "edge", "annotations": {"team": "red"}, "tlsSecretName": "public"}
    router = {"hostname": "llm.example.com", "ingress": ingress}
    seen.make(router=router)
    eventually(lambda: seen.names("ingress") == {"main-router"}, "a way in")
    assert seen.soon("ingress/main-router")["spec"]["ingressClassName"] == "edge"
    assert seen.names("pdb") == BUDGETS
    unit = seen.unit_soon()["metadata"]["name"]
    policies = {*POLICIES, f"{unit}-peers"}
    eventually(lambda: seen.names("networkpolicy") == policies, "who may connect")
    rules = seen.soon("networkpolicy/main-worker-ports")["spec"]["ingress"]
    opened = json.dumps({"spec": {"ingress": [{}]}})
    seen.kubectl("patch", "networkpolicy/main-worker-ports", "--type=merge", "-p", opened)
    seen.kubectl("delete", "pdb/main-router")
    closed = lambda: seen.soon("networkpolicy/main-worker-ports")["spec"]["ingress"] == rules  # noqa: E731
    eventually(closed, "what was opened is closed again", PUT_BACK_S)
    eventually(lambda: seen.names("pdb") == BUDGETS, "the budget is back", PUT_BACK_S)
    seen.change(router={"hostname": None, "ingress": None})
    eventually(lambda: seen.names("ingress") == set(), "no way in any more")
    seen.change(pools={"prefill": None})
    eventually(lambda: seen.names("pdb") == BUDGETS - {"main-prefill-workers"}, "with its pool")
    seen.kubectl("delete", "servingcluster/main", "--wait=false")
    eventually(lambda: not seen.names("pdb,networkpolicy"), "all of it goes with the cluster", 60)


def test_an_ingress_that_is_somebody_elses_is_left_alone(seen: Seen) -> None:
    seen.kubectl("create", "ingress", "main-router", "--rule=shop.example.com/=shop:80")
    seen.make()
    eventually(lambda: seen.names("pdb") == BUDGETS, "all of it is written")
    seen.change(logLevel="debug")
    eventually(lambda: "log_level: debug" in seen.config(), "another look")
    assert seen.names("ingress") == {"main-router"}


def test_a_kind_that_is_not_served_is_reported_and_everything_else_is_done(
    operator: Operator, seen: Seen
) -> None:
    seen.make(router={"hostname": "llm.example.com", "gateway": "edge"})
    message = lambda: seen.condition("servingcluster/main", "Degraded").get("message", "")  # noqa: E731
    eventually(lambda: "grpcroutes" in message(), "it is reported")
    assert "are not served" in message()
    assert seen.names("pdb") == BUDGETS
    described = lambda: seen.kubectl("describe", "servingcluster/main")  # noqa: E731
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
    control_plane: ControlPlane, kube: Kube, namespace: str, seen: Seen
) -> None:
    if not control_plane.has_controllers:
        pytest.skip("nobody counts pods for budgets here")
    pools = {"decode": {"role": "decode", "initialReplicas": 2}}
    seen.make(pools=pools)
    eventually(lambda: "main-decode-workers" in seen.names("pdb"), "a budget")
    ready = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    for name in ("one", "two"):
        kube.create(PODS, _pod(name, namespace, seen.unit_soon()))
        kube.merge_patch(PODS, Key(namespace, name), ready, "status")

    def allowed() -> int:
        found = seen.soon("pdb/main-decode-workers")
        return int(found.get("status", {}).get("disruptionsAllowed", 0))

    eventually(lambda: allowed() == 1, "one may go")
    evict(control_plane, namespace, "one")
    eventually(lambda: "one" not in seen.names("pods"), "it is gone")
    with pytest.raises(CommandError, match="disruption budget"):
        evict(control_plane, namespace, "two")


def test_people_read_what_has_happened(seen: Seen) -> None:
    seen.make()
    eventually(lambda: "main-decode" in seen.names("wp"), "its pool")
    eventually(lambda: "Conditions:" in seen.kubectl("describe", "wp/main-decode"), "a first look")
    seen.scale("decode", 3)
    pool = lambda: seen.kubectl("describe", "wp/main-decode")  # noqa: E731
    eventually(lambda: "ScaledOut" in pool(), "its size is reported")
    assert "from 1 to 3 replicas" in pool()
    patch = json.dumps({"spec": {"replicas": 2}})
    seen.kubectl("patch", "wp/main-decode", "--type=merge", "-p", patch)
    eventually(lambda: "from 3 to 2 replicas" in pool(), "however it is scaled")
    seen.change(router=BAD_ROUTER)
    bad = lambda: seen.kubectl("describe", "servingcluster/main").partition("Events:")[2]  # noqa: E731
    eventually(lambda: "InvalidSpec" in bad(), "what is wrong with it")
    assert BAD_FIELD in bad()
    seen.change(router={"podTemplate": None})
    eventually(lambda: "Recovered" in bad(), "it is well again")
    decode = {"role": "decode", "nodeSelector": {"nvidia.com/gpu.product": "L40S"}}
    seen.change(engine={"device": "cpu"}, pools={"decode": decode})
    said = seen.condition_soon("servingcluster/main", "Degraded", "GpuUnused")["message"]
    assert said.startswith("spec.pools.decode.nodeSelector is for GPUs")
