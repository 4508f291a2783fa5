"""How one unit takes the place of another. Pure, and of levels only: whoever was cut off at any
step comes to the same end by asking again.

With `Recreate` there is never more than one unit:

             the spec asks for another unit        no worker pod is left
    AsWanted ----------------------------> Draining -------------------> Ending
       ^  ^                                    |                           |
       |  +-- the spec asks for this one again +                           | no pod is left
       |                                                                   |
       +----------------------------- Making <----------------------------+
              its RayCluster is made

A unit whose RayCluster somebody deletes is Ending, whatever the spec asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from deploy.controller.units import Unit, difference


class State(StrEnum):
    AS_WANTED = "AsWanted"
    """The unit is the one that the spec asks for."""
    DRAINING = "Draining"
    """Its workers finish what they run, and take nothing new."""
    ENDING = "Ending"
    """Its RayCluster is deleted, and pods of it are left."""
    MAKING = "Making"
    """There is no unit: the one that the spec asks for is made."""


@dataclass(frozen=True)
class UnitSeen:
    unit: Unit
    num_workers: int
    """Pods of its workers, without those of lost nodes."""
    is_ending: bool = False
    """The deletion of its RayCluster has begun."""


@dataclass(frozen=True)
class Step:
    """What is to be done now. `unit`: the code of the unit that it is about."""

    state: State
    unit: str
    reason: str


def next_step(wanted: Unit | None, units: Sequence[UnitSeen], num_left: int) -> Step:
    """`wanted`: None where the ServingCluster is deleted; `num_left`: pods of units that have no
    RayCluster any more, without those of lost nodes."""
    leaving = [each for each in units if each.is_ending or _why(wanted, each)]
    if leaving:
        return _leaves(leaving[0], _why(wanted, leaving[0]))
    if units:
        return Step(State.AS_WANTED, units[0].unit.code, "the unit is what the spec asks for")
    if num_left:
        told = f"{num_left} pods of a former unit are left"
        return Step(State.ENDING, "", told)
    if wanted is None:
        return Step(State.ENDING, "", "the ServingCluster is deleted, and no unit is left")
    return Step(State.MAKING, wanted.code, f"there is no unit: {wanted.code} is made")


def _why(wanted: Unit | None, seen: UnitSeen) -> str:
    """Why the unit is to go; empty: it stays."""
    if wanted is None:
        return "the ServingCluster is deleted"
    return difference(seen.unit, wanted)


def _leaves(seen: UnitSeen, why: str) -> Step:
    code = seen.unit.code
    if seen.is_ending:
        return Step(State.ENDING, code, f"the RayCluster of unit {code} is being deleted")
    if seen.num_workers:
        told = f"{why}: {seen.num_workers} worker pods of unit {code} drain"
        return Step(State.DRAINING, code, told)
    return Step(State.ENDING, code, f"{why}: unit {code} has no worker left")
