"""One ServingCluster's revisions, as its supervisor and its RayCluster tell of them."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest

from deploy.api.read import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import Rollout, WorkerPoolSpec
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
from deploy.controller.rollout import ReadyWatch, RevisionState, Room
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


def cordoned(spec: dict[str, Any]) -> list[Pod]:
    return [dataclasses.replace(each, is_cordoned=True) for each in pods(spec, 2)]


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
    **pool: Any,
) -> ClusterView:
    """The spec asks for `SPEC`."""
    metadata = {"name": "main", "namespace": "models"}
    obj = {"kind": "ServingCluster", "metadata": metadata, "spec": SPEC}
    known = None if fleet is None else Fleet(fleet)
    by_name = {each["groupName"]: each for each in groups}
    made = pool_view(obj, {"metadata": {}}, pool_spec(**pool), by_name, there, known)
    spec = read_spec(ServingClusterSpec, obj)
    key = Key("models", "main")
    ray = {"spec": {"workerGroupSpecs": groups}}
    heard = Heard(known, is_settled=known is not None and is_settled)
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


def test_workers_on_a_cordoned_node_are_replaced_before_the_first_of_them_leaves() -> None:
    here = cordoned(SPEC)
    groups, name = [group(SPEC, 2)], name_of(SPEC)
    seen = view({name: served(SPEC, 2)}, groups, here)
    assert decided(seen).sizes == {name: 3}
    there = [*here, pods(SPEC, 3)[2]]
    seen = view({name: served(SPEC, 3)}, groups, there)
    rolling = decided(seen)
    assert rolling.sizes == {name: 3}
    leaving = rolling.pools["decode"].leaving
    size = group_size_of(seen, seen.pools["decode"], name, 3, leaving)
    assert (size.replicas, size.to_delete) == (2, (f"{name}-pod-0",))
    rolled = view({name_of(BEFORE): served(BEFORE, 2)}, [group(BEFORE, 2)], cordoned(BEFORE))
    assert decided(rolled).sizes == {name_of(BEFORE): 2, name: 1}  # a surge already
    unsettled = view({name: served(SPEC, 2)}, groups, here, is_settled=False)
    assert decided(unsettled).sizes == {name: 2}


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


def test_a_late_revision_stops_its_rollout_and_the_pool_says_why() -> None:
    groups, there = [group(BEFORE, 2), group(SPEC, 1)], [*pods(BEFORE, 2), *pods(SPEC, 1)]
    fleet = {name_of(BEFORE): served(BEFORE, 2), name_of(SPEC): served(SPEC, 1, num_live=0)}
    seen = view(fleet, groups, there)
    watches = {"decode": ReadyWatch(name_of(SPEC), 0, NOW)}
    rolling = decide(seen, None, watches, None, LATER)
    assert rolling.pools["decode"].is_stopped
    assert rolling.sizes == {name_of(BEFORE): 2, name_of(SPEC): 1}
    told = pool_verdicts(seen.pools["decode"], rolling.pools["decode"], "")
    assert [verdict.reason for verdict in told] == ["Live", "RolloutStopped", "Sound"]
    assert told[1].message.startswith(f"0 of 2 updated to {name_of(SPEC)}, and no more in 15m")


def serves_on(size: int, watch: ReadyWatch, now: datetime.datetime, **pool: Any) -> Rolling:
    """Of the former revision `size` workers serve; of the new one nothing is there."""
    fleet = {name_of(BEFORE): served(BEFORE, size), name_of(SPEC): served(SPEC, 0)}
    seen = view(fleet, [group(BEFORE, size), group(SPEC, 0)], pods(BEFORE, size), **pool)
    return decide(seen, None, {"decode": watch}, None, now)


def test_a_rollout_with_no_surge_stops_for_good_and_what_served_serves_again() -> None:
    shape = {"replicas": 3, "rollout": Rollout(max_surge=0, max_unavailable=1)}
    groups, there = [group(BEFORE, 2), group(SPEC, 1)], [*pods(BEFORE, 2), *pods(SPEC, 1)]
    fleet = {name_of(BEFORE): served(BEFORE, 2), name_of(SPEC): served(SPEC, 1, num_live=0)}
    watch, now = ReadyWatch(name_of(SPEC), 0, NOW), LATER
    rolling = decide(view(fleet, groups, there, **shape), None, {"decode": watch}, None, now)
    assert rolling.sizes == {name_of(BEFORE): 2, name_of(SPEC): 0}
    for size in 2, 3, 3, 3:
        now += datetime.timedelta(minutes=16)
        rolling = serves_on(size, rolling.pools["decode"].watch, now, **shape)
        assert rolling.pools["decode"].is_stopped
        assert rolling.sizes == {name_of(BEFORE): 3, name_of(SPEC): 0}
    shape["rollout"] = Rollout()
    rolling = serves_on(3, rolling.pools["decode"].watch, now, **shape)
    assert rolling.sizes == {name_of(BEFORE): 3, name_of(SPEC): 1}, (
        "where there is room it is tried"
    )


def test_a_rollout_that_stopped_for_want_of_room_goes_on_once_it_is_given_some() -> None:
    """The remedy that is told for a cluster with no GPU to spare."""
    groups, there = [group(BEFORE, 3), group(SPEC, 1)], [*pods(BEFORE, 3), *pods(SPEC, 1)]
    fleet = {name_of(BEFORE): served(BEFORE, 3), name_of(SPEC): served(SPEC, 1, num_live=0)}
    watches = {"decode": ReadyWatch(name_of(SPEC), 0, NOW)}
    rolling = decide(view(fleet, groups, there, replicas=3), None, watches, None, LATER)
    assert rolling.pools["decode"].is_stopped
    assert rolling.sizes == {name_of(BEFORE): 3, name_of(SPEC): 1}
    seen = view(fleet, groups, there, replicas=3, rollout=Rollout(max_surge=0, max_unavailable=1))
    kept = watch_in({"status": {"rollout": watch_status(rolling.pools["decode"].watch)}})
    assert kept is not None
    rolling = decide(seen, None, {"decode": kept}, None, LATER)
    assert not rolling.pools["decode"].is_stopped
    assert rolling.sizes == {name_of(BEFORE): 2, name_of(SPEC): 1}


def test_the_only_worker_comes_back_where_the_new_one_does_not_get_ready_in_its_place() -> None:
    shape = {"replicas": 1, "rollout": Rollout(max_surge=0, max_unavailable=1)}
    fleet = {name_of(BEFORE): served(BEFORE, 0), name_of(SPEC): served(SPEC, 1, num_live=0)}
    seen = view(fleet, [group(BEFORE, 0), group(SPEC, 1)], pods(SPEC, 1), **shape)
    watch = ReadyWatch(name_of(SPEC), 0, NOW)
    rolling = decide(seen, None, {"decode": watch}, None, NOW)
    assert rolling.sizes == {name_of(BEFORE): 0, name_of(SPEC): 1}
    assert rolling.kept == {name_of(BEFORE), name_of(SPEC)}
    rolling = decide(seen, None, {"decode": watch}, None, LATER)
    assert rolling.sizes == {name_of(BEFORE): 0, name_of(SPEC): 0}, "its pod is in the way"
    rolling = serves_on(0, rolling.pools["decode"].watch, LATER, **shape)
    assert rolling.sizes == {name_of(BEFORE): 1, name_of(SPEC): 0}
    rolling = serves_on(1, rolling.pools["decode"].watch, LATER, **shape)
    assert rolling.pools["decode"].is_stopped
    assert rolling.sizes == {name_of(BEFORE): 1, name_of(SPEC): 0}


def test_a_version_that_serves_is_known_still_when_its_pool_comes_back_from_zero() -> None:
    """The new one had not got ready when all went to zero."""
    rolling = serves_on(3, ReadyWatch(name_of(SPEC), 0, NOW), LATER, replicas=0)
    for _ in range(3):
        assert rolling.sizes == {name_of(BEFORE): 0, name_of(SPEC): 0}
        assert rolling.kept == {name_of(BEFORE), name_of(SPEC)}
        rolling = serves_on(0, rolling.pools["decode"].watch, LATER, replicas=0)
    assert not rolling.pools["decode"].is_stopped, "nobody waits for it"
    rolling = serves_on(0, rolling.pools["decode"].watch, LATER, replicas=3)
    assert rolling.pools["decode"].is_stopped
    assert rolling.sizes == {name_of(BEFORE): 3, name_of(SPEC): 1}


@pytest.mark.parametrize("level", ["info", "warning", "error"])  # whichever name is greater
def test_of_old_versions_of_a_pool_at_zero_the_one_that_served_is_known_still(level: str) -> None:
    never = SPEC | {"logLevel": level}
    watch = ReadyWatch(name_of(BEFORE), 2)
    watches = {"decode": watch.look(RevisionState(name_of(never), 0), 2, Room(1, 0), 60, NOW)}
    there = [BEFORE, never, SPEC]
    fleet = {name_of(spec): served(spec, 0) for spec in there}
    seen = view(fleet, [group(spec, 0) for spec in there], [], replicas=0)
    for _ in range(3):  # it takes some looks until the other one is gone
        rolling = decide(seen, None, watches, None, NOW)
        assert rolling.kept == {name_of(BEFORE), name_of(SPEC)}
        kept = watch_in({"status": {"rollout": watch_status(rolling.pools["decode"].watch)}})
        assert kept is not None
        watches = {"decode": kept}


def test_an_old_version_is_given_up_once_a_worker_of_the_new_one_was_live() -> None:
    fleet = {name_of(BEFORE): served(BEFORE, 0), name_of(SPEC): served(SPEC, 2, num_live=1)}
    seen = view(fleet, [group(BEFORE, 0), group(SPEC, 2)], pods(SPEC, 2))
    for now in NOW, LATER:
        rolling = decide(seen, None, {"decode": ReadyWatch(name_of(SPEC), 1, NOW)}, None, now)
        assert rolling.sizes == {name_of(BEFORE): 0, name_of(SPEC): 2}
        assert rolling.kept == {name_of(SPEC)}


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


def test_statuses_hold_all_that_an_operator_goes_on_from() -> None:
    progress = Progress("old", "new", Phase.WATCHING, 10, NOW, "slow", True, ("decode-2x4bz",))
    assert progress_in({"status": {"cohort": progress_status(progress)}}) == progress
    assert progress_in({"status": {"cohort": progress_status(Progress("a"))}}) == Progress("a")
    for room in None, Room(0, 1):
        watch = ReadyWatch("decode-2x4bz", 1, NOW, room, "decode-9k2dd")
        assert watch_in({"status": {"rollout": watch_status(watch)}}) == watch
    assert progress_in({}) is None
    assert watch_in({"status": {}}) is None
