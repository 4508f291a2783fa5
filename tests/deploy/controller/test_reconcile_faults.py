"""One look at a ServingCluster, before an API server that answers as a bad day has it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.api.naming import API_VERSION
from deploy.controller.caches import Caches
from deploy.controller.cluster_events import ClusterEvents
from deploy.controller.cluster_reconciler import ClusterReconciler
from deploy.controller.errors import (
    ConflictError,
    ForbiddenError,
    StatusError,
    UnreachableError,
)
from deploy.controller.finalizers import FINALIZER
from deploy.controller.fleet_watch import FleetWatch
from deploy.controller.manifests.common import CLUSTER_LABEL
from deploy.controller.manifests.worker_pool import worker_pool
from deploy.controller.objects import Key
from tests.deploy.controller.following import FAST, TIMEOUT_S
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted
from tests.deploy.controller.test_manifests import OWNER, RELEASE, ray_of, spec_of

KEY = Key(OWNER.namespace, OWNER.name)
CLUSTER = {
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
    bounds = {"minReplicas": 0, "maxReplicas": 64}  # the API server writes what they are by default
    return made | {"spec": made["spec"] | bounds | {"replicas": replicas}}


def ray_cluster() -> dict[str, Any]:
    made = ray_of(spec_of())
    made["metadata"] |= {"uid": "uid-3", "resourceVersion": "1"}
    assert made["metadata"]["labels"][CLUSTER_LABEL] == OWNER.name
    return made


def name_of(obj: dict[str, Any]) -> str:
    return str(obj["metadata"]["name"])


@dataclass
class Server:
    """What there is, by plural; what is written is noted and changes nothing."""

    objects: dict[str, list[dict[str, Any]]]
    refuses: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """By verb and the path's last part: a status and its reason."""
    writes: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.path.partition("?")[0]
        *_, before, last = path.split("/")
        if exchange.is_watch:
            exchange.begin_stream()
            exchange.hang()
        elif refusal := self.refuses.get((exchange.command, last)):
            code, reason = refusal
            exchange.answer({"kind": "Status", "code": code, "reason": reason}, code)
        elif exchange.command == "GET" and path == "/version":
            exchange.answer({"major": "1", "minor": "31"})
        elif exchange.command == "GET" and before in {**self.objects, "rayclusters": ()}:
            self._answer_one(exchange, before, last)
        elif exchange.command == "GET":
            told = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
            exchange.answer(told | {"items": self.objects.get(last, []), "resources": []})
        else:
            body = json.loads(exchange.body)
            self.writes.append((exchange.command, path, body))
            named = (obj for obj in self.objects.get(before, ()) if name_of(obj) == last)
            found = next(named, {"metadata": {"namespace": OWNER.namespace}})
            merged = {
                part: found.get(part, {}) | body.get(part, {}) for part in ("metadata", "spec")
            }
            exchange.answer(found | body | merged)

    def _answer_one(self, exchange: Exchange, plural: str, name: str) -> None:
        found = [obj for obj in self.objects.get(plural, ()) if name_of(obj) == name]
        missing = {"kind": "Status", "code": 404, "reason": "NotFound"}
        exchange.answer(*((found[0],) if found else (missing, 404)))

    def written(self, plural: str) -> list[dict[str, Any]]:
        return [body for _, path, body in self.writes if plural in path.split("/")]


@contextlib.contextmanager
def looking(server: Server) -> Iterator[ClusterReconciler]:
    with scripted(server) as running:
        kube = kube_of(running)
        caches = Caches.of(kube, None, FAST)
        fleets = FleetWatch(lambda _: None)
        events = ClusterEvents(lambda *_: None, "test")
        caches.start()
        try:
            assert caches.wait_synced(TIMEOUT_S)
            yield ClusterReconciler(kube, caches, fleets, events, RELEASE)
        finally:
            fleets.stop()
            caches.stop()


def test_a_ray_cluster_that_is_not_found_and_was_not_seen_to_go_is_not_taken_for_gone() -> None:
    """Its revisions would be forgotten, and what serves would drain."""
    server = Server(
        {
            "servingclusters": [CLUSTER],
            "workerpools": [decode_pool()],
            "rayclusters": [ray_cluster()],
        },
        {("GET", OWNER.name): (404, "NotFound")},
    )
    is_doubted = pytest.raises(UnreachableError, match="was not seen to go")
    with looking(server) as reconciler, is_doubted:
        reconciler.reconcile(KEY)
    assert not server.written("rayclusters")


