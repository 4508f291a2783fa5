"""A pool's rollout, step by step: a small world of workers that start, serve and drain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.worker_pool import Rollout
from deploy.controller.rollout import Aim, RevisionState, next_sizes

UNSTEADY = 400  # more looks than any rollout of these sizes takes


@dataclass
class World:
    """Each worker takes a look or more to get live, and to leave."""

    replicas: int
    rollout: Rollout
    target: str = "a"
    broken: frozenset[str] = frozenset()
    takes: Callable[[], int] = lambda: 1
    sizes: dict[str, int] = field(default_factory=dict)
    starting: dict[tuple[str, int], int] = field(default_factory=dict)
    live: set[tuple[str, int]] = field(default_factory=set)
    draining: dict[tuple[str, int], int] = field(default_factory=dict)
    is_stopped: bool = False
    is_steady: bool = False

    def states(self) -> list[RevisionState]:
        return [
            RevisionState(
                name,
                size,
                frozenset(index for of, index in self.live if of == name),
                self.pods_of(name),
            )
            for name, size in self.sizes.items()
        ]

    def pods_of(self, name: str) -> int:
        """A new worker waits for the pod of one that still drains, where there is no more room."""
        return max(self.sizes[name], sum(at[0] == name for at in (*self.live, *self.draining)))

    @property
    def num_pods(self) -> int:
        return sum(map(self.pods_of, self.sizes))

    def look(self) -> None:
        self.sizes = next_sizes(
            self.replicas,
            Aim(self.target, self.rollout),
            self.states(),
            is_stopped=self.is_stopped,
            is_steady=self.is_steady,
        )
        wanted = self.wanted()
        for at in sorted(self.live - wanted):
            self.live.remove(at)
            self.draining[at] = self.takes()
        for at in sorted(self.starting.keys() - wanted):
            del self.starting[at]
        for at in sorted(wanted - self.live - self.starting.keys() - self.draining.keys()):
            self.starting[at] = self.takes()

    def wanted(self) -> set[tuple[str, int]]:
        return {(name, index) for name, size in self.sizes.items() for index in range(size)}

    def wait(self) -> None:
        self.draining = {at: left - 1 for at, left in self.draining.items() if left > 1}
        for name in self.sizes:
            free = self.pods_of(name) - sum(at[0] == name for at in (*self.live, *self.draining))
            for at in sorted(at for at in self.starting if at[0] == name)[:free]:
                self.starting[at] -= 1
                if self.starting[at] <= 0 and name not in self.broken:
                    del self.starting[at]
                    self.live.add(at)

    def settle(self) -> None:
        for _ in range(UNSTEADY):
            before = (dict(self.sizes), set(self.live), self.num_pods)
            self.look()
            self.wait()
            coming = [at for at in self.wanted() - self.live if at[0] not in self.broken]
            if before == (self.sizes, self.live, self.num_pods) and not (self.draining or coming):
                return
        raise AssertionError(f"still moving: {self}")

    def serves(self) -> dict[str, int]:
        names = [name for name, _ in self.live]
        return {name: names.count(name) for name in sorted(set(names))}


def rolled(replicas: int, rollout: Rollout) -> World:
    world = World(replicas, rollout)
    world.settle()
    assert world.serves() == ({"a": replicas} if replicas else {})
    return world


rollouts = st.builds(
    Rollout,
    max_surge=st.integers(0, 3),
    max_unavailable=st.integers(1, 3),
) | st.builds(Rollout, max_surge=st.integers(1, 3), max_unavailable=st.just(0))


@given(st.data(), st.integers(1, 6), rollouts)
@settings(max_examples=30, deadline=None)
def test_a_rollout_converges_and_keeps_what_was_promised_at_every_look(
    data: st.DataObject, replicas: int, rollout: Rollout
) -> None:
    world = rolled(replicas, rollout)
    world.takes = lambda: data.draw(st.integers(1, 3))
    world.target = "b"
    for _ in range(UNSTEADY):
        world.look()
        assert len(world.live) >= replicas - rollout.max_unavailable
        assert world.num_pods <= replicas + rollout.max_surge
        world.wait()
        assert len(world.live) >= replicas - rollout.max_unavailable
        if world.serves() == {"b": replicas} and not world.draining:
            break
    assert world.serves() == {"b": replicas}
    assert world.sizes == {"a": 0, "b": replicas}


@given(st.data(), st.integers(1, 5), rollouts)
@settings(max_examples=30, deadline=None)
def test_whatever_version_and_size_are_asked_for_meanwhile_the_last_ones_come_to_be(
    data: st.DataObject, replicas: int, rollout: Rollout
) -> None:
    world = rolled(replicas, rollout)
    world.takes = lambda: data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 12))):
        world.target = data.draw(st.sampled_from(["a", "b", "c"]))
        world.replicas = data.draw(st.integers(0, 5))
        most_before = world.num_pods
        live_before = len(world.live)
        world.look()
        floor = world.replicas - rollout.max_unavailable
        olds = [n for n, size in world.sizes.items() if n != world.target and size]
        if olds:  # else a pool's ordinary size, which whoever scales it sets
            assert len(world.live) >= min(live_before, floor)
        assert world.num_pods <= max(most_before, world.replicas + rollout.max_surge)
        world.wait()
    world.settle()
    assert world.serves() == ({world.target: world.replicas} if world.replicas else {})


@given(st.integers(4, 6), rollouts, st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_a_stopped_rollout_takes_nothing_old_away_and_old_workers_follow_the_pools_size(
    replicas: int, rollout: Rollout, then: int
) -> None:
    world = rolled(replicas, rollout)
    world.target, world.broken = "b", frozenset({"b"})
    world.settle()
    serving = world.serves().get("a", 0)
    assert serving >= replicas - rollout.max_unavailable
    world.is_stopped = True
    world.settle()
    assert world.serves().get("a", 0) >= serving
    world.replicas = then
    world.settle()
    assert world.serves().get("a", 0) >= then - rollout.max_unavailable
    assert world.serves().get("a", 0) <= then
    world.target, world.is_stopped = "a", False  # kubectl apply of the old spec
    world.settle()
    assert world.serves() == ({"a": then} if then else {})


def stopped_with_some_live(rollout: Rollout) -> World:
    """Of the new version's workers the second does not get live."""
    world = rolled(3, rollout)
    world.target = "b"
    while ("b", 0) not in world.live:
        world.look()
        world.wait()
    world.broken = frozenset({"b"})
    world.settle()
    world.is_stopped = True
    world.settle()
    assert world.serves() == {"a": 2, "b": 1}
    return world


