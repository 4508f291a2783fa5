"""A change of cohort of which one side is no more: its versions live in the RayCluster alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.objects import Object
from deploy.controller.observed import Fleet, FleetPool, Heard
from deploy.controller.revisions import cohort_of, revision_of
from deploy.controller.rolling import Rolling, decide
from deploy.controller.view import ClusterView, PoolView, pool_view
from tests.deploy.controller.test_rolling import (
    NOW,
    OLD,
    SPEC,
    group,
    name_of,
    pods,
    pool_spec,
    served,
    view,
)

A, B = cohort_of(OLD), cohort_of(SPEC)
HALFWAY = [
    Progress(A, B, Phase.GROWING),
    Progress(A, B, Phase.WATCHING, 10, NOW),
    Progress(A, B, Phase.RETURNING, 10, None, "it failed", True),
    Progress(A, B, Phase.RETURNED, 0, None, "it failed", True, (name_of(SPEC),)),
    Progress(A),
]


def decided(seen: ClusterView, progress: Progress) -> Rolling:
    return decide(seen, progress, {}, None, NOW)


@pytest.mark.parametrize("progress", HALFWAY)
@pytest.mark.parametrize("fleet", [None, {}, {name_of(SPEC): FleetPool(0, ())}])
def test_what_the_spec_names_is_made_whole_where_the_serving_version_is_no_more(
    progress: Progress, fleet: dict[str, FleetPool] | None
) -> None:
    """As after the RayCluster was deleted, also where an operator has made it without workers."""
    for groups in [], [group(SPEC, 0)]:
        rolling = decided(view(fleet, groups, [], replicas=4), progress)
        assert rolling.progress == Progress(B)
        assert rolling.sizes == {name_of(SPEC): 4}
        assert rolling.weights == {B: 100}


@pytest.mark.parametrize("progress", HALFWAY[:-1])
def test_a_serving_version_of_which_only_the_group_is_left_is_not_given_up(
    progress: Progress,
) -> None:
    """Of a pool whose WorkerPool the API server has not told of, too."""
    for seen in (
        view(None, [group(OLD, 4)], [], replicas=4),
        view({}, [group(OLD, 0)], [], replicas=4, is_settled=False),
    ):
        assert decided(seen, progress).progress.serving == A
        assert decided(dataclasses.replace(seen, pools={}), progress).progress.serving == A


def test_of_what_is_left_the_version_that_serves_is_gone_on_with() -> None:
    """The serving one was of a pool alone that is no more, and the spec names a third."""
    third = SPEC | {"model": {"name": "models/third"}}
    seen = view({name_of(SPEC): served(SPEC, 2)}, [group(SPEC, 2)], pods(SPEC, 2))
    obj = {**seen.obj, "spec": third}
    made = seen.pools["decode"]
    assert seen.fleet is not None
    pool = pool_view(obj, made.obj, made.spec, seen.groups, made.pods, seen.heard)
    seen = dataclasses.replace(seen, obj=obj, pools={"decode": pool})
    rolling = decided(seen, Progress(A, B, Phase.WATCHING, 10, NOW))
    assert rolling.progress == Progress(B, cohort_of(third), Phase.GROWING)
    assert rolling.sizes[name_of(SPEC)] == 2


def beside(num_live: int, progress: Progress, *, is_going: bool) -> Rolling:
    """`decode` is new and has four workers of B wanted; A serves in `first` alone."""
    own = dataclasses.replace(pool_spec(replicas=2), pool="first")
    old = revision_of(OLD, "first", own)
    metadata = {
        "labels": {"baton.dev/pool": "first"},
        "annotations": {"baton.dev/cohort": A, "baton.dev/cluster-yaml": "{}"},
    }
    first: dict[str, Any] = {
        "groupName": old.name, "replicas": 2, "template": {"metadata": metadata}
    }  # fmt: skip
    seen = view({name_of(SPEC): served(SPEC, 1)}, [group(SPEC, 1), first], [], replicas=4)
    assert seen.fleet is not None
    places = served(OLD, 2, num_live).places
    fleet = Fleet({**seen.fleet.pools, old.name: FleetPool(2, places)})
    obj: Object = {"metadata": {"deletionTimestamp": "2026"} if is_going else {}}
    heard = Heard(fleet, is_settled=True)
    pool: PoolView = pool_view(seen.obj, obj, own, seen.groups, [], heard)
    pools = {"decode": seen.pools["decode"], "first": pool}
    return decided(dataclasses.replace(seen, pools=pools, heard=heard), progress)


def test_a_pool_newer_than_the_serving_version_holds_up_no_way_back_to_it() -> None:
    returning = Progress(A, B, Phase.RETURNING, 10, is_fault=True)
    assert beside(2, returning, is_going=False).weights == {A: 100, B: 0}


@pytest.mark.parametrize(("num_live", "is_going"), [(0, False), (2, True)])
def test_a_pool_newer_than_the_serving_version_does_not_pass_for_its_workers(
    num_live: int, is_going: bool
) -> None:
    """None of it serves elsewhere, or those that do are going: nothing is waited for."""
    rolling = beside(num_live, Progress(A, B, Phase.GROWING), is_going=is_going)
    assert rolling.sizes[name_of(SPEC)] == 4
