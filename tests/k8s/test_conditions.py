"""What the operator tells, on a real API server, of what it cannot look at as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import POOL_LABEL, Owner
from deploy.controller.manifests.pods import FETCH
from deploy.controller.resources import PODS, RAY_CLUSTERS
from tests.deploy.controller.things import REFUSED, UNSCHEDULABLE
from tests.k8s.api_clients import kube_of
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import Operator, condition, eventually
from tests.k8s.test_crds import BAD_ROUTER, cluster
from tests.k8s.test_operator import Seen
from tests.k8s.units import group_sizes_in, unit_of

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters")


def name_of_unit(control_plane: ControlPlane, namespace: str) -> str:
    found = eventually(lambda: unit_of(control_plane, namespace, "main"), "a unit")
    return str(found["metadata"]["name"])


class Told:
    """Conditions of what is in one namespace; empty while it is not there, or nothing is told."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._seen = Seen(control_plane, namespace)

    def __call__(self, what: str, kind: str) -> dict[str, Any]:
        return condition(self._seen(what) or {}, kind)

    def soon(self, what: str, kind: str, reason: str) -> dict[str, Any]:
        def told() -> dict[str, Any] | None:
            found = self(what, kind)
            return found if found.get("reason") == reason else None

        found: dict[str, Any] = eventually(told, f"{what}: {kind} is {reason}")
        return found


@pytest.fixture
def told(control_plane: ControlPlane, namespace: str) -> Told:
    return Told(control_plane, namespace)


def test_an_invalid_edit_leaves_what_was_told_of_the_cluster_before(
    control_plane: ControlPlane, namespace: str, operator: Operator, told: Told
) -> None:
    control_plane.apply(cluster(namespace))
    told.soon("servingcluster/main", "Degraded", "Sound")
    before = told("servingcluster/main", "Available")
    assert before["status"] == "False", "nobody runs its pods"
    control_plane.apply(cluster(namespace, router=BAD_ROUTER))
    told.soon("servingcluster/main", "Degraded", "InvalidSpec")
    assert told("servingcluster/main", "Available") == before


def test_a_size_that_its_bounds_leave_out_is_told_of_its_pool_and_its_cluster(
    control_plane: ControlPlane, namespace: str, operator: Operator, told: Told
) -> None:
    if control_plane.has_cel():
        pytest.skip("this API server takes no such pool")
    control_plane.apply(cluster(namespace))
    told.soon("wp/main-decode", "Degraded", "Starting")
    control_plane.kubectl("-n", namespace, "scale", "wp/main-decode", "--replicas=2")
    wait_for_size(control_plane, namespace, 2)
    control_plane.kubectl("-n", namespace, "scale", "wp/main-decode", "--replicas=100")
    for what in ("wp/main-decode", "servingcluster/main"):
        found = told.soon(what, "Degraded", "InvalidSpec")
        assert "spec.replicas is 100, above maxReplicas 8: the size stays 2" in found["message"]
    wait_for_size(control_plane, namespace, 2)
    assert told("wp/main-decode", "Available")["reason"] == "Starting", "as it was"
    control_plane.kubectl("-n", namespace, "scale", "wp/main-decode", "--replicas=3")
    wait_for_size(control_plane, namespace, 3)
    told.soon("wp/main-decode", "Degraded", "Starting")
    told.soon("servingcluster/main", "Degraded", "Sound")


NO_MODEL = "cannot fetch the model: org/nothing: no such model on the hub"