def test_a_stopped_rollout_follows_the_pools_size_with_what_is_live_of_the_new_version() -> None:
    world = stopped_with_some_live(Rollout())
    for replicas, sizes in (2, {"a": 1, "b": 2}), (3, {"a": 2, "b": 2}), (5, {"a": 4, "b": 2}):
        world.replicas = replicas
        world.settle()
        assert world.sizes == sizes, "one more of the new ones is tried"
        assert world.serves() == {"a": replicas - 1, "b": 1}


def test_a_stopped_rollout_is_tried_with_one_more_where_there_is_room() -> None:
    world = stopped_with_some_live(Rollout(max_surge=0, max_unavailable=1))
    assert world.sizes == {"a": 2, "b": 1}
    world.rollout = Rollout()
    world.settle()
    assert world.sizes == {"a": 2, "b": 2}


def test_a_worker_that_comes_and_goes_takes_no_old_one_away_from_a_stopped_rollout() -> None:
    world = stopped_with_some_live(Rollout())
    world.live.remove(("b", 0))
    world.settle()
    assert world.serves() == {"a": 3}
    world.live.add(("b", 0))
    world.settle()
    assert world.serves() == {"a": 3, "b": 1}


def test_a_stopped_rollout_goes_on_once_the_workers_that_it_had_lost_have_stayed() -> None:
    """Two of four are new when one of them, and the room for a third, is lost for too long."""
    world = rolled(4, Rollout())
    world.target = "b"
    while world.serves().get("b", 0) < 2:
        world.look()
        world.wait()
    world.broken = frozenset({"b"})
    world.settle()
    world.live.remove(("b", 1))
    world.is_stopped = True
    world.settle()
    assert world.sizes == {"a": 3, "b": 2}
    assert world.serves() == {"a": 3, "b": 1}
    world.broken = frozenset()
    world.settle()
    assert world.serves() == {"a": 3, "b": 2}, "they may go again"
    world.is_steady, world.broken = True, frozenset({"b"})
    world.settle()
    assert world.sizes == {"a": 2, "b": 3}, "one more is tried"
    assert world.serves() == {"a": 2, "b": 2}
    world.is_steady = False
    world.settle()
    assert world.sizes == {"a": 2, "b": 3}
    world.broken, world.is_stopped = frozenset(), False
    world.settle()
    assert world.serves() == {"b": 4}


@given(rollouts, st.integers(2, 6), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_stopped_rollout_that_stays_steady_takes_no_more_than_it_may_and_comes_to_rest(
    rollout: Rollout, replicas: int, num_new: int
) -> None:
    world = rolled(replicas, rollout)
    world.target = "b"
    while world.serves().get("b", 0) < min(num_new, replicas):
        world.look()
        world.wait()
    world.broken, world.is_stopped, world.is_steady = frozenset({"b"}), True, True
    least = min(len(world.live), replicas)
    for _ in range(UNSTEADY):
        world.look()
        assert len(world.live) >= min(least, replicas - rollout.max_unavailable)
        world.wait()
    world.settle()
    assert len(world.live) >= replicas - rollout.max_unavailable


def test_rolling_back_uses_the_old_workers_that_still_run() -> None:
    world = rolled(3, Rollout())
    kept = ("a", 0)
    world.target = "b"
    while ("a", 2) in world.live:
        world.look()
        world.wait()
    world.target = "a"
    while world.serves() != {"a": 3}:
        assert kept in world.live, "it was never started again"
        world.look()
        world.wait()


def test_a_third_version_first_takes_the_place_of_the_second_that_never_served() -> None:
    world = rolled(2, Rollout())
    world.target, world.broken = "b", frozenset({"b"})
    world.settle()
    assert world.serves() == {"a": 2}
    world.target = "c"
    world.settle()
    assert world.serves() == {"c": 2}


def test_an_old_worker_that_is_down_is_not_given_up_before_a_new_one_serves() -> None:
    states = [RevisionState("a", 2, frozenset({0}), 2), RevisionState("b", 1, frozenset(), 1)]
    assert next_sizes(2, Aim("b", Rollout()), states) == {"a": 2, "b": 1}
    states[1] = RevisionState("b", 1, frozenset({0}), 1)
    assert next_sizes(2, Aim("b", Rollout()), states) == {"a": 1, "b": 1}


def test_a_pool_of_one_revision_has_its_size_whatever_is_live() -> None:
    assert next_sizes(4, Aim("a", Rollout()), [RevisionState("a", 1)]) == {"a": 4}
    down = RevisionState("a", 4, frozenset({3}), 4)
    assert next_sizes(1, Aim("a", Rollout()), [down]) == {"a": 1}
