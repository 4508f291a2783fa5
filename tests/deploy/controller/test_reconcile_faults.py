"""One look at a ServingCluster, before an API server that answers as a bad day has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.api.naming import API_VERSION
from deploy.controller.kit.errors import (
    ConflictError,
    StatusError,
    UnreachableError,
)
from deploy.controller.kit.finalizers import FINALIZER
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import CLUSTER_LABEL
from deploy.controller.manifests.ray_cluster import record_in, unit_in
from deploy.controller.manifests.worker_pool import worker_pool
from deploy.controller.reconcile.caches import Caches
from deploy.controller.reconcile.cluster_reconciler import ClusterReconciler
from deploy.controller.reconcile.fleet_watch import FleetWatch
from tests.deploy.controller.clusters import OWNER, RELEASE, ray_of, spec_of
from tests.deploy.controller.following import FAST, TIMEOUT_S
from tests.deploy.controller.scripted_api import kube_of, scripted
from tests.deploy.controller.written import Server, name_of

KEY = Key(OWNER.namespace, OWNER.name)
CLUSTER: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "ServingCluster",
    "metadata": {
        "name": OWNER.name,
        "namespace": OWNER.namespace,
        "uid": OWNER.uid,
        "resourceVersion": "1",
        "finalizers": [FINALIZER],
    },
    "spec": {"model": {"name": "models/demo"}, "pools": {"decode": {"role": "decode"}}},
}


def decode_pool(replicas: int = 1) -> dict[str, Any]:
    made = worker_pool(OWNER, "decode", {"role": "decode"}, FINALIZER)
    made["metadata"] |= {"uid": "uid-2", "resourceVersion": "1"}
    bounds = {"minReplicas": 0, "maxReplicas": 8}  # the API server writes what they are by default
    return made | {"spec": made["spec"] | bounds | {"replicas": replicas}}


def ray_cluster() -> dict[str, Any]:
    made = ray_of(spec_of())
    made["metadata"] |= {
        "uid": "uid-3", "resourceVersion": "1", "creationTimestamp": "2026-01-01T10:00:00Z",
    }  # fmt: skip
    assert made["metadata"]["labels"][CLUSTER_LABEL] == OWNER.name
    return made


@contextlib.contextmanager
def looking(server: Server) -> Iterator[ClusterReconciler]:
    with scripted(server) as running:
        kube = kube_of(running)
        caches = Caches(kube, None, FAST)
        fleets = FleetWatch(lambda _: None)
        caches.start()
        try:
            assert caches.wait_synced(TIMEOUT_S)
            yield ClusterReconciler(kube, caches, fleets, lambda *_: None, RELEASE)
        finally:
            fleets.stop()
            caches.stop()


def test_a_ray_cluster_that_is_not_found_and_was_not_seen_to_go_is_not_taken_for_gone() -> None:
    """Another unit would be made beside it."""
    server = server_with({"rayclusters": [ray_cluster()]}, CLUSTER["spec"])
    server.forgets = frozenset({"listed rayclusters"})
    is_doubted = pytest.raises(UnreachableError, match="not seen to go")
    with looking(server) as reconciler, is_doubted:
        reconciler.reconcile(KEY)
    assert not server.written("rayclusters")


@pytest.mark.parametrize(
    ("status", "is_reported"), [((403, "Forbidden"), True), ((503, "ServiceUnavailable"), False)]
)
def test_what_is_refused_before_anything_is_done_is_reported_and_a_bad_moment_is_not(
    status: tuple[int, str], is_reported: bool
) -> None:
    server = Server(
        {"servingclusters": [CLUSTER], "workerpools": [decode_pool()]},
        {("GET", "listed rayclusters"): status},
    )
    with looking(server) as reconciler, pytest.raises(StatusError, match=str(status[0])):
        reconciler.reconcile(KEY)
    said = server.written("servingclusters")
    assert len(said) == is_reported
    for condition in said[0]["status"]["conditions"] if said else ():
        assert (condition["type"], condition["reason"]) == ("Degraded", "Refused")
        assert "rayclusters" in condition["message"]


def test_a_cluster_that_was_written_meanwhile_is_looked_at_again_and_nothing_is_reported() -> None:
    changed = CLUSTER | {"metadata": {**CLUSTER["metadata"], "finalizers": []}}
    server = Server({"servingclusters": [changed]}, {("PATCH", OWNER.name): (409, "Conflict")})
    with looking(server) as reconciler, pytest.raises(ConflictError):
        reconciler.reconcile(KEY)
    assert len(server.writes) == 1, "that which is refused"


@pytest.mark.parametrize(("asked", "kept"), [(100, 1), (8, 8)])
def test_a_size_that_its_bounds_leave_out_keeps_nothing_of_the_cluster_from_being_done(
    asked: int, kept: int
) -> None:
    """An API server without CEL takes it."""
    server = Server({"servingclusters": [CLUSTER], "workerpools": [decode_pool(asked)]})
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    assert made_in(server)["spec"]["workerGroupSpecs"][0]["replicas"] == kept


def test_a_ray_cluster_that_was_deleted_is_made_anew() -> None:
    server = Server({"servingclusters": [CLUSTER], "workerpools": [decode_pool()]})
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    made = made_in(server)
    assert made["spec"]["workerGroupSpecs"][0]["replicas"] == 1
    assert made["metadata"]["name"] == f"main-{unit_in(made).code}"
    maps = {name_of(each): each for each in server.written("configmaps")}
    (owner,) = maps[name_of(made)]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("RayCluster", "uid-3")
    services = {name_of(each): each for each in server.written("services")}
    assert services["main-control"]["spec"]["selector"]["baton.dev/unit"] == unit_in(made).code


def made_in(server: Server) -> dict[str, Any]:
    """The one RayCluster that was written."""
    (made,) = server.written("rayclusters")
    return made


def existing(spec: dict[str, Any], *, pods: tuple[str, ...] = ("a", "b")) -> dict[str, list[Any]]:
    """What there is once a ServingCluster of this spec has been looked at, by plural: its unit has
    these worker pods, which are ready."""
    server = Server({"servingclusters": [CLUSTER | {"spec": spec}], "workerpools": [decode_pool()]})
    with looking(server) as reconciler:
        reconciler.reconcile(KEY)
    made = with_metadata(
        made_in(server), uid="uid-3", resourceVersion="1", creationTimestamp="2026-01-01T10:00:00Z"
    )
    (group,) = made["spec"]["workerGroupSpecs"]
    labels = group["template"]["metadata"]["labels"]
    metadata = {"namespace": OWNER.namespace, "labels": labels, "resourceVersion": "1"}
    there = [{"metadata": metadata | {"name": name}, "spec": {}} for name in pods]
    _, routers = server.written("deployments")
    routers = with_metadata(routers, uid="uid-4", resourceVersion="1")
    return {"rayclusters": [made], "pods": there, "deployments": [routers]}


OTHER = CLUSTER["spec"] | {
    "model": {"name": "models/other"}, "rollout": {"strategy": "Recreate"},
}  # fmt: skip


def server_with(there: dict[str, list[Any]], spec: dict[str, Any]) -> Server:
    cluster = CLUSTER | {"spec": spec}
    return Server({"servingclusters": [cluster], "workerpools": [decode_pool()], **there})


def told_of(server: Server) -> dict[str, Any]:
    """The cluster's condition that says how far it is."""
    (said,) = [body for body in server.written("servingclusters") if "status" in body]
    found = {each["type"]: each for each in said["status"]["conditions"]}
    progressing: dict[str, Any] = found["Progressing"]
    return progressing


