"""Workers leave cordoned nodes also where a pool stays at several revisions: each is replaced by
one of the revision that it is of."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.worker_pool import Rollout
from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.observed import FleetPool, Place, PlaceState, Pod
from deploy.controller.revisions import revision_of
from deploy.controller.rolling import decide, group_size_of
from deploy.controller.rollout import ReadyWatch
from deploy.controller.view import ClusterView
from tests.deploy.controller.test_rolling import (
    BEFORE,
    LATER,
    NOW,
    OLD,
    SPEC,
    group,
    name_of,
    pool_spec,
    view,
)

LIVE, STARTING = PlaceState.LIVE, PlaceState.STARTING
DRAINING, PENDING = PlaceState.DRAINING, PlaceState.PENDING
_FAR = {LIVE: 0, STARTING: 2, DRAINING: 2, PENDING: 3}
REPLICAS = 3
NEW, FORMER, OTHER = name_of(SPEC), name_of(BEFORE), name_of(OLD)
BACK = Progress(
    revision_of(OLD, "decode", pool_spec()).cohort,
    revision_of(SPEC, "decode", pool_spec()).cohort,
    Phase.RETURNED,
    reason="it failed",
    is_fault=True,
)


@dataclass(frozen=True)
class Case:
    """How a pool rests: `sizes` by revision."""

    before: Mapping[str, Any]
    sizes: Mapping[str, int]
    rollout: Rollout = field(default_factory=Rollout)
    progress: Progress | None = None
    is_stuck: bool = False
    """No worker of the newest revision gets live."""


CASES = {
    "kept by a partition": Case(BEFORE, {FORMER: 2, NEW: 1}, Rollout(partition=2)),
    "kept by it, and none to spare": Case(
        BEFORE, {FORMER: 2, NEW: 1}, Rollout(partition=2, max_surge=0, max_unavailable=1)
    ),
    "all of them kept": Case(BEFORE, {FORMER: 3, NEW: 0}, Rollout(partition=3)),
    "of a cohort to which all went back": Case(OLD, {OTHER: 3, NEW: 0}, progress=BACK),
    "beside a version that does not get ready": Case(BEFORE, {FORMER: 3, NEW: 1}, is_stuck=True),
}


@dataclass
class Seat:
    """A place of a revision, as its supervisor keeps it."""

    index: int
    pod: str = ""
    state: PlaceState = PENDING
    is_leaving: bool = False


@dataclass
class World:
    """The pool, its supervisor and KubeRay: each does what it was told last, one thing at a time
    and in any order."""

    case: Case
    rng: random.Random

    def __post_init__(self) -> None:
        self.numbers = itertools.count(10)
        self.pods: dict[str, Pod] = {}
        self.sizes, self.num_pods = dict(self.case.sizes), dict(self.case.sizes)
        self.doomed: dict[str, tuple[str, ...]] = dict.fromkeys(self.sizes, ())
        self.seats = {
            name: [Seat(n, self.make_pod(name), self._first(name)) for n in range(size)]
            for name, size in self.sizes.items()
        }

    def _first(self, revision: str) -> PlaceState:
        return STARTING if self.is_stuck(revision) else LIVE

    def is_stuck(self, revision: str) -> bool:
        return self.case.is_stuck and revision == NEW

    def make_pod(self, revision: str) -> str:
        name = f"{revision}-pod-{next(self.numbers)}"
        self.pods[name] = Pod(name, "decode", True, False, revision, "2026")
        return name

    def cordon(self, names: set[str]) -> None:
        self.pods = {
            name: dataclasses.replace(pod, is_cordoned=name in names)
            for name, pod in self.pods.items()
        }

    @property
    def all_seats(self) -> list[Seat]:
        return [seat for seats in self.seats.values() for seat in seats]

    @property
    def num_live(self) -> int:
        return sum(seat.state is LIVE for seat in self.all_seats)

    @property
    def is_at_rest(self) -> bool:
        states = [LIVE, *[STARTING] * self.case.is_stuck]
        return (
            self.sizes == self.case.sizes
            and {name: len(seats) for name, seats in self.seats.items()} == self.case.sizes
            and all(seat.state in states for seat in self.all_seats)
        )

    def step(self) -> None:
        doing = (self.decide, self.make_pods, self.delete_pods, self.start, self.serve,
                 self.close, self.leave)  # fmt: skip
        self.rng.choice(doing)()

    # --- the operator ---------------------------------------------------------------------------

    def decide(self) -> None:
        seen = self._seen()
        watches = {"decode": ReadyWatch(NEW, 0, NOW)} if self.case.is_stuck else {}
        rolling = decide(seen, self.case.progress, watches, None, LATER)
        leaving = rolling.pools["decode"].leaving
        for name, size in rolling.sizes.items():
            told = group_size_of(seen, seen.pools["decode"], name, size, leaving)
            self.num_pods[name], self.doomed[name] = told.replicas, told.to_delete
        for name, size in rolling.sizes.items():
            self.sizes[name] = size
            self._resize(name)

    def _seen(self) -> ClusterView:
        specs = [dict(self.case.before), SPEC]
        groups = [group(spec, self.num_pods[name_of(spec)]) for spec in specs]
        fleet = {name: FleetPool(size, self._places(name)) for name, size in self.sizes.items()}
        pods = list(self.pods.values())
        return view(fleet, groups, pods, replicas=REPLICAS, rollout=self.case.rollout)

    def _places(self, revision: str) -> list[Place]:
        """Those that leave first come last."""
        ranked = sorted(self.seats[revision], key=lambda s: (s.is_leaving, _FAR[s.state], s.index))
        return [
            Place(f"{revision}-{seat.index}", seat.pod, seat.state, told_standing=standing)
            for standing, seat in enumerate(ranked)
        ]

    # --- KubeRay and kubelets -------------------------------------------------------------------

    def make_pods(self) -> None:
        for name, wanted in self.num_pods.items():
            there = [pod for pod in self.pods.values() if pod.revision == name and not pod.is_going]
            num_staying = sum(pod.name not in self.doomed[name] for pod in there)
            for _ in range(wanted - num_staying):
                self.make_pod(name)

    def delete_pods(self) -> None:
        for name in self.pods.keys() & {each for doomed in self.doomed.values() for each in doomed}:
            self.pods[name] = dataclasses.replace(self.pods[name], is_going=True)

    def close(self) -> None:
        """`preStop`: what has not begun to serve runs nothing."""
        for seat in self.all_seats:
            if seat.pod and self.pods[seat.pod].is_going:
                if seat.state is STARTING:
                    seat.pod, seat.state = "", PENDING
                elif seat.state is LIVE:
                    seat.state = DRAINING

    # --- the supervisor -------------------------------------------------------------------------

    def _resize(self, revision: str) -> None:
        """What is nearest to serving stays, then the lowest."""
        seats, size = self.seats[revision], self.sizes[revision]
        stay = [seat for seat in seats if not seat.is_leaving]
        stay.sort(key=lambda seat: (_FAR[seat.state], seat.index))
        for seat in stay[size:]:
            seat.is_leaving = True
            seat.state = DRAINING if seat.state is LIVE else seat.state
        taken = {seat.index for seat in seats}
        free = (number for number in itertools.count() if number not in taken)
        seats += [Seat(number) for number in itertools.islice(free, max(0, size - len(stay)))]
        self.seats[revision] = [s for s in seats if not s.is_leaving or s.state is DRAINING]

    def start(self) -> None:
        taken = {seat.pod for seat in self.all_seats}
        for name, seats in self.seats.items():
            there = [pod for pod in self.pods.values() if pod.revision == name and not pod.is_going]
            free = [p.name for p in there if p.name not in taken.union(self.doomed[name])]
            for seat in seats:
                if seat.state is PENDING and free:
                    chosen = self.rng.randrange(len(free))
                    seat.pod, seat.state = free.pop(chosen), STARTING

    def serve(self) -> None:
        for name, seats in self.seats.items():
            for seat in seats:
                can = seat.state is STARTING and not self.pods[seat.pod].is_going
                seat.state = LIVE if can and not self.is_stuck(name) else seat.state

    def leave(self) -> None:
        """One worker of each that drained has ended; pods that go and run nothing are gone."""
        for seats in self.seats.values():
            for seat in [seat for seat in seats if seat.state is DRAINING][:1]:
                seat.pod, seat.state = "", PENDING
                if seat.is_leaving:
                    seats.remove(seat)
        taken = {seat.pod for seat in self.all_seats}
        self.pods = {n: p for n, p in self.pods.items() if not p.is_going or n in taken}


@pytest.mark.parametrize("case", CASES)
@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_they_are_replaced_by_the_same_revision_and_no_fewer_serve_meanwhile(
    case: str, seed: int, num_cordoned: int
) -> None:
    world = World(CASES[case], random.Random(seed))
    world.decide()
    assert world.is_at_rest
    cordoned = set(world.rng.sample(sorted(world.pods), min(num_cordoned, len(world.pods))))
    world.cordon(cordoned)
    for _ in range(6000):
        world.step()
        assert world.num_live >= REPLICAS - world.case.rollout.max_unavailable
        if world.pods.keys().isdisjoint(cordoned) and world.is_at_rest:
            return
    pytest.fail(f"they stay: {world.seats}, {world.pods}")
