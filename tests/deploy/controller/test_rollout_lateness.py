"""How long the newest revision of a pool is waited for."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest

from deploy.controller.rollout import ReadyWatch, RevisionState, Room

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SURGE = Room(1, 0)


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


def asked(size: int, *live: int, name: str = "b") -> RevisionState:
    return RevisionState(name, size, frozenset(live), size)


def looked(
    watch: ReadyWatch,
    target: RevisionState,
    now: datetime.datetime,
    wanted: int = 2,
    room: Room = SURGE,
) -> ReadyWatch:
    """A minute is given to get ready."""
    return watch.look(target, wanted, room, 60, now)


def test_a_revision_is_late_when_nothing_more_of_it_gets_live_in_time() -> None:
    watch = looked(ReadyWatch("a"), asked(2), at(0))
    assert not looked(watch, asked(2), at(60)).is_late
    assert looked(watch, asked(2), at(61)).is_late
    watch = looked(watch, asked(2, 0), at(50))
    assert not looked(watch, asked(2, 0), at(100)).is_late, "one more is live: the time runs anew"
    assert looked(watch, asked(2, 0), at(111)).is_late
    whole = looked(watch, asked(2, 0, 1), at(112))
    assert not looked(whole, asked(2, 0, 1), at(9999)).is_late


def test_a_worker_that_comes_and_goes_is_no_progress() -> None:
    watch = ReadyWatch("b")
    for second in range(0, 100, 2):
        watch = looked(watch, asked(2, 0), at(second))
        watch = looked(watch, asked(2), at(second + 1))
    assert watch.is_late


def test_another_revision_has_its_own_time() -> None:
    watch = looked(ReadyWatch("a"), asked(1), at(0))
    watch = looked(watch, asked(1, name="c"), at(100))
    assert not looked(watch, asked(1, name="c"), at(150)).is_late
    assert watch.revision == "c"


@pytest.mark.parametrize("size", [0, 1])
def test_what_is_complete_is_never_late(size: int) -> None:
    watch = looked(ReadyWatch("b"), asked(size, *range(size)), at(0))
    assert not looked(watch, asked(size, *range(size)), at(1000)).is_late


def test_time_in_which_nobody_tells_what_is_live_is_none_that_was_waited() -> None:
    waiting = looked(ReadyWatch("b"), asked(2, 0), at(0))
    heard_again = looked(waiting.unheard(), asked(2, 0), at(1000))
    assert not heard_again.is_late
    assert not looked(heard_again, asked(2, 0), at(1060)).is_late
    late = looked(heard_again, asked(2, 0), at(1061))
    assert late.is_late
    assert late.unheard().is_late
    assert looked(late.unheard(), asked(2, 0), at(2000)).is_late, "nothing has come of it"


def test_what_was_late_stays_late_when_it_is_asked_for_no_more_until_one_more_gets_live() -> None:
    watch = looked(ReadyWatch("b"), asked(1), at(0))
    for second in 61, 62, 10_000:
        watch = looked(watch, asked(0), at(second))
        assert watch.is_late
    for second in 10_001, 10_002:
        watch = looked(watch, asked(1), at(second))
        assert watch.is_late, "it is tried again"
    watch = looked(watch, asked(1, 0), at(10_003))
    assert not watch.is_late


def test_what_was_late_is_so_no_more_once_all_that_the_rollout_wants_are_live() -> None:
    watch = looked(ReadyWatch("b"), asked(3, 0, 1), at(0), wanted=3)
    assert looked(watch, asked(2, 0, 1), at(61), wanted=3).is_late
    assert not looked(watch, asked(2, 0, 1), at(61), wanted=2).is_late


def test_what_was_late_is_steady_once_all_that_is_left_of_it_has_been_live_for_a_while() -> None:
    watch = looked(ReadyWatch("b"), asked(3, 0, 1), at(0), wanted=4)
    for second in 70, 100, 140:  # one comes and goes
        watch = looked(watch, asked(2, 0), at(second), wanted=4)
        watch = looked(watch, asked(2, 0, 1), at(second + 5), wanted=4)
        assert watch.is_late
        assert not watch.is_steady(60, at(second + 5))
    watch = looked(watch, asked(2, 0, 1), at(200), wanted=4)
    assert not watch.is_steady(60, at(205))
    assert watch.is_steady(60, at(206))
    assert not watch.unheard().is_steady(60, at(206))
    assert not looked(watch, asked(3, 0, 1), at(206), wanted=4).is_steady(60, at(999))


def test_what_was_late_is_tried_anew_with_other_room() -> None:
    watch = looked(ReadyWatch("b"), asked(1), at(0))
    watch = looked(watch, asked(1), at(99))
    assert watch.is_late
    other = looked(watch, asked(1), at(100), room=Room(0, 1))
    assert not looked(other, asked(1), at(160), room=Room(0, 1)).is_late
    assert looked(other, asked(1), at(161), room=Room(0, 1)).is_late
    unnoted = replace(watch, room=None)  # of an operator that did not note it
    assert looked(unnoted, asked(1), at(161)).is_late


def test_what_served_before_is_told_until_the_new_one_serves_alone() -> None:
    watch = ReadyWatch("a", 2, has_served=True)
    for name, instead in ("b", "a"), ("c", "a"), ("a", ""), ("b", "a"):
        watch = looked(watch, asked(0, name=name), at(0))
        assert watch.instead == instead
    watch = looked(watch, asked(1, 0), at(1))
    assert watch.instead == "a", "some of it are left"
    assert looked(watch, asked(0, name="c"), at(2)).instead == "a"
    watch = watch.look(asked(2, 0, 1), 2, SURGE, 60, at(2)).alone()
    assert watch.instead == ""
    watch = watch.look(asked(0), 0, SURGE, 60, at(3))
    assert looked(watch, asked(0, name="c"), at(4)).instead == "b", "also from zero"


def test_what_never_served_is_nothing_to_keep() -> None:
    watch = ReadyWatch("a")
    for name in "a", "b", "c":
        watch = watch.look(asked(1, name=name), 2, SURGE, 60, at(0))
        assert watch.instead == ""


def test_a_revision_that_is_asked_for_no_more_in_time_does_not_wait() -> None:
    watch = looked(ReadyWatch("b"), asked(1), at(0))
    assert looked(watch, asked(0), at(60)).waiting_since is None