def test_recreated_a_unit_drains_and_its_settings_stay_as_they_are() -> None:
    there = existing(CLUSTER["spec"])
    server = server_with(there, OTHER)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY) == 1.0
    (before,), drained = there["rayclusters"], made_in(server)
    assert name_of(drained) == name_of(before)
    assert unit_in(drained) == unit_in(before)
    (group,) = drained["spec"]["workerGroupSpecs"]
    assert group["replicas"] == 0
    assert group["scaleStrategy"]["workersToDelete"] == ["a", "b"], "each drains by itself"
    assert group["template"] == before["spec"]["workerGroupSpecs"][0]["template"]
    assert "main-" + unit_in(before).code not in map(name_of, server.written("configmaps"))


def test_what_has_drained_is_deleted_and_the_next_unit_is_made_when_its_last_pod_is_gone() -> None:
    there = existing(CLUSTER["spec"], pods=())
    (before,) = there["rayclusters"]
    server = server_with(there, OTHER)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    assert made_in(server)["preconditions"] == {"uid": "uid-3"}
    head = before["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    metadata = {"name": "head", "namespace": OWNER.namespace, "labels": head}
    left = {"pods": [{"metadata": metadata | {"resourceVersion": "1"}, "spec": {}}]}
    server = server_with({"deployments": there["deployments"]} | left, OTHER)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    assert not server.written("rayclusters")
    server = server_with({"deployments": there["deployments"]}, OTHER)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    made = made_in(server)
    assert unit_in(made).code != unit_in(before).code
    hashes = {
        each["spec"]["template"]["metadata"]["annotations"]["baton.dev/config-hash"]
        for each in (*server.written("deployments"), *there["deployments"])
    }
    assert len(hashes) == 2, "they know the model by another name"


def test_another_model_comes_beside_the_unit_that_serves() -> None:
    there = existing(CLUSTER["spec"])
    other = {"model": {"name": "models/other"}, "servedModelName": "demo"}
    server = server_with(there, CLUSTER["spec"] | other)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY) == 1.0
    stays, coming = server.written("rayclusters")
    assert name_of(coming) != name_of(stays) == name_of(there["rayclusters"][0])
    assert [group["replicas"] for group in stays["spec"]["workerGroupSpecs"]] == [2]
    assert [group["replicas"] for group in coming["spec"]["workerGroupSpecs"]] == [0]
    assert (record_in(stays).share, record_in(coming).share) == (1.0, 0.0)
    services = {name_of(each): each for each in server.written("services")}
    leads_to = services["main-control"]["spec"]["selector"]["baton.dev/unit"]
    assert leads_to == unit_in(stays).code


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"router": {"replicas": 3}},
        {"advanced": {"planner": {"panicWindowSeconds": 5}}},
        {"aFieldOfALaterRelease": None},
    ],
)
def test_a_unit_stays_where_the_spec_asks_for_the_same(changed: dict[str, Any]) -> None:
    there = existing(CLUSTER["spec"])
    spec = {name: value for name, value in (CLUSTER["spec"] | changed).items() if value is not None}
    server = server_with(there, spec)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    (group,) = made_in(server)["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["scaleStrategy"]["workersToDelete"]) == (2, [])
    assert name_of(made_in(server)) == name_of(there["rayclusters"][0])


def test_a_spec_that_no_unit_could_be_made_of_ends_none() -> None:
    there = existing(CLUSTER["spec"])
    server = server_with(there, OTHER | {"engine": {"maxNumSeqs": 0}})
    with looking(server) as reconciler:
        reconciler.reconcile(KEY)
    assert not server.written("rayclusters")


@pytest.mark.parametrize(("panic_window_s", "again_s"), [(0.5, 1.0), (2.0, 2.0), (15.0, 5.0)])
def test_a_quiet_cluster_is_looked_at_as_often_as_its_planner_asks_for(
    panic_window_s: float, again_s: float
) -> None:
    """What was not looked at for longer counts as unknown, and nothing would ever shrink."""
    spec = CLUSTER["spec"] | {"advanced": {"planner": {"panicWindowSeconds": panic_window_s}}}
    server = server_with(existing(spec), spec)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY) == again_s


