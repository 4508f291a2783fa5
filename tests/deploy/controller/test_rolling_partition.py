"""What a partition keeps: the version that served before, whatever else there is of the pool."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.api.worker_pool import Rollout
from deploy.controller.cluster_status import Refusals, cluster_verdicts
from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.pool_status import pool_verdicts
from deploy.controller.revisions import cohort_of
from deploy.controller.rolling import Rolling, decide
from deploy.controller.rollout import ReadyWatch
from tests.deploy.controller.test_rolling import (
    BEFORE,
    NOW,
    OLD,
    SPEC,
    group,
    name_of,
    pods,
    served,
    view,
)

CANARY = SPEC | {"logLevel": "warning"}
THIRD = SPEC | {"logLevel": "error"}
OLD_CANARY = OLD | {"logLevel": "warning"}
KEEPS = Rollout(partition=3)
ROUTERS = {"status": {"readyReplicas": 2}}


@dataclass
class Pool:
    """Whatever is decided of it comes to be. The spec asks for `SPEC`."""

    workers: list[tuple[dict[str, Any], int]]
    """Of each version there is a group of, all live but for `down`."""
    watch: ReadyWatch | None
    progress: Progress | None = None
    rollout: Rollout = KEEPS
    seen: list[dict[str, int]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """Of its progress."""
    of_cluster: list[str] = field(default_factory=list)
    down: dict[str, int] = field(default_factory=dict)
    is_settled: bool = True
    now: datetime.datetime = NOW

    def look(self, replicas: int) -> Rolling:
        groups = [group(spec, size) for spec, size in self.workers]
        there = [pod for spec, size in self.workers for pod in pods(spec, size)]
        fleet = {
            name_of(spec): served(spec, size, max(0, size - self.down.get(name_of(spec), 0)))
            for spec, size in self.workers
        }
        wanted = {"replicas": replicas, "rollout": self.rollout}
        cluster = view(fleet, groups, there, is_settled=self.is_settled, **wanted)
        watches = {} if self.watch is None else {"decode": self.watch}
        rolling = decide(cluster, self.progress, watches, None, self.now)
        self.watch, self.progress = rolling.pools["decode"].watch, rolling.progress
        told = pool_verdicts(cluster.pools["decode"], rolling.pools["decode"], "")
        self.told.append(told[1].reason)
        of_all = cluster_verdicts(cluster, rolling, ROUTERS, Refusals())
        self.of_cluster.append(of_all[1].reason)
        self.now += datetime.timedelta(seconds=5)
        specs = {name_of(spec): spec for spec, _ in [*self.workers, (SPEC, 0)]}
        self.workers = [
            (specs[name], size)
            for name, size in rolling.sizes.items()
            if size or name in rolling.kept
        ]
        self.seen.append(self.serves)
        return rolling

    @property
    def serves(self) -> dict[str, int]:
        return {name_of(spec): size for spec, size in self.workers if size}

    def settle(self, replicas: int = 4) -> dict[str, int]:
        for _ in range(12):
            self.look(replicas)
        assert self.seen[-1] == self.seen[-2], "it comes to rest"
        return self.serves


def canary(*others: tuple[dict[str, Any], int]) -> Pool:
    """Three workers of the version before, and one that was tried, and was live."""
    watch = ReadyWatch(name_of(CANARY), 1, instead=name_of(BEFORE))
    return Pool([(BEFORE, 3), (CANARY, 1), *others], watch)


@pytest.mark.parametrize("stops", [False, True])
def test_another_canary_takes_the_place_of_the_first_also_after_a_time_at_zero(stops: bool) -> None:
    pool = canary()
    if stops:
        pool.workers = [(BEFORE, 0), (CANARY, 0)]
        pool.settle(replicas=0)
    assert pool.settle() == {name_of(BEFORE): 3, name_of(SPEC): 1}


def test_a_canary_that_is_given_up_goes_and_grows_no_more() -> None:
    watch = ReadyWatch(name_of(CANARY), 1, instead=name_of(SPEC))
    pool = Pool([(SPEC, 3), (CANARY, 1)], watch)
    assert pool.settle() == {name_of(SPEC): 4}
    assert "Partitioned" not in pool.told
    assert max(sizes.get(name_of(CANARY), 0) for sizes in pool.seen) == 1


def test_a_first_version_that_never_served_is_kept_by_no_partition() -> None:
    pool = Pool([(BEFORE, 4)], ReadyWatch(name_of(BEFORE)))
    pool.down = {name_of(BEFORE): 4}
    assert pool.settle() == {name_of(SPEC): 4}


def test_a_first_version_served_also_where_its_supervisor_has_only_just_begun_to_speak() -> None:
    watch = ReadyWatch(name_of(SPEC))
    pool = Pool([(SPEC, 4)], watch, is_settled=False)
    pool.look(4)
    assert pool.watch == ReadyWatch(name_of(SPEC), has_served=True)
    pool.watch, pool.workers = watch, [(BEFORE, 1), (SPEC, 3)]
    pool.look(4)
    assert pool.watch == watch


@pytest.mark.parametrize("instead", ["", name_of(CANARY)], ids=["the first", "one more"])
def test_what_served_alone_when_nobody_looked_is_what_a_partition_keeps(instead: str) -> None:
    watch = ReadyWatch(name_of(BEFORE), instead=instead)
    pool = Pool([(CANARY, 0), (BEFORE, 4)], watch)
    assert pool.settle() == {name_of(BEFORE): 3, name_of(SPEC): 1}
    assert pool.told[-1] == "Partitioned"


def test_where_what_served_before_is_gone_a_partition_keeps_what_serves() -> None:
    """A third version was asked for before the second one alone served."""
    watch = ReadyWatch(name_of(THIRD), 3, instead=name_of(BEFORE))
    pool = Pool([(CANARY, 2), (THIRD, 3)], watch)
    assert pool.settle() == {name_of(THIRD): 3, name_of(SPEC): 1}


def test_workers_that_a_partition_keeps_are_told_of_while_they_are_not_live() -> None:
    pool = canary()
    pool.workers, pool.watch = [(BEFORE, 3), (SPEC, 1)], None
    assert pool.settle() == {name_of(BEFORE): 3, name_of(SPEC): 1}
    pool.down = {name_of(BEFORE): 3}
    pool.look(4)
    assert pool.told[-2:] == ["Partitioned", "RollingOut"]


def test_a_former_canary_stands_in_for_no_worker_that_a_partition_keeps() -> None:
    pool = Pool([(BEFORE, 3), (CANARY, 1), (SPEC, 1)], canary().watch)
    pool.down = {name_of(BEFORE): 1}
    pool.look(4)
    assert (pool.told[-1], pool.of_cluster[-1]) == ("RollingOut", "RollingOut")
    pool.down = {}
    assert pool.settle() == {name_of(BEFORE): 3, name_of(SPEC): 1}
    assert (pool.told[-1], pool.of_cluster[-1]) == ("Partitioned", "AsWanted")


def test_a_partition_that_is_set_amid_a_rollout_keeps_what_is_left_of_the_version_before() -> None:
    pool = Pool([(BEFORE, 4)], ReadyWatch(name_of(BEFORE), 4, has_served=True), rollout=Rollout())
    for _ in range(2):
        pool.look(4)
    assert pool.serves[name_of(BEFORE)] < 4
    pool.rollout = Rollout(partition=2)
    assert pool.settle() == {name_of(BEFORE): 2, name_of(SPEC): 2}
    pool.rollout = Rollout()
    assert pool.settle() == {name_of(SPEC): 4}


def test_where_nothing_tells_how_far_it_was_a_partition_keeps_what_serves_most() -> None:
    pool = Pool([(BEFORE, 3), (SPEC, 1)], None)
    assert pool.settle() == {name_of(BEFORE): 3, name_of(SPEC): 1}
    assert (pool.told[-1], pool.of_cluster[-1]) == ("Partitioned", "AsWanted")
    pool = Pool([(BEFORE, 0), (SPEC, 0)], None)
    pool.settle(replicas=0)
    assert pool.settle() == {name_of(BEFORE): 3, name_of(SPEC): 1}


@pytest.mark.parametrize("told_first", [BEFORE, SPEC], ids=["before", "canary"])
@pytest.mark.parametrize("replicas", [0, 4])
def test_a_change_of_size_that_was_cut_off_between_two_versions_ends_no_partition(
    told_first: dict[str, Any], replicas: int
) -> None:
    """The supervisor is told of one after the other."""
    watch = ReadyWatch(name_of(SPEC), 1, instead=name_of(BEFORE))
    whole = {name_of(BEFORE): 3, name_of(SPEC): 1}
    is_told = {name_of(BEFORE): told_first is BEFORE, name_of(SPEC): told_first is SPEC}
    left = [
        (spec, whole[name_of(spec)] if is_told[name_of(spec)] is bool(replicas) else 0)
        for spec in (BEFORE, SPEC)
    ]
    pool = Pool(left, watch)
    pool.settle(replicas=replicas)
    assert pool.settle() == whole


RETURNED = Progress(serving=cohort_of(OLD), next=cohort_of(SPEC), phase=Phase.RETURNED)


@pytest.mark.parametrize(
    ("stable", "tried", "down"), [(3, 1, 0), (2, 2, 0), (2, 2, 1), (1, 3, 0), (0, 0, 0)]
)
def test_a_cohort_that_the_spec_does_not_name_goes_on_with_the_version_that_served_before(
    stable: int, tried: int, down: int
) -> None:
    watch = ReadyWatch(name_of(SPEC), instead=name_of(OLD))
    workers = [(OLD, stable), (OLD_CANARY, tried), (SPEC, 0)]
    pool = Pool(workers, watch, RETURNED)
    if not stable:
        pool.settle(replicas=0)
    pool.down = {name_of(OLD): down}
    pool.look(4)
    pool.down = {}
    pool.settle()
    assert pool.serves == {name_of(OLD): 4}, pool.seen
