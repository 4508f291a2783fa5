"""One ServingCluster's revisions, as its supervisor and its RayCluster tell of them."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest

from baton.v1 import control_pb2
from deploy.api.read import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.cluster_status import Refusals, cluster_verdicts
from deploy.controller.cohort_judgement import Figures, Watched
from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.manifests.common import Owner
from deploy.controller.objects import Key
from deploy.controller.observed import Fleet, FleetPool, Heard, Place, PlaceState, Pod
from deploy.controller.pool_status import pool_verdicts
from deploy.controller.revisions import revision_of
from deploy.controller.rolling import Rolling, decide, group_size_of
from deploy.controller.rolling_status import (
    progress_in,
    progress_status,
    watch_in,
    watch_status,
)
from deploy.controller.rollout import ReadyWatch, Room
from deploy.controller.view import ClusterView, pool_view

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LATER = NOW + datetime.timedelta(hours=1)
OWNER = Owner("main", "models", "uid")
SPEC: dict[str, Any] = {
    "model": {"name": "models/demo"},
    "pools": {"decode": {"role": "decode"}},
}
BEFORE = SPEC | {"logLevel": "debug"}
"""Another revision of the same cohort."""
OLD = SPEC | {"model": {"name": "models/old"}}
"""Another cohort."""


def pool_spec(**changes: Any) -> WorkerPoolSpec:
    return WorkerPoolSpec(role="decode", cluster="main", pool="decode", **{"replicas": 2} | changes)


def name_of(spec: dict[str, Any]) -> str:
    return revision_of(spec, "decode", pool_spec()).name


def group(spec: dict[str, Any], replicas: int) -> dict[str, Any]:
    revision = revision_of(spec, "decode", pool_spec())
    metadata = {
        "labels": {"baton.dev/pool": "decode"},
        "annotations": {"baton.dev/cohort": revision.cohort, "baton.dev/cluster-yaml": "{}"},
    }
    template = {"metadata": metadata}
    return {"groupName": revision.name, "replicas": replicas, "template": template}


def pods(spec: dict[str, Any], count: int) -> list[Pod]:
    name = name_of(spec)
    return [Pod(f"{name}-pod-{n}", "decode", True, False, name, "2026") for n in range(count)]


def served(spec: dict[str, Any], size: int, num_live: int | None = None) -> FleetPool:
    name = name_of(spec)
    num_live = size if num_live is None else num_live
    places = [
        Place(
            f"{name}-{n}",
            f"{name}-pod-{n}",
            PlaceState.LIVE if n < num_live else PlaceState.STARTING,
        )
        for n in range(size)
    ]
    return FleetPool(size, places)


def view(
    fleet: dict[str, FleetPool] | None,
    groups: list[dict[str, Any]],
    there: list[Pod],
    *,
    is_settled: bool = True,
    told: tuple[control_pb2.WatchFleetResponse, float] | None = None,
    **pool: Any,
) -> ClusterView:
    """The spec asks for `SPEC`."""
    metadata = {"name": "main", "namespace": "models"}
    obj = {"kind": "ServingCluster", "metadata": metadata, "spec": SPEC}
    known = None if fleet is None else Fleet(fleet)
    by_name = {each["groupName"]: each for each in groups}
    heard = Heard(known, told, is_settled=known is not None and is_settled)
    made = pool_view(obj, {"metadata": {}}, pool_spec(**pool), by_name, there, heard)
    spec = read_spec(ServingClusterSpec, obj)
    key = Key("models", "main")
    ray = {"spec": {"workerGroupSpecs": groups}}
    return ClusterView(key, obj, OWNER, spec, {"decode": made}, heard, ray)


def decided(seen: ClusterView, progress: Progress | None = None) -> Rolling:
    return decide(seen, progress, {}, None, NOW)


def test_what_is_new_is_made_whole_at_once_with_no_supervisor_yet() -> None:
    assert decided(view(None, [], [])).sizes == {name_of(SPEC): 2}


def test_a_change_surges_while_the_supervisor_speaks_and_waits_while_it_does_not() -> None:
    there, groups = pods(BEFORE, 2), [group(BEFORE, 2)]
    fleet = {name_of(BEFORE): served(BEFORE, 2)}
    assert decided(view(fleet, groups, there)).sizes == {name_of(BEFORE): 2, name_of(SPEC): 1}
    for seen in (view(None, groups, there), view(fleet, groups, there, is_settled=False)):
        assert decided(seen).sizes == {name_of(BEFORE): 2, name_of(SPEC): 0}


def test_a_pod_that_nobody_ends_keeps_no_room_from_those_that_roll() -> None:
    """As of a node that is dead: KubeRay has made another for it."""
    there = pods(BEFORE, 3)
    there[2] = dataclasses.replace(there[2], is_going=True)
    fleet = {name_of(BEFORE): served(BEFORE, 2)}
    sizes = decided(view(fleet, [group(BEFORE, 2)], there)).sizes
    assert sizes == {name_of(BEFORE): 2, name_of(SPEC): 0}, "it may end yet"
    there[2] = dataclasses.replace(there[2], is_lost=True)
    sizes = decided(view(fleet, [group(BEFORE, 2)], there)).sizes
    assert sizes == {name_of(BEFORE): 2, name_of(SPEC): 1}
    over = view({}, [group(BEFORE, 0)], there[2:]).pools["decode"]
    assert over.is_empty


def test_a_supervisor_that_lost_everything_is_told_the_sizes_of_the_groups() -> None:
    groups = [group(BEFORE, 2), group(SPEC, 1)]
    seen = view({}, groups, [*pods(BEFORE, 2), *pods(SPEC, 1)])
    assert decided(seen).sizes == {name_of(BEFORE): 2, name_of(SPEC): 1}


def test_no_pod_of_an_old_revision_goes_before_its_worker_has_left() -> None:
    groups, there = [group(BEFORE, 2), group(SPEC, 1)], [*pods(BEFORE, 2), *pods(SPEC, 1)]
    fleet = {name_of(BEFORE): served(BEFORE, 2), name_of(SPEC): served(SPEC, 1)}
    seen = view(fleet, groups, there)
    rolling = decided(seen)
    assert rolling.sizes == {name_of(BEFORE): 1, name_of(SPEC): 1}
    size = group_size_of(seen, seen.pools["decode"], name_of(BEFORE), 1)
    assert (size.replicas, size.to_delete) == (2, ())
    fleet[name_of(BEFORE)] = served(BEFORE, 1)
    seen = view(fleet, groups, there)
    size = group_size_of(seen, seen.pools["decode"], name_of(BEFORE), 1)
    assert (size.replicas, size.to_delete) == (1, (f"{name_of(BEFORE)}-pod-1",))


def test_another_cohort_grows_beside_the_old_one_and_gets_no_request_before_it_is_live() -> None:
    old = revision_of(OLD, "decode", pool_spec()).cohort
    new = revision_of(SPEC, "decode", pool_spec()).cohort
    groups, there = [group(OLD, 2)], pods(OLD, 2)
    fleet = {name_of(OLD): served(OLD, 2)}
    rolling = decided(view(fleet, groups, there))
    assert rolling.progress == Progress(old, new, Phase.GROWING)
    assert rolling.sizes == {name_of(OLD): 2, name_of(SPEC): 1}
    assert rolling.weights == {old: 100, new: 0}
    fleet[name_of(SPEC)] = served(SPEC, 1)
    seen = view(fleet, [*groups, group(SPEC, 1)], [*there, *pods(SPEC, 1)])
    rolling = decided(seen, rolling.progress)
    assert rolling.weights == {old: 99, new: 1}
    assert rolling.kept == {name_of(OLD), name_of(SPEC)}


def test_workers_that_fall_silent_for_a_moment_still_are_those_that_are_gone_back_to() -> None:
    old = revision_of(OLD, "decode", pool_spec()).cohort
    new = revision_of(SPEC, "decode", pool_spec()).cohort
    places = served(SPEC, 2).places
    silent = [dataclasses.replace(place, state=PlaceState.SUSPECT) for place in places]
    fleet = {name_of(SPEC): FleetPool(2, silent), name_of(OLD): served(OLD, 1)}
    there = [*pods(SPEC, 2), *pods(OLD, 1)]
    returning = Progress(new, old, Phase.RETURNING, 10)
    for replicas in 1, 2:
        seen = view(fleet, [group(SPEC, 2), group(OLD, 1)], there, replicas=replicas)
        rolling = decided(seen, returning)
        assert rolling.weights == {new: 90, old: 10}
        assert rolling.sizes[name_of(OLD)] == 1


def test_a_cohort_that_does_not_get_ready_is_told_as_stopped_and_not_as_growing_for_good() -> None:
    groups, there = [group(OLD, 2), group(SPEC, 1)], [*pods(OLD, 2), *pods(SPEC, 1)]
    fleet = {name_of(OLD): served(OLD, 2), name_of(SPEC): served(SPEC, 1, num_live=0)}
    seen = view(fleet, groups, there)
    growing = decided(seen).progress
    reasons = []
    for now in (NOW, LATER):
        rolling = decide(seen, growing, {"decode": ReadyWatch(name_of(SPEC), 0, NOW)}, None, now)
        assert rolling.progress.phase is Phase.GROWING
        told = cluster_verdicts(seen, rolling, {"status": {"readyReplicas": 2}}, Refusals())
        reasons.append((told[1].is_true, told[1].reason))
    assert reasons == [(True, "CohortGrowing"), (False, "RolloutStopped")]


def test_an_old_cohort_that_goes_on_serving_keeps_its_revision_also_at_zero() -> None:
    old = revision_of(OLD, "decode", pool_spec()).cohort
    new = revision_of(SPEC, "decode", pool_spec()).cohort
    back = Progress(old, new, Phase.RETURNED, reason="it failed", is_fault=True)
    fleet = {name_of(OLD): served(OLD, 0), name_of(SPEC): served(SPEC, 0)}
    seen = view(fleet, [group(OLD, 0), group(SPEC, 0)], [], replicas=0)
    assert name_of(OLD) in decided(seen, back).kept
    seen = view(fleet, [group(OLD, 0), group(SPEC, 0)], [], replicas=2)
    assert decided(seen, back).sizes == {name_of(OLD): 2, name_of(SPEC): 0}


def test_nothing_progresses_any_more_once_a_cohort_was_taken_back() -> None:
    old = revision_of(OLD, "decode", pool_spec()).cohort
    new = revision_of(SPEC, "decode", pool_spec()).cohort
    back = Progress(old, new, Phase.RETURNED, reason="it was slow", is_fault=True)
    fleet = {name_of(OLD): served(OLD, 2), name_of(SPEC): served(SPEC, 0)}
    seen = view(fleet, [group(OLD, 2), group(SPEC, 0)], pods(OLD, 2))
    rolling = decided(seen, back)
    told = pool_verdicts(seen.pools["decode"], rolling.pools["decode"], "")
    assert [verdict.reason for verdict in told] == ["Live", "CohortReturned", "Sound"]
    told = cluster_verdicts(seen, rolling, {"status": {"readyReplicas": 2}}, Refusals())
    assert [(verdict.is_true, verdict.reason) for verdict in told[1:]] == [
        (False, "CohortReturned"),
        (True, "CohortTakenBack"),
    ]
    assert told[2].message == f"{new} was taken back, {old} serves: it was slow"


def test_a_cohort_that_was_taken_back_is_told_with_its_versions_and_tried_again_as_others() -> None:
    old = revision_of(OLD, "decode", pool_spec()).cohort
    new = revision_of(SPEC, "decode", pool_spec()).cohort
    fleet = {name_of(OLD): served(OLD, 2), name_of(SPEC): served(SPEC, 0)}
    seen = view(fleet, [group(OLD, 2), group(SPEC, 0)], pods(OLD, 2))
    watching = Progress(old, new, Phase.WATCHING, 10, NOW)
    figures = {new: Figures(100.0, 100.0), old: Figures(1000.0, 0.0)}
    progress = decide(seen, watching, {}, Watched(5.0, figures), NOW).progress
    for _ in range(3):  # an operator that was restarted goes on from what the status holds
        progress = decided(
            seen, progress_in({"status": {"cohort": progress_status(progress)}})
        ).progress
    assert (progress.phase, progress.tried) == (Phase.RETURNED, (name_of(SPEC),))
    mended = view(fleet, [group(OLD, 2), group(SPEC, 0)], pods(OLD, 2), drain_timeout="5m")
    rolling = decided(mended, progress)
    assert rolling.progress == Progress(old, new, Phase.GROWING)
    target = mended.pools["decode"].target
    assert rolling.sizes == {name_of(OLD): 2, name_of(SPEC): 0, target: 1}


def test_what_the_supervisor_refuses_degrades_the_pool() -> None:
    seen = view({name_of(SPEC): served(SPEC, 2)}, [group(SPEC, 2)], pods(SPEC, 2))
    rolling = decided(seen)
    degraded = pool_verdicts(seen.pools["decode"], rolling.pools["decode"], "no such model")[-1]
    assert (degraded.is_true, degraded.reason) == (True, "SupervisorRefused")
    assert degraded.message == "the supervisor: no such model"


@pytest.mark.parametrize(
    "fleet",
    [
        {name_of(BEFORE): served(BEFORE, 2), name_of(SPEC): served(SPEC, 1, num_live=0)},
        {name_of(SPEC): served(SPEC, 0)},
        {name_of(SPEC): served(SPEC, 1)},
        {name_of(BEFORE): served(BEFORE, 0), name_of(SPEC): served(SPEC, 1)},
        {},
    ],
    ids=[
        "one loads",
        "the old one is not known",
        "nor beside a new one",
        "its drain is not heard",
        "nothing is known",
    ],
)
def test_while_a_supervisor_finds_what_runs_pods_count_and_no_rollout_is_told_as_done(
    fleet: dict[str, FleetPool],
) -> None:
    told = (control_pb2.WatchFleetResponse(settles=True), 0.0)
    there = [*pods(BEFORE, 2), *pods(SPEC, 1)]
    seen = view(fleet, [group(BEFORE, 2), group(SPEC, 1)], there, is_settled=False, told=told)
    rolling = decided(seen)
    pool = pool_verdicts(seen.pools["decode"], rolling.pools["decode"], "")
    routers = {"status": {"readyReplicas": 2}}
    for verdicts in pool, cluster_verdicts(seen, rolling, routers, Refusals()):
        available, progressing, _ = verdicts
        assert available.is_true
        assert (progressing.is_true, progressing.reason) == (True, "SupervisorStarts")


def test_what_an_older_operator_says_of_a_pool_at_zero_is_of_a_version_that_served() -> None:
    """It did not note it; what is to be kept is not given up for that."""
    told = {"revision": "a", "readyReplicas": 0}
    for instead, has_served in ((None, True), ("b", False)):
        watch = watch_in({"status": {"rollout": told | {"instead": instead}}})
        assert watch is not None
        assert watch.has_served is has_served


def test_statuses_hold_all_that_an_operator_goes_on_from() -> None:
    progress = Progress("old", "new", Phase.WATCHING, 10, NOW, "slow", True, ("decode-2x4bz",))
    assert progress_in({"status": {"cohort": progress_status(progress)}}) == progress
    assert progress_in({"status": {"cohort": progress_status(Progress("a"))}}) == Progress("a")
    for room, is_late in (None, False), (Room(0, 1), True):
        watch = ReadyWatch("decode-2x4bz", 1, NOW, room, "decode-9k2dd", is_late)
        assert watch_in({"status": {"rollout": watch_status(watch)}}) == watch
    assert progress_in({}) is None
    assert watch_in({"status": {}}) is None