DELETED = {"deletionTimestamp": "2026-01-01T10:00:00Z"}


def with_metadata(obj: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return obj | {"metadata": obj["metadata"] | metadata}


def server_of_deleted(ray: list[dict[str, Any]], **cluster: Any) -> Server:
    """Its pools have drained."""
    deleted = with_metadata(CLUSTER, **DELETED) | cluster
    return Server({"servingclusters": [deleted], "workerpools": [], "rayclusters": ray})


def finalizers_left(server: Server) -> list[Any]:
    said = server.written("servingclusters")
    return [body["metadata"]["finalizers"] for body in said if "metadata" in body]


@pytest.mark.parametrize("spec", [CLUSTER["spec"], {}], ids=["sound", "cannot be read"])
def test_a_deleted_cluster_waits_for_its_ray_cluster_which_goes_before_what_its_pods_need(
    spec: dict[str, Any],
) -> None:
    """KubeRay empties the Redis of Ray's head by a pod of the head's account and token."""
    server = server_of_deleted([ray_cluster()], spec=spec)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    (deletion,) = server.written("rayclusters")
    assert deletion["preconditions"] == {"uid": "uid-3"}
    assert finalizers_left(server) == []
    (said,) = server.written("servingclusters")
    (condition,) = said["status"]["conditions"]
    assert (condition["type"], condition["reason"]) == ("Progressing", "Deleting")


def test_a_ray_cluster_that_goes_already_is_waited_for() -> None:
    server = server_of_deleted([with_metadata(ray_cluster(), **DELETED)])
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    assert (server.written("rayclusters"), finalizers_left(server)) == ([], [])


@pytest.mark.parametrize(
    "others",
    [[], [with_metadata(ray_cluster(), ownerReferences=[])]],
    ids=["gone", "somebody else's"],
)
def test_a_deleted_cluster_without_a_ray_cluster_of_its_own_is_let_go(others: list[Any]) -> None:
    server = server_of_deleted(others)
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY) is None
    assert not server.written("rayclusters")
    assert finalizers_left(server) == [[]]
