"""A rollout whose newest version does not get ready: what served before serves on, or again."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from deploy.api.worker_pool import Rollout
from deploy.controller.pool_status import pool_verdicts
from deploy.controller.rolling import Rolling, decide
from deploy.controller.rolling_status import watch_in, watch_status
from deploy.controller.rollout import ReadyWatch, RevisionState, Room
from tests.deploy.controller.test_rolling import (
    BEFORE,
    LATER,
    NOW,
    SPEC,
    group,
    name_of,
    pods,
    served,
    view,
)


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


def test_a_version_that_was_just_asked_for_is_not_stopped_because_the_one_before_was_late() -> None:
    """Its own watch begins once the supervisor has spoken long enough."""
    late = ReadyWatch(name_of(BEFORE), 2, is_late=True)
    groups, fleet = [group(BEFORE, 2)], {name_of(BEFORE): served(BEFORE, 2, num_live=1)}
    seen = view(fleet, groups, pods(BEFORE, 2), is_settled=False)
    rolling = decide(seen, None, {"decode": late}, None, LATER)
    assert not rolling.pools["decode"].is_stopped
    told = pool_verdicts(seen.pools["decode"], rolling.pools["decode"], "")
    assert told[1].reason == "RollingOut"


def restarted(rolling: Rolling) -> dict[str, ReadyWatch]:
    """What another operator goes on from."""
    kept = watch_in({"status": {"rollout": watch_status(rolling.pools["decode"].watch)}})
    assert kept is not None
    return {"decode": kept}


def test_while_the_supervisor_is_silent_nobody_is_late() -> None:
    shape: dict[str, Any] = {"rollout": Rollout(max_surge=0, max_unavailable=1)}
    groups, there = [group(BEFORE, 1), group(SPEC, 1)], [*pods(BEFORE, 1), *pods(SPEC, 1)]
    fleet = {name_of(BEFORE): served(BEFORE, 1), name_of(SPEC): served(SPEC, 1, num_live=0)}
    speaks = view(fleet, groups, there, **shape)
    silent = view(None, groups, there, **shape)
    begins = view(fleet, groups, there, is_settled=False, **shape)
    minute, watches = datetime.timedelta(minutes=1), {"decode": ReadyWatch(name_of(BEFORE), 2)}
    for after, seen in (0, speaks), (1, silent), (17, begins), (18, speaks), (33, speaks):
        rolling = decide(seen, None, watches, None, NOW + after * minute)
        assert not rolling.pools["decode"].is_stopped
        assert rolling.sizes == {name_of(BEFORE): 1, name_of(SPEC): 1}
        watches = restarted(rolling)
    for after, seen in (34, speaks), (35, begins), (90, begins), (91, speaks):
        rolling = decide(seen, None, watches, None, NOW + after * minute)
        assert rolling.pools["decode"].is_stopped, "so it stays"
        watches = restarted(rolling)


def test_a_rollout_that_stopped_goes_on_once_what_it_had_lost_is_back_and_stays() -> None:
    groups, there = [group(BEFORE, 3), group(SPEC, 2)], [*pods(BEFORE, 3), *pods(SPEC, 2)]
    fleet = {name_of(BEFORE): served(BEFORE, 3), name_of(SPEC): served(SPEC, 2, num_live=1)}
    seen, now = view(fleet, groups, there, replicas=4), LATER
    rolling = decide(seen, None, {"decode": ReadyWatch(name_of(SPEC), 2, NOW)}, None, now)
    fleet[name_of(SPEC)] = served(SPEC, 2)
    seen, sizes = view(fleet, groups, there, replicas=4), []
    for _ in range(3):
        assert rolling.pools["decode"].is_stopped
        now += datetime.timedelta(minutes=8)
        rolling = decide(seen, None, restarted(rolling), None, now)
        sizes.append(rolling.sizes[name_of(BEFORE)])
    assert sizes == [3, 3, 2], "only what has stayed for its readyTimeout is counted on"


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
    watch = ReadyWatch(name_of(BEFORE), 2, has_served=True)
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
