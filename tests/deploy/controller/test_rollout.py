"""One unit that takes the place of another, whatever happens at which step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.controller.rollout import State, Step, UnitSeen, next_step
from deploy.controller.units import Unit


def unit(code: str, shared: str = "", **pools: str) -> Unit:
    return Unit(code, shared or code, pools or {"decode": "d"})


OLD, NEW = unit("bcdfg"), unit("hjkmn")


@pytest.mark.parametrize(
    ("wanted", "units", "num_left", "state", "code", "reason"),
    [
        (NEW, [], 0, State.MAKING, "hjkmn", "there is no unit: hjkmn is made"),
        (NEW, [], 2, State.ENDING, "", "2 pods of a former unit are left"),
        (NEW, [UnitSeen(NEW, 0)], 0, State.AS_WANTED, "hjkmn",
         "the unit is what the spec asks for"),
        (NEW, [UnitSeen(OLD, 3)], 0, State.DRAINING, "bcdfg",
         "the spec changes what all workers share: 3 worker pods of unit bcdfg drain"),
        (NEW, [UnitSeen(OLD, 0)], 0, State.ENDING, "bcdfg",
         "the spec changes what all workers share: unit bcdfg has no worker left"),
        (NEW, [UnitSeen(OLD, 3, is_ending=True)], 0, State.ENDING, "bcdfg",
         "the RayCluster of unit bcdfg is being deleted"),
        (NEW, [UnitSeen(NEW, 3, is_ending=True)], 0, State.ENDING, "hjkmn",
         "the RayCluster of unit hjkmn is being deleted"),
        (NEW, [UnitSeen(OLD, 1), UnitSeen(NEW, 1)], 0, State.DRAINING, "bcdfg",
         "the spec changes what all workers share: 1 worker pods of unit bcdfg drain"),
        (None, [UnitSeen(OLD, 3)], 0, State.DRAINING, "bcdfg",
         "the ServingCluster is deleted: 3 worker pods of unit bcdfg drain"),
        (None, [], 0, State.ENDING, "", "the ServingCluster is deleted, and no unit is left"),
    ],
)  # fmt: skip
def test_each_state_comes_of_what_is_seen_alone(
    wanted: Unit | None,
    units: list[UnitSeen],
    num_left: int,
    state: State,
    code: str,
    reason: str,
) -> None:
    assert next_step(wanted, units, num_left) == Step(state, code, reason)


def test_a_unit_stays_when_a_pool_comes_or_goes_and_drains_when_one_changes() -> None:
    seen = UnitSeen(unit("bcdfg", "s", prefill="p", decode="d"), 2)
    for pools in ({"decode": "d"}, {"prefill": "p", "decode": "d", "more": "m"}, {"more": "m"}):
        wanted = Unit("other", "s", pools)
        assert next_step(wanted, [seen], 0) == Step(
            State.AS_WANTED, "bcdfg", "the unit is what the spec asks for"
        )
    step = next_step(Unit("other", "s", {"prefill": "p", "decode": "x"}), [seen], 0)
    assert step.state is State.DRAINING
    assert step.reason.startswith("the spec changes decode: ")


@dataclass
class World:
    """What KubeRay and Kubernetes make of an operator's steps. Pods of a unit outlive its
    RayCluster; `making`: workers that a new unit gets."""

    wanted: Unit = OLD
    units: dict[str, UnitSeen] = field(default_factory=dict)
    left: int = 0
    making: int = 2
    served: list[str] = field(default_factory=list)

    def look(self) -> Step:
        """One look of an operator that knows nothing but what it sees."""
        step = next_step(self.wanted, list(self.units.values()), self.left)
        again = next_step(self.wanted, list(self.units.values()), self.left)
        assert step == again
        return step

    def act(self, step: Step) -> None:
        if step.state is State.MAKING:
            assert not self.units, "never two units"
            assert not self.left, "nor pods of another one"
            self.units[step.unit] = UnitSeen(self.wanted, self.making)
            self.served.append(step.unit)
        elif step.state is State.ENDING and step.unit:
            seen = self.units[step.unit]
            self.units[step.unit] = dataclasses.replace(seen, is_ending=True)

    def pass_time(self, step: Step) -> None:
        """A worker of a unit that drains ends; a RayCluster that is deleted goes, then its pods."""
        if self.left:
            self.left -= 1
        for code, seen in list(self.units.items()):
            if seen.is_ending:
                del self.units[code]
                self.left += seen.num_workers + 1
            elif step.state is State.DRAINING and step.unit == code and seen.num_workers:
                num = seen.num_workers - 1
                self.units[code] = dataclasses.replace(seen, num_workers=num)


specs = st.sampled_from([OLD, NEW, unit("pqrst")])


@given(st.lists(st.tuples(specs, st.booleans(), st.booleans()), max_size=40))
@settings(max_examples=200, deadline=None)
def test_there_are_never_two_units_and_the_last_spec_comes_to_serve(
    events: list[tuple[Unit, bool, bool]],
) -> None:
    """The spec changes at any time, an operator is cut off between its look and what it does, and
    somebody deletes the RayCluster."""
    world = World()
    for spec, is_cut_off, is_deleted in events:
        world.wanted = spec
        step = world.look()
        if not is_cut_off:
            world.act(step)
        if is_deleted:
            ending = {c: dataclasses.replace(s, is_ending=True) for c, s in world.units.items()}
            world.units = ending
        world.pass_time(step)
        assert len(world.units) <= 1
    for _ in range(20):
        step = world.look()
        world.act(step)
        world.pass_time(step)
    assert [each.unit for each in world.units.values()] == [world.wanted]
    assert world.look().state is State.AS_WANTED


@given(st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_a_spec_that_goes_back_while_its_unit_drains_keeps_it(workers: int, drained: int) -> None:
    world = World(making=workers)
    world.act(world.look())
    world.wanted = NEW
    for _ in range(min(drained, workers)):
        step = world.look()
        world.act(step)
        world.pass_time(step)
    world.wanted = OLD
    step = world.look()
    assert step == Step(State.AS_WANTED, "bcdfg", "the unit is what the spec asks for")
    assert world.served == ["bcdfg"]