def test_what_is_refused_before_anything_is_done_is_told() -> None:
    server = Server(
        {"servingclusters": [CLUSTER], "workerpools": [decode_pool()]},
        {("GET", OWNER.name): (403, "Forbidden")},
    )
    with looking(server) as reconciler, pytest.raises(ForbiddenError):
        reconciler.reconcile(KEY)
    (told,) = server.written("servingclusters")
    (condition,) = told["status"]["conditions"]
    assert (condition["type"], condition["reason"]) == ("Degraded", "Refused")
    assert "rayclusters/main" in condition["message"]


def test_a_bad_moment_of_the_servers_is_told_to_nobody() -> None:
    server = Server(
        {"servingclusters": [CLUSTER], "workerpools": [decode_pool()]},
        {("GET", OWNER.name): (503, "ServiceUnavailable")},
    )
    with looking(server) as reconciler, pytest.raises(StatusError):
        reconciler.reconcile(KEY)
    assert not server.written("servingclusters")


def test_a_cluster_that_was_written_meanwhile_is_looked_at_again_and_nothing_is_told() -> None:
    changed = CLUSTER | {"metadata": {**CLUSTER["metadata"], "finalizers": []}}
    server = Server({"servingclusters": [changed]}, {("PATCH", OWNER.name): (409, "Conflict")})
    with looking(server) as reconciler, pytest.raises(ConflictError):
        reconciler.reconcile(KEY)
    assert not server.writes


@pytest.mark.parametrize(("asked", "kept"), [(100, 64), (64, 64)])
def test_a_size_that_its_bounds_leave_out_keeps_nothing_of_the_cluster_from_being_done(
    asked: int, kept: int
) -> None:
    """An API server without CEL takes it."""
    server = Server({"servingclusters": [CLUSTER], "workerpools": [decode_pool(asked)]})
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    (made,) = server.written("rayclusters")
    assert made["spec"]["workerGroupSpecs"][0]["replicas"] == kept


def test_a_ray_cluster_that_was_deleted_is_made_anew() -> None:
    server = Server({"servingclusters": [CLUSTER], "workerpools": [decode_pool()]})
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    (made,) = server.written("rayclusters")
    assert made["spec"]["workerGroupSpecs"][0]["replicas"] == 1


@pytest.mark.parametrize(("panic_window_s", "again_s"), [(0.5, 1.0), (2.0, 2.0), (15.0, 5.0)])
def test_a_quiet_cluster_is_looked_at_as_often_as_its_planner_asks_for(
    panic_window_s: float, again_s: float
) -> None:
    """What was not looked at for longer counts as unknown, and nothing would ever shrink."""
    spec = CLUSTER["spec"] | {"planner": {"panicWindowS": panic_window_s}}
    server = Server({"servingclusters": [CLUSTER | {"spec": spec}], "workerpools": [decode_pool()]})
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
    told = server.written("servingclusters")
    return [body["metadata"]["finalizers"] for body in told if "metadata" in body]


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
    (told,) = server.written("servingclusters")
    (condition,) = told["status"]["conditions"]
    assert (condition["type"], condition["reason"]) == ("Progressing", "Deleting")


@pytest.mark.parametrize("has_redis", [True, False])
def test_what_kuberay_would_empty_a_redis_for_holds_up_no_deletion_where_there_is_none(
    has_redis: bool,
) -> None:
    """It was switched off: KubeRay drops its finalizer no more."""
    ray = with_metadata(ray_cluster(), finalizers=["ray.io/gcs-ft-redis-cleanup-finalizer", "a/b"])
    if has_redis:
        ray["spec"] = ray["spec"] | {"gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}}
    server = server_of_deleted([ray])
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    patches = [body for body in server.written("rayclusters") if "metadata" in body]
    left = [body["metadata"]["finalizers"] for body in patches]
    assert left == ([] if has_redis else [["a/b"]])


def test_a_ray_cluster_that_goes_already_is_waited_for() -> None:
    server = server_of_deleted([with_metadata(ray_cluster(), **DELETED)])
    with looking(server) as reconciler:
        assert reconciler.reconcile(KEY)
    assert not server.written("rayclusters")
    assert finalizers_left(server) == []


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
