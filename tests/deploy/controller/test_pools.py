"""WorkerPools as the operator finds, applies and scales them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from baton.errors import ConfigError
from cluster.planner.planner import PoolPlan
from cluster.role_plan import RolePlan
from deploy.api.checked import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.events import EventType
from deploy.controller.kit.finalizers import FINALIZER
from deploy.controller.kit.objects import Key, Object
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL, ROLE_LABEL, Owner
from deploy.controller.manifests.worker_pool import worker_pool
from deploy.controller.observed.view import PoolView
from deploy.controller.reconcile.caches import Caches
from deploy.controller.reconcile.pools import Pools, with_accepted_size
from tests.deploy.controller.following import FAST, TIMEOUT_S
from tests.deploy.controller.scripted_api import kube_of, scripted
from tests.deploy.controller.views import view_of
from tests.deploy.controller.written import Server

OWNER = Owner("main", "models", "uid-1")
PATH = "/apis/baton.dev/v1alpha1/namespaces/models/workerpools/main-decode"
DECODE = {"role": "decode"}
GOING = {"deletionTimestamp": "2030-01-01T00:00:00Z"}


@contextlib.contextmanager
def pools_at(
    *seen: dict[str, Any], **refuses: tuple[int, str]
) -> Iterator[tuple[Pools, Server, list[tuple[str, str]]]]:
    """With the events. `seen`: the WorkerPools that there are; `refuses`: verbs, each with a status
    and its reason."""
    names = ("main-decode", "listed workerpools")
    refused = {(verb, name): status for verb, status in refuses.items() for name in names}
    server, events = Server({"workerpools": list(seen)}, refused), list[tuple[str, str]]()

    def record(about: Object, type_: EventType, reason: str, message: str) -> None:
        events.append((reason, message))

    with scripted(server) as running:
        kube = kube_of(running)
        caches = Caches(kube, None, FAST)
        caches.pools.start()
        try:
            assert caches.pools.wait_synced(TIMEOUT_S)
            yield Pools(kube, caches, Applied(kube, caches.of_written), record), server, events
        finally:
            caches.pools.stop()


def cluster(**pools: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "ServingCluster",
        "metadata": {"name": OWNER.name, "namespace": OWNER.namespace, "uid": OWNER.uid},
        "spec": {"model": {"name": "models/demo"}, "pools": pools},
    }


def keep(pools: Pools, wanted: dict[str, Any]) -> None:
    _, failed = pools.keep(wanted, OWNER, read_spec(ServingClusterSpec, wanted))
    assert not failed


def seen(
    written: dict[str, Any] | None = None, owner: Owner = OWNER, name: str = "decode"
) -> dict[str, Any]:
    """As the operator made it; `written`: by somebody else since."""
    made = worker_pool(owner, name, DECODE, FINALIZER)
    made["metadata"] |= {"uid": "uid-2", "resourceVersion": "1"}
    return made | {"spec": made["spec"] | {"replicas": 2} | (written or {})}


# --- what a pool is for good ----------------------------------------------------------------------


def test_a_role_that_is_changed_is_named_by_its_field_and_nothing_is_touched() -> None:
    """An API server without CEL takes it."""
    wanted = cluster(decode={"role": "mixed"}, prefill={"role": "prefill"})
    problem = r"ServingCluster models/main: spec\.pools\.decode\.role cannot be changed: make an"
    with pools_at(seen()) as (pools, server, _):
        with pytest.raises(ConfigError, match=problem):
            keep(pools, wanted)
        assert server.writes == []


@pytest.mark.parametrize("label", [CLUSTER_LABEL, POOL_LABEL, ROLE_LABEL])
def test_what_somebody_writes_into_a_worker_pool_is_put_back(label: str) -> None:
    labelled = seen()
    labelled["metadata"]["labels"][label] = "other"
    for found in (seen({"maxReplicas": 3}), labelled):
        with pools_at(found) as (pools, server, _):
            keep(pools, cluster(decode=DECODE))
        ((command, path, body),) = server.writes
        assert (command, path) == ("PATCH", PATH)
        assert body["spec"] == {"role": "decode", "cluster": "main", "pool": "decode"}
        assert body["metadata"]["labels"][label] in {"main", "decode"}


def test_a_pool_that_is_being_deleted_makes_way_for_one_of_another_role() -> None:
    going = seen()
    going["metadata"] |= GOING
    with pools_at(going) as (pools, server, _):
        keep(pools, cluster(decode={"role": "mixed"}))
        assert server.writes == [], "it drains first"


def test_a_worker_pool_of_another_cluster_is_left_alone_and_reported() -> None:
    other = Owner("default", OWNER.namespace, "uid-3")
    problem = (
        r"spec\.pools\.decode needs another name: WorkerPool models/main-decode is pool "
        r"main-decode of ServingCluster default"
    )
    for metadata in ({}, GOING):
        found = seen(owner=other, name="main-decode")
        found["metadata"] |= metadata
        with pools_at(found) as (pools, server, _):
            with pytest.raises(ConfigError, match=problem):
                keep(pools, cluster(decode=DECODE))
            assert server.writes == [], "it drains as its own cluster lets it"


# --- pools that go --------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "is_told"), [((403, "Forbidden"), 1), ((404, "NotFound"), 0)])
def test_a_pool_that_cannot_be_deleted_keeps_no_other_from_being_done(
    status: tuple[int, str], is_told: int
) -> None:
    wanted = cluster(prefill={"role": "prefill"}, both={"role": "mixed"})
    with pools_at(seen(), DELETE=status) as (pools, server, _):
        found, failed = pools.keep(wanted, OWNER, read_spec(ServingClusterSpec, wanted))
    assert set(found) == {"prefill", "both", "decode"}
    assert len(failed) == is_told
    assert [path for command, path, _ in server.writes if command == "DELETE"] == [PATH]


def test_a_pool_that_was_written_meanwhile_is_let_go_at_the_next_look() -> None:
    """That the cache is old is no fault."""
    going = seen()
    going["metadata"] |= GOING
    with pools_at(going, PATCH=(409, "Conflict")) as (pools, server, _):
        pools.release_orphans(Key(OWNER.namespace, OWNER.name))
    ((_, path, body),) = server.writes
    assert (path, body["metadata"]) == (PATH, {"finalizers": [], "resourceVersion": "1"})


# --- pools that somebody deletes ------------------------------------------------------------------


def test_a_pool_that_the_spec_names_is_made_again_at_its_size_and_never_seen_going() -> None:
    going = seen({"replicas": 5})
    going["metadata"] |= GOING
    wanted = cluster(decode=DECODE | {"initialReplicas": 1})
    with pools_at(going) as (pools, server, _):
        found, failed = pools.keep(wanted, OWNER, read_spec(ServingClusterSpec, wanted))
    assert not failed
    assert "deletionTimestamp" not in found["decode"]["metadata"]
    finalizers, created, applied = server.writes
    assert finalizers[2]["metadata"]["finalizers"] == []
    assert (created[0], created[2]["spec"]["replicas"]) == ("POST", 5)
    assert (applied[0], "replicas" in applied[2]["spec"]) == ("PATCH", False)


@pytest.mark.parametrize("verb", ["PATCH", "POST"])
def test_a_pool_that_cannot_be_made_again_yet_keeps_its_workers(verb: str) -> None:
    going = seen()
    going["metadata"] |= GOING
    wanted = cluster(decode=DECODE)
    status = (409, "AlreadyExists") if verb == "POST" else (403, "Forbidden")
    with pools_at(going, **{verb: status}) as (pools, server, _):
        found, failed = pools.keep(wanted, OWNER, read_spec(ServingClusterSpec, wanted))
    assert len(failed) == (verb == "PATCH")
    assert len(server.writes) <= 2, "no finalizer is given back to what is being deleted"
    assert "deletionTimestamp" not in found["decode"]["metadata"]


@pytest.mark.parametrize(("status", "size"), [({}, 2), ({"pools": {"decode": "0/6"}}, 6)])
def test_a_pool_that_is_gone_is_made_with_the_size_that_the_status_remembers(
    status: dict[str, Any], size: int
) -> None:
    wanted = cluster(decode=DECODE | {"initialReplicas": 2}) | {"status": status}
    with pools_at() as (pools, server, _):
        keep(pools, wanted)
    assert server.writes[0][2]["spec"]["replicas"] == size


# --- sizes and their bounds -----------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "value"), [("maxReplicas", 1), ("minReplicas", 3)])
def test_a_size_that_new_bounds_leave_out_is_reported_where_it_is_not_the_planners(
    bound: str, value: int
) -> None:
    """An API server with CEL would refuse the WorkerPool; one without would take it, and nobody
    could read it. It stays as it is, and all else is done."""
    found = seen({"minReplicas": 0, "maxReplicas": 64})
    bounds = DECODE | {"initialReplicas": value, bound: value}
    wanted = cluster(decode=bounds, prefill={"role": "prefill"})
    with pools_at(found) as (pools, server, _):
        kept, (problem,) = pools.keep(wanted, OWNER, read_spec(ServingClusterSpec, wanted))
    assert kept["decode"] == found
    assert str(problem) == (
        f"spec.pools.decode.{bound} is {value}, and WorkerPool models/main-decode has 2 replicas: "
        "scale it first"
    )
    assert {body["metadata"]["name"] for *_, body in server.writes} == {"main-prefill"}


@pytest.mark.parametrize(
    ("asked", "status", "kept"),
    [
        (100, {"decode": "3/3"}, 3),
        (1, {"decode": "1/3"}, 3),
        (100, {}, 4),
        (5, {"decode": "3/3"}, 5),
    ],
)
def test_a_size_outside_of_the_bounds_leaves_the_last_one(
    asked: int, status: dict[str, str], kept: int
) -> None:
    spec = DECODE | {"minReplicas": 2, "maxReplicas": 8}
    pool = seen(spec | {"replicas": asked})
    of = cluster(decode=spec | {"initialReplicas": 4}) | {"status": {"pools": status}}
    assert with_accepted_size("decode", pool, of)["spec"]["replicas"] == kept


def test_a_size_outside_of_its_bounds_is_a_problem_of_the_pool_alone() -> None:
    found = seen({"replicas": 65, "minReplicas": 0, "maxReplicas": 8})
    with pools_at(found) as (pools, server, _):
        keep(pools, cluster(decode=DECODE))
    assert [command for command, *_ in server.writes] == ["PATCH"]


@pytest.mark.parametrize(
    ("bounds", "size"),
    [({"minReplicas": 5, "maxReplicas": 9}, 5), ({"minReplicas": 0, "maxReplicas": 2}, 2)],
)
def test_a_size_that_new_bounds_leave_out_follows_them_where_it_is_the_planners(
    bounds: dict[str, int], size: int
) -> None:
    """At once, or an API server with CEL would take neither; roles that split too many go."""
    planner = {"role": "mixed", "scaling": {"mode": "planner"}, "initialReplicas": size}
    found = pool_of("planner", {"prefill": 1, "decode": 3})
    with pools_at(found) as (pools, server, _):
        keep(pools, cluster(decode=planner | bounds))
    fit, applied = [body["spec"] for *_, body in server.writes]
    roles: dict[str, Any] = {} if size > 3 else {"rolePlan": None}
    assert fit == bounds | {"replicas": size} | roles
    assert applied.items() >= bounds.items()
    assert "replicas" not in applied


def test_a_size_within_its_bounds_is_left_alone() -> None:
    planner = {"role": "mixed", "scaling": {"mode": "planner"}, "maxReplicas": 4}
    with pools_at(pool_of("planner", {"prefill": 1, "decode": 3})) as (pools, server, _):
        keep(pools, cluster(decode=planner))
    ((_, _, body),) = server.writes
    assert not {"replicas", "rolePlan"} & set(body["spec"])


# --- what the planner writes ----------------------------------------------------------------------


def pool_of(mode: str, role_plan: dict[str, int] | None = None) -> dict[str, Any]:
    """A mixed pool of four."""
    roles = {} if role_plan is None else {"rolePlan": role_plan}
    bounds = {"minReplicas": 0, "maxReplicas": 64}
    mixed = {"role": "mixed", "replicas": 4, "scaling": {"mode": mode}}
    found = seen(mixed | bounds | roles)
    found["metadata"]["labels"][ROLE_LABEL] = "mixed"
    return found


def scale(pool: dict[str, Any], plan: PoolPlan) -> tuple[list[Any], list[tuple[str, str]]]:
    """What is written, and the events."""
    with pools_at(pool) as (pools, server, events):
        spec = read_spec(WorkerPoolSpec, pool)
        views = {"decode": PoolView(pool, spec, [], None)}
        view = dataclasses.replace(view_of(), pools=views)
        pools.scale(view, {"decode": plan})
    return server.writes, events


def test_the_planners_roles_and_size_are_written_at_once() -> None:
    plan = PoolPlan(5, RolePlan(prefill=1, decode=3), "so it is")
    roles = {"prefill": 1, "decode": 3}
    spec = {"spec": {"replicas": 5, "rolePlan": roles}}
    writes, events = scale(pool_of("planner"), plan)
    assert writes == [("PATCH", PATH, spec)]
    message = "from 4 to 5 replicas, 1 act as prefill alone, 3 as decode alone: so it is"
    assert events == [("Planned", message)]


def test_roles_that_switch_leave_the_size_alone() -> None:
    plan = PoolPlan(4, RolePlan(prefill=3, decode=1), "so it is")
    before = pool_of("planner", {"prefill": 1, "decode": 3})
    spec = {"spec": {"rolePlan": {"prefill": 3, "decode": 1}}}
    writes, ((_, message),) = scale(before, plan)
    assert writes == [("PATCH", PATH, spec)]
    assert message == "3 act as prefill alone, 1 as decode alone: so it is"


@pytest.mark.parametrize("mode", ["manual", "hpa"])
def test_the_planner_writes_nothing_of_a_pool_that_somebody_else_scales(mode: str) -> None:
    plan = PoolPlan(5, RolePlan(prefill=3, decode=1), "so it is")
    assert scale(pool_of(mode), plan) == ([], [])


def test_a_plan_that_changes_nothing_is_not_written() -> None:
    plan = PoolPlan(4, RolePlan(prefill=3, decode=1), "so it is")
    assert scale(pool_of("planner", {"prefill": 3, "decode": 1}), plan) == ([], [])
    assert scale(pool_of("planner"), PoolPlan(4, RolePlan(0, 0), "nobody")) == ([], [])
