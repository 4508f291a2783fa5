"""A change of cohort whose spec names another version meanwhile: the ways back."""

from __future__ import annotations

from deploy.controller.cohort_judgement import Figures
from deploy.controller.cohort_rollout import Phase, Progress, weights
from tests.deploy.controller.test_cohort_rollout import STEP_S, World


def test_a_third_version_waits_until_the_old_workers_are_back() -> None:
    world = World()
    while world.progress.weight < 50:
        world.look("new")
    world.look("new")
    assert world.live[0]["old"] == 5
    world.look("third")
    assert weights(world.progress) == {"old": 50, "new": 50}
    world.look("third")
    assert (world.progress.serving, world.progress.next) == ("old", "third")
    assert world.live[0]["old"] == 10


def test_workers_that_come_back_take_the_room_of_those_whose_share_ends() -> None:
    world = World(replicas=(2,), room=3)
    while world.progress.weight < 100:
        world.look("new")
    world.look("new")
    assert world.live == [{"old": 1, "new": 2}]
    for _ in range(4):
        world.look("old")
        for cohort, percent in weights(world.progress).items():
            assert world.seen.is_sized(cohort, percent)
    assert world.progress == Progress("old")
    assert world.live == [{"old": 2, "new": 0}]
    assert world.told[-3:] == [{"old": 0, "new": 100}, {"old": 50, "new": 50}, {"old": 100}]


def gone(weight: int) -> World:
    """The old version cannot start any more, and the new one has this share."""
    world = World()
    while world.progress.weight < weight:
        world.look("new")
    world.live = [live | {"old": 0} for live in world.live]
    world.broken = frozenset({"old"})
    return world


def test_a_third_version_takes_over_from_the_second_where_nothing_of_the_first_serves() -> None:
    world = gone(100)
    world.look("third")
    world.look("third")
    assert world.progress == Progress("new", "third", Phase.GROWING)
    world.look_until(Phase.SERVING, "third")
    assert world.progress == Progress("third")
    assert all(told.get("old", 0) == 0 for told in world.told[-6:])


def test_a_way_back_to_a_version_of_which_nothing_serves_goes_by_steps_as_well() -> None:
    world = gone(100)
    for _ in range(20):
        world.look("old")
    assert world.progress == Progress("new", "old", Phase.GROWING)
    world.broken = frozenset()
    world.look_until(Phase.SERVING, "old")
    assert world.progress == Progress("old")


def test_a_few_seconds_of_silence_of_the_old_workers_end_no_way_back_to_them() -> None:
    world = World()
    while world.progress.weight < 10:
        world.look("new")
    world.look("new")
    before, world.live = world.live, [live | {"old": 0} for live in world.live]
    world.silent = frozenset({"old"})
    world.broken = frozenset({"old"})
    for _ in range(3):
        world.look("old")
        assert weights(world.progress) == {"old": 90, "new": 10}
        assert [live["new"] for live in world.live] == [1, 1]
    world.live, world.silent, world.broken = before, frozenset(), frozenset()
    world.look_until(Phase.SERVING, "old")
    assert world.progress == Progress("old")
    assert world.told[-1] == {"old": 100}


def test_a_version_left_alone_gets_the_workers_for_all_before_it_counts_as_the_old_one() -> None:
    world = gone(10)
    world.look("third")
    assert (world.progress.serving, world.progress.weight) == ("old", 10)
    assert [live["new"] for live in world.live] == [10, 4]
    world.look("third")
    assert world.progress == Progress("new", "third", Phase.GROWING)
    assert weights(world.progress) == {"new": 100, "third": 0}


def test_a_version_that_is_named_again_while_its_share_ends_goes_on_with_what_it_has() -> None:
    world = World()
    while world.progress.weight < 50:
        world.look("new")
    world.look("new")
    world.broken = frozenset({"old"})  # the workers that it is to have back do not come
    world.look("third")
    world.look("third")
    assert (world.progress.phase, world.progress.weight) == (Phase.RETURNING, 50)
    world.look("new")
    assert (world.progress.phase, world.progress.weight) == (Phase.WATCHING, 50)
    assert (world.progress.since, world.progress.reason) == (world.now, "")
    world.look("new", STEP_S - 1)
    assert world.progress.phase is Phase.WATCHING, "the step is watched anew"
    world.look("new", 1)
    assert world.progress.phase is Phase.GROWING


def test_failures_end_at_once_what_share_a_version_has_while_it_is_taken_back() -> None:
    world = World()
    while world.progress.weight < 50:
        world.look("new")
    world.look("new")
    world.broken = frozenset({"old"})  # no further worker of it comes
    world.figures = {"new": Figures(200.0, 180.0), "old": Figures(200.0, 0.0)}
    world.look("third")
    world.look("third")
    assert weights(world.progress)["old"] == 100
    assert (world.progress.serving, world.progress.next) == ("old", "third")
