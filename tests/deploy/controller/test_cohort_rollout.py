"""A change of cohort, step by step: who serves which share, and what takes it back."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.serving_cluster import CohortRollout
from deploy.controller.cohort_judgement import Figures, Watched
from deploy.controller.cohort_rollout import (
    CohortPool,
    Phase,
    Progress,
    Seen,
    advance,
    cohort_size,
    share,
    weights,
)

STEP_S = 300.0
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@dataclass
class World:
    """Pools whose workers get live one look after they were asked for."""

    replicas: tuple[int, ...] = (10, 4)
    rollout: CohortRollout = field(default_factory=CohortRollout)
    progress: Progress = field(default_factory=lambda: Progress("old"))
    live: list[dict[str, int]] = field(default_factory=list)
    figures: dict[str, Figures] | None = field(default_factory=dict)
    """None: nobody looks."""
    watched_s: float = 0.0
    now: datetime.datetime = START
    room: int = 1000
    """Pods that a pool has room for."""
    broken: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset({"decode-v1", "prefill-v1"})
    silent: frozenset[str] = frozenset()
    told: list[dict[str, int]] = field(default_factory=list)
    """Each division of requests, once."""

    def __post_init__(self) -> None:
        self.live = self.live or [{"old": count} for count in self.replicas]

    @property
    def seen(self) -> Seen:
        pools = [CohortPool(n, live) for n, live in zip(self.replicas, self.live, strict=True)]
        watched = None if self.figures is None else Watched(self.watched_s, self.figures)
        return Seen(pools, watched, self.unread, self.targets, self.silent)

    def look(self, wanted: str, seconds: float = 10.0) -> None:
        self.now += datetime.timedelta(seconds=seconds)
        self.watched_s += 0 if self.figures is None else seconds
        before = self.progress
        self.progress = advance(before, self.rollout, wanted, self.seen, STEP_S, self.now)
        self.watched_s = self.watched_s if self.progress == before else 0.0
        if self.told[-1:] != [weights(self.progress)]:
            self.told.append(weights(self.progress))
        is_alone = self.seen.is_gone(self.progress.serving)
        for count, live in zip(self.replicas, self.live, strict=True):
            wanted_of = {
                cohort: cohort_size(self.progress, self.rollout, cohort, count, is_alone=is_alone)
                for cohort in {*live, self.progress.serving, self.progress.next} - {""}
            }
            live |= {cohort: min(live.get(cohort, 0), size) for cohort, size in wanted_of.items()}
            for cohort in sorted(wanted_of.keys() - self.broken):
                free = self.room - sum(live.values())
                live[cohort] += min(wanted_of[cohort] - live[cohort], free)

    def look_until(self, phase: Phase, wanted: str = "new") -> None:
        for _ in range(1000):
            self.look(wanted)
            if self.progress.phase is phase:
                return
        raise AssertionError(f"never {phase}: {self.progress}")


def test_requests_go_over_by_the_steps_each_watched_for_its_time() -> None:
    world = World()
    world.look_until(Phase.WATCHING)
    began = world.now
    world.look_until(Phase.SERVING)
    assert [told.get("new", 0) for told in world.told] == [0, 1, 10, 50, 100, 100]
    assert world.progress == Progress("new")
    assert (world.now - began).total_seconds() >= 4 * STEP_S
    assert world.live == [{"old": 0, "new": 10}, {"old": 0, "new": 4}]


def test_no_share_goes_over_while_a_router_has_not_read_the_new_one_s_text() -> None:
    world = World(unread=frozenset({"new"}))
    for _ in range(50):
        world.look("new")
    assert world.progress.phase is Phase.GROWING
    assert [told.get("new", 0) for told in world.told] == [0]
    world.unread = frozenset()
    world.look_until(Phase.WATCHING)
    world.unread = frozenset({"new"})  # a router that has just started
    for _ in range(50):
        world.look("new", STEP_S)
    assert (world.progress.phase, world.progress.weight) == (Phase.GROWING, 1)


def test_nothing_is_waited_for_where_nothing_else_serves() -> None:
    world = World(live=[{"old": 0}, {"old": 0}], broken=frozenset({"old"}))
    world.unread = frozenset({"new"})
    world.look_until(Phase.SERVING)
    assert world.progress == Progress("new")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.data())
@settings(max_examples=15, deadline=None)
def test_whoever_has_a_share_has_the_workers_for_it_at_every_look(
    replicas: list[int], data: st.DataObject
) -> None:
    """Whatever the spec names meanwhile; and in the end what it names serves alone."""
    world = World(tuple(replicas))
    for _ in range(data.draw(st.integers(1, 8))):
        wanted = data.draw(st.sampled_from(["old", "new", "third"]))
        for _ in range(data.draw(st.integers(1, 70))):
            world.look(wanted)
            for cohort, percent in weights(world.progress).items():
                if not world.progress.is_fault:
                    assert world.seen.is_sized(cohort, percent)
    world.look_until(Phase.SERVING, "new")
    assert world.live == [
        {cohort: n if cohort == "new" else 0 for cohort in live}
        for n, live in zip(replicas, world.live, strict=True)
    ]


def test_failures_take_the_share_back_at_once_and_nothing_is_tried_again() -> None:
    world = World()
    while world.progress.weight < 10:
        world.look("new")
    world.figures = {"new": Figures(200.0, 3.0), "old": Figures(2000.0, 0.0)}
    world.look("new")
    assert weights(world.progress) == {"old": 100, "new": 0}
    assert world.progress.reason.startswith("1.5% of its requests failed at a share of 10%")
    world.look_until(Phase.RETURNED)
    world.figures = {}
    for _ in range(100):
        world.look("new")
    assert world.live[0] == {"old": 10, "new": 0}
    assert "failed" in world.progress.reason
    world.look("old")
    assert world.progress == Progress("old")
    world.look_until(Phase.SERVING, "new")
    assert world.progress.serving == "new", "the spec has changed: it is tried again"


def taken_back() -> World:
    world = watched(10, Figures(200.0, 100.0), Figures(2000.0, 0.0))
    world.look_until(Phase.RETURNED)
    world.figures = {}
    return world


def test_a_cohort_that_was_taken_back_is_tried_again_once_its_workers_are_to_be_others() -> None:
    """As of an image or a setting that was at fault, and no part of what the cohort is."""
    world = taken_back()
    world.look("new")
    assert world.progress.phase is Phase.RETURNED
    world.targets = frozenset({"decode-v2", "prefill-v1"})
    world.look("new")
    assert world.progress == Progress("old", "new", Phase.GROWING)
    world.look_until(Phase.SERVING)
    assert world.progress == Progress("new")


def test_what_changes_while_a_cohort_is_taken_back_is_tried_as_well() -> None:
    world = watched(10, Figures(200.0, 100.0), Figures(2000.0, 0.0))
    assert world.progress.phase is Phase.RETURNING
    world.targets = frozenset({"decode-v2", "prefill-v2"})
    world.figures = {}
    world.look_until(Phase.SERVING)
    assert world.progress == Progress("new")


def test_another_pool_or_one_less_is_no_other_try() -> None:
    world = taken_back()
    for targets in {"decode-v1", "prefill-v1", "more-v1"}, {"decode-v1"}, {"decode-v1", "more-v1"}:
        world.targets = frozenset(targets)
        world.look("new")
        assert world.progress.phase is Phase.RETURNED


def test_one_that_an_operator_took_back_who_noted_no_versions_stays_so() -> None:
    world = taken_back()
    world.progress = replace(world.progress, tried=())
    world.look("new")
    assert world.progress.phase is Phase.RETURNED
    assert world.progress.tried == ("decode-v1", "prefill-v1")
    world.targets = frozenset({"decode-v2", "prefill-v2"})
    world.look("new")
    assert world.progress.phase is Phase.GROWING


def watched(weight: int, new: Figures, old: Figures) -> World:
    """One look after what was seen of a step with this share."""
    world = World()
    while world.progress.weight < weight:
        world.look("new")
    world.figures = {"new": new, "old": old}
    world.look("new")
    return world


def test_failures_that_the_old_version_has_as_well_take_nothing_back() -> None:
    """As of a client that gives requests no time to be served."""
    for new, old in ((200.0, 60.0), (2000.0, 600.0)), ((200.0, 70.0), (2000.0, 600.0)):
        world = watched(10, Figures(*new), Figures(*old))
        assert weights(world.progress)["new"] == 10
    world.look_until(Phase.SERVING)
    assert world.progress == Progress("new")


def test_failures_beyond_those_of_the_old_version_take_the_share_back() -> None:
    world = watched(10, Figures(200.0, 100.0), Figures(2000.0, 600.0))
    assert weights(world.progress)["new"] == 0
    assert world.progress.reason == (
        "50.0% of its requests failed at a share of 10%, 30.0% of the old one's: "
        "maxErrorPercent is 1"
    )


def test_so_few_requests_that_failures_may_be_chance_take_nothing_back_and_are_waited_for() -> None:
    world = watched(10, Figures(2.0, 1.0), Figures(40.0, 0.0))
    for _ in range(100):
        world.look("new")
        assert world.progress.phase is Phase.WATCHING
        assert world.progress.weight == 10
    world.figures = {"new": Figures(10.0, 1.0), "old": Figures(200.0, 0.0)}
    world.look("new")
    assert world.progress.phase is Phase.GROWING, "one failure of ten is no rate"


def test_a_version_that_fails_all_of_a_few_requests_is_taken_back() -> None:
    world = watched(10, Figures(9.0, 9.0), Figures(90.0, 0.0))
    assert world.progress.weight == 10
    world.figures = {"new": Figures(10.0, 10.0), "old": Figures(100.0, 0.0)}
    world.look("new")
    assert world.progress.reason.startswith("100.0% of its requests failed")


def test_where_nothing_was_seen_of_the_old_version_failures_count_by_themselves() -> None:
    world = watched(100, Figures(100.0, 5.0), Figures())
    assert world.progress.reason.startswith("5.0% of its requests failed at a share of 100%")


def test_slow_tokens_take_the_share_back_and_equal_ones_do_not() -> None:
    world = World()
    world.figures = {"new": Figures(9.0, 0.0, 0.029), "old": Figures(900.0, 0.0, 0.02)}
    world.look_until(Phase.WATCHING)
    world.look("new")
    assert weights(world.progress)["new"] == 1
    world.figures |= {"new": Figures(9.0, 0.0, 0.031)}
    for _ in range(100):  # its first requests may be slow: no more than that the step is not over
        world.look("new")
    assert weights(world.progress)["new"] == 1
    world.figures |= {"new": Figures(10.0, 0.0, 0.031)}
    world.look("new")
    assert weights(world.progress)["new"] == 0
    assert world.progress.reason.startswith("31.0 ms between its tokens, 20.0 ms")


def test_tokens_slower_than_the_old_ones_were_are_in_doubt_until_the_old_version_has_requests() -> (
    None
):
    """Requests of a slow version last: for a while all that run may be its."""
    world = World()
    old = Figures(900.0, 0.0, itl_before_s=0.02)
    world.figures = {"new": Figures(0.0, 0.0, 0.9), "old": old}
    world.look_until(Phase.WATCHING)
    for _ in range(100):
        world.look("new")
    assert weights(world.progress)["new"] == 1
    world.figures |= {"new": Figures(10.0, 0.0, 0.9)}
    world.look("new")
    assert weights(world.progress)["new"] == 1, "the load may be another one"
    world.figures |= {"old": Figures(900.0, 0.0, 0.4)}
    world.look("new")
    assert world.progress.reason.startswith("900.0 ms between its tokens, 400.0 ms")


def test_no_step_is_over_before_it_was_watched_for_its_time() -> None:
    """Also where no operator ran meanwhile."""
    world = World(figures=None)
    world.look_until(Phase.WATCHING)
    world.look("new", seconds=2 * STEP_S)
    world.figures = {}
    world.look("new", seconds=STEP_S - 1)
    assert world.progress.phase is Phase.WATCHING
    world.look("new", seconds=1)
    assert world.progress.phase is Phase.GROWING


def test_a_cohort_that_does_not_get_live_gets_no_request() -> None:
    world = World(broken=frozenset({"new"}))
    for _ in range(100):
        world.look("new")
    assert world.told == [{"old": 100, "new": 0}]
    assert world.live[0]["old"] == 10
    world.look("old")
    world.look("old")
    assert world.progress == Progress("old")


def test_a_version_that_never_served_is_not_gone_away_from_in_steps() -> None:
    world = World(live=[{"old": 0}, {"old": 0}], broken=frozenset({"old"}))
    world.look_until(Phase.WATCHING)
    assert world.progress.weight == 100
    assert world.live == [{"old": 0, "new": 10}, {"old": 0, "new": 4}]


def test_the_last_step_keeps_the_old_workers_until_it_has_been_watched() -> None:
    world = World()
    while world.progress.weight < 100:
        world.look("new")
    world.look("new")
    assert world.live[0] == {"old": 5, "new": 10}
    world.look_until(Phase.SERVING)
    assert world.live[0] == {"old": 0, "new": 10}


def test_a_share_has_a_worker_at_least_where_the_pool_has_any() -> None:
    assert [share(10, 1), share(10, 50), share(3, 50), share(0, 100), share(5, 0)] == [
        *(1, 5, 2),
        *(0, 0),
    ]
