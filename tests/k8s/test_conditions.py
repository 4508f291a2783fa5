"""What the operator reports in conditions, on a real API server where nothing runs the pods."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import POOL_LABEL, Owner
from deploy.controller.manifests.pods import FETCH
from deploy.controller.manifests.resources import PODS, RAY_CLUSTERS
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import Operator, eventually
from tests.k8s.seen import BAD_ROUTER, Seen

UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
    }],
}  # fmt: skip
REFUSED_BY_QUOTA = {
    "conditions": [{
        "type": "ReplicaFailure", "status": "True", "reason": "FailedCreate",
        "message": "pods is forbidden: exceeded quota: gpus",
    }],
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters", "operator")


def make_worker_pod(
    kube: Kube, namespace: str, status: dict[str, Any], init: dict[str, Any] | None = None
) -> None:
    """A pod of `decode` called `stuck`, which nobody runs, and what is reported of it."""
    labels = Owner("main", namespace, "").labels("worker") | {POOL_LABEL: "decode"}
    inits = [init] if init else []
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stuck", "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "ray-worker", "image": "none"}], "initContainers": inits},
    }
    kube.create(PODS, made)
    kube.merge_patch(PODS, Key(namespace, "stuck"), {"status": status}, "status")


def test_an_invalid_edit_leaves_the_cluster_as_available_as_it_was(seen: Seen) -> None:
    seen.make()
    seen.condition_soon("servingcluster/main", "Degraded", "Sound")
    before = seen.condition("servingcluster/main", "Available")
    assert before["status"] == "False", "nobody runs its pods"
    seen.make(router=BAD_ROUTER)
    seen.condition_soon("servingcluster/main", "Degraded", "InvalidSpec")
    assert seen.condition("servingcluster/main", "Available") == before


def test_a_size_outside_its_bounds_is_reported_at_its_pool_and_its_cluster(
    control_plane: ControlPlane, seen: Seen
) -> None:
    if control_plane.has_cel():
        pytest.skip("this API server takes no such pool")
    seen.make()
    seen.condition_soon("wp/main-decode", "Degraded", "Starting")
    seen.scale("decode", 2)
    seen.wait_for_size("decode", 2)
    seen.scale("decode", 100)
    for what in ("wp/main-decode", "servingcluster/main"):
        found = seen.condition_soon(what, "Degraded", "InvalidSpec")
        assert "spec.replicas is 100, above maxReplicas 8: the size stays 2" in found["message"]
    seen.wait_for_size("decode", 2)
    assert seen.condition("wp/main-decode", "Available")["reason"] == "Starting", "as it was"
    seen.scale("decode", 3)
    seen.wait_for_size("decode", 3)
    seen.condition_soon("wp/main-decode", "Degraded", "Starting")
    seen.condition_soon("servingcluster/main", "Degraded", "Sound")


NO_MODEL = "cannot fetch the model: org/nothing: no such model on the hub"


def test_a_model_that_is_not_there_is_one_fault_of_the_cluster(
    kube: Kube, namespace: str, seen: Seen
) -> None:
    seen.make()
    seen.condition_soon("wp/main-decode", "Available", "Starting")
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": NO_MODEL}}
    init = {"name": FETCH, "image": "none", "imageID": "", "ready": False, "restartCount": 0}
    status = {"initContainerStatuses": [init | {"state": ended}]}
    make_worker_pod(kube, namespace, status, {"name": FETCH, "image": "none"})
    found = seen.condition_soon("servingcluster/main", "Degraded", "ModelUnavailable")
    assert found["message"] == f"spec.model.name: {NO_MODEL}"
    found = seen.condition_soon("wp/main-decode", "Degraded", "ModelUnavailable")
    assert NO_MODEL in found["message"]


def test_a_start_is_reported_without_a_warning(
    control_plane: ControlPlane, namespace: str, seen: Seen
) -> None:
    seen.make()
    found = seen.condition_soon("servingcluster/main", "Progressing", "Starting")
    assert found["message"].startswith("Ray's head is starting")
    seen.condition_soon("wp/main-decode", "Progressing", "Starting")

    def events() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = control_plane.read("events", "-n", namespace)["items"]
        return found

    eventually(lambda: "Starting" in {each["reason"] for each in events()}, "an event")
    warnings = {each["reason"] for each in events() if each["type"] == "Warning"}
    assert warnings <= {"HeadUnprotected"}


def test_a_fault_of_the_operators_own_is_reported_logged_and_over_when_its_cause_is(
    operator: Operator, seen: Seen
) -> None:
    """Its cause: a worker group that the operator never writes so."""
    seen.make()
    seen.condition_soon("servingcluster/main", "Degraded", "Sound")
    before = seen.condition("servingcluster/main", "Available")
    broken = json.dumps({"spec": {"workerGroupSpecs": [{"groupName": "x"}]}})
    name = f"rayclusters.ray.io/{seen.unit_soon()['metadata']['name']}"
    seen.kubectl("patch", name, "--type=merge", "-p", broken)
    found = seen.condition_soon("servingcluster/main", "Degraded", "InternalError")
    assert "KeyError: 'template'" in found["message"]
    assert "Traceback" not in found["message"]
    assert "Traceback" in operator.log.read_text()
    assert seen.condition("servingcluster/main", "Available") == before
    seen.kubectl("delete", name)
    seen.condition_soon("servingcluster/main", "Degraded", "Sound")


def test_what_pods_wait_for_is_reported_at_their_pool_and_their_cluster(
    kube: Kube, namespace: str, seen: Seen
) -> None:
    seen.make()
    seen.condition_soon("wp/main-decode", "Available", "Starting")
    make_worker_pod(kube, namespace, UNSCHEDULABLE)
    says = lambda what: seen.condition(what, "Available").get("message", "")  # noqa: E731
    no_gpu = "pod stuck: Unschedulable: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
    eventually(lambda: no_gpu in says("wp/main-decode"), "the scheduler's message")
    assert "Unschedulable" not in says("wp/main-prefill")
    unit = Key(namespace, seen.unit_soon()["metadata"]["name"])
    kube.merge_patch(RAY_CLUSTERS, unit, {"status": REFUSED_BY_QUOTA}, "status")
    for what in ("wp/main-prefill", "servingcluster/main"):
        eventually(lambda what=what: "exceeded quota" in says(what), f"{what}: KubeRay's message")
