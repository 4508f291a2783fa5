"""Workers leave cordoned nodes also where a pool stays at several revisions: each is replaced by
one of the revision that it is of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.api.worker_pool import Rollout
from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.observed import FleetPool, Place, PlaceState, Pod
from deploy.controller.revisions import revision_of
from deploy.controller.rolling import Rolling, decide, group_size_of
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

LIVE, STARTING, DRAINING = PlaceState.LIVE, PlaceState.STARTING, PlaceState.DRAINING
BACK = Progress(
    revision_of(OLD, "decode", pool_spec()).cohort,
    revision_of(SPEC, "decode", pool_spec()).cohort,
    Phase.RETURNED,
    reason="it failed",
    is_fault=True,
)


@dataclass
class World:
    """A pool of some revisions whose supervisor and KubeRay do at each turn all that they were
    told: workers that start are live at the next one, workers that drain are gone then."""

    sizes: dict[str, int]
    """By revision, as it rests."""
    specs: list[dict[str, Any]]
    progress: Progress | None = None
    stuck: str = ""
    """A revision of which no worker gets live."""
    pool: dict[str, Any] = field(default_factory=dict)
    seats: list[Place] = field(default_factory=list)
    pods: dict[str, Pod] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    num_made: int = 0

    def __post_init__(self) -> None:
        self.asked = dict(self.sizes)
        for name, size in self.sizes.items():
            for _ in range(size):
                self.seat(name, STARTING if name == self.stuck else LIVE)

    def seat(self, revision: str, state: PlaceState) -> None:
        self.num_made += 1
        name = f"{revision}-pod-{self.num_made:02}"
        self.pods[name] = Pod(name, "decode", True, False, revision, "2026")
        self.seats.append(Place(f"{revision}-{self.num_made}", name, state))

    def cordon(self) -> None:
        self.pods = {n: dataclasses.replace(p, is_cordoned=True) for n, p in self.pods.items()}

    @property
    def num_live(self) -> int:
        return sum(seat.state is LIVE for seat in self.seats)

    def of(self, revision: str) -> list[Place]:
        return [seat for seat in self.seats if self.pods[seat.pod].revision == revision]

    def seen(self) -> ClusterView:
        fleet = {name: FleetPool(self.asked[name], self._standing(name)) for name in self.sizes}
        groups = [group(spec, self.asked[name_of(spec)]) for spec in self.specs]
        return view(fleet, groups, list(self.pods.values()), **self.pool)

    def _standing(self, revision: str) -> list[Place]:
        """What is nearest to serving leaves last."""
        ranked = sorted(self.of(revision), key=lambda s: (s.state is not LIVE, s.worker_id))
        return [dataclasses.replace(each, told_standing=n) for n, each in enumerate(ranked)]

    def turn(self) -> Rolling:
        seen = self.seen()
        watches = {"decode": ReadyWatch(name_of(SPEC), 0, NOW)} if self.stuck else {}
        rolling = decide(seen, self.progress, watches, {}, LATER)
        self._go_on()
        for name, size in rolling.sizes.items():
            leaving = rolling.pools["decode"].leaving
            told = group_size_of(seen, seen.pools["decode"], name, size, leaving)
            self.asked[name] = size
            surplus = {seat.pod for seat in self._standing(name)[size:]}
            self._drain((surplus | {*told.to_delete}) & self.pods.keys())
            num_staying = sum(seat.state is not DRAINING for seat in self.of(name))
            for _ in range(told.replicas - num_staying):
                self.seat(name, STARTING)
        return rolling

    def _go_on(self) -> None:
        gone = {seat.pod for seat in self.seats if seat.state is DRAINING}
        self.pods = {name: pod for name, pod in self.pods.items() if name not in gone}
        self.seats = [
            dataclasses.replace(seat, state=LIVE)
            if seat.state is STARTING and self.pods[seat.pod].revision != self.stuck
            else seat
            for seat in self.seats
            if seat.pod not in gone
        ]

    def _drain(self, pods: set[str]) -> None:
        for name in pods:
            self.pods[name] = dataclasses.replace(self.pods[name], is_going=True)
        self.seats = [
            dataclasses.replace(seat, state=DRAINING) if seat.pod in pods else seat
            for seat in self.seats
        ]


CASES = {
    "kept by a partition": World(
        {name_of(BEFORE): 2, name_of(SPEC): 1},
        [BEFORE, SPEC],
        pool={"replicas": 3, "rollout": Rollout(partition=2)},
    ),
    "all of them kept": World(
        {name_of(BEFORE): 3, name_of(SPEC): 0},
        [BEFORE, SPEC],
        pool={"replicas": 3, "rollout": Rollout(partition=3)},
    ),
    "of a cohort to which all went back": World(
        {name_of(OLD): 3, name_of(SPEC): 0}, [OLD, SPEC], progress=BACK, pool={"replicas": 3}
    ),
    "beside a version that does not get ready": World(
        {name_of(BEFORE): 3, name_of(SPEC): 1}, [BEFORE, SPEC], stuck=name_of(SPEC),
        pool={"replicas": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_they_are_replaced_by_the_same_revision_and_no_fewer_serve_meanwhile(case: str) -> None:
    world = CASES[case]
    assert world.turn().sizes == world.sizes, "it rests"
    world.cordon()
    for _ in range(60):
        sizes = world.turn().sizes
        assert world.num_live >= 3
        assert sum(seat.state is not DRAINING for seat in world.seats) <= 5
        if not any(pod.is_cordoned for pod in world.pods.values()) and sizes == world.sizes:
            return
    pytest.fail(f"they stay: {world.seats}")