def test_a_model_that_is_not_there_is_one_fault_of_the_cluster(
    control_plane: ControlPlane, namespace: str, operator: Operator, told: Told
) -> None:
    control_plane.apply(cluster(namespace))
    told.soon("wp/main-decode", "Available", "Starting")
    administrator = kube_of(control_plane)
    labels = Owner("main", namespace, "").labels("worker") | {POOL_LABEL: "decode"}
    container = {"name": "ray-worker", "image": "none"}
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "failing", "namespace": namespace, "labels": labels},
        "spec": {"containers": [container], "initContainers": [container | {"name": FETCH}]},
    }
    administrator.create(PODS, made)
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": NO_MODEL}}
    init = {"name": FETCH, "image": "none", "imageID": "", "ready": False, "restartCount": 0}
    status = {"initContainerStatuses": [init | {"state": ended}]}
    administrator.merge_patch(PODS, Key(namespace, "failing"), {"status": status}, "status")
    found = told.soon("servingcluster/main", "Degraded", "ModelUnavailable")
    assert found["message"] == f"spec.model.name: {NO_MODEL}"
    found = told.soon("wp/main-decode", "Degraded", "ModelUnavailable")
    assert NO_MODEL in found["message"]


def wait_for_size(control_plane: ControlPlane, namespace: str, size: int) -> None:
    """Of the decode pool's worker group."""

    def sizes() -> bool:
        unit = unit_of(control_plane, namespace, "main")
        return unit is not None and group_sizes_in(unit)["decode"] == size

    eventually(sizes, f"{size} pods are asked for")


def test_a_start_is_told_without_a_warning(
    control_plane: ControlPlane, namespace: str, operator: Operator, told: Told
) -> None:
    control_plane.apply(cluster(namespace))
    found = told.soon("servingcluster/main", "Progressing", "Starting")
    assert found["message"].startswith("Ray's head is starting")
    told.soon("wp/main-decode", "Progressing", "Starting")

    def events() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = control_plane.read("events", "-n", namespace)["items"]
        return found

    eventually(lambda: "Starting" in {each["reason"] for each in events()}, "an event")
    warnings = {each["reason"] for each in events() if each["type"] == "Warning"}
    assert warnings <= {"HeadUnprotected"}


def test_a_fault_of_the_operators_own_is_told_logged_and_over_when_its_cause_is(
    control_plane: ControlPlane, namespace: str, operator: Operator, told: Told
) -> None:
    """Its cause: a worker group such as the operator never writes."""
    control_plane.apply(cluster(namespace))
    told.soon("servingcluster/main", "Degraded", "Sound")
    before = told("servingcluster/main", "Available")
    broken = json.dumps({"spec": {"workerGroupSpecs": [{"groupName": "x"}]}})
    name = f"rayclusters.ray.io/{name_of_unit(control_plane, namespace)}"
    control_plane.kubectl(*("-n", namespace, "patch", name, "--type=merge", "-p", broken))
    found = told.soon("servingcluster/main", "Degraded", "InternalError")
    assert "KeyError: 'template'" in found["message"]
    assert "Traceback" not in found["message"]
    assert "Traceback" in operator.log.read_text()
    assert told("servingcluster/main", "Available") == before
    control_plane.kubectl("-n", namespace, "delete", name)
    told.soon("servingcluster/main", "Degraded", "Sound")


def test_what_pods_wait_for_is_told_of_their_pool_and_their_cluster(
    control_plane: ControlPlane, namespace: str, operator: Operator, told: Told
) -> None:
    control_plane.apply(cluster(namespace))
    told.soon("wp/main-decode", "Available", "Starting")
    administrator = kube_of(control_plane)
    labels = Owner("main", namespace, "").labels("worker") | {POOL_LABEL: "decode"}
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stuck", "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "ray-worker", "image": "none"}]},
    }
    administrator.create(PODS, made)
    key = Key(namespace, "stuck")
    administrator.merge_patch(PODS, key, {"status": UNSCHEDULABLE}, "status")
    says = lambda what: told(what, "Available").get("message", "")  # noqa: E731
    no_gpu = "pod stuck: Unschedulable: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
    eventually(lambda: no_gpu in says("wp/main-decode"), "the scheduler's word")
    assert "Unschedulable" not in says("wp/main-prefill")
    unit = Key(namespace, name_of_unit(control_plane, namespace))
    administrator.merge_patch(RAY_CLUSTERS, unit, REFUSED, "status")
    for what in ("wp/main-prefill", "servingcluster/main"):
        eventually(lambda what=what: "exceeded quota" in says(what), f"{what}: KubeRay's word")
