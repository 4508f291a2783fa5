"""Workers leave cordoned nodes by levels: whenever the operator looks, enough of them serve."""

from __future__ import annotations

import datetime
import itertools
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.worker_pool import Rollout
from deploy.controller.cordoned import NOBODY_LEAVES, Leaving, leaving
from deploy.controller.group_size import group_size
from deploy.controller.observed import FleetPool, Place, PlaceState, Pod

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LIVE, STARTING = PlaceState.LIVE, PlaceState.STARTING
DRAINING, PENDING = PlaceState.DRAINING, PlaceState.PENDING
SURGES = Rollout(max_surge=1, max_unavailable=0)
SPARES = Rollout(max_surge=0, max_unavailable=1)


def pod(name: str, *, cordoned: bool = True, going: bool = False) -> Pod:
    made = Pod(name, "decode", True, going, "v1", "2026-01-01T00:00:00Z")
    return replace(made, is_cordoned=cordoned)


def places(*states: PlaceState, on: str = "abcdefgh") -> list[Place]:
    return [Place(f"v1-{i}", name, state) for i, (name, state) in enumerate(zip(on, states))]


def left(
    rollout: Rollout, pods: list[Pod], there: list[Place], replicas: int = 2, surged: int = 0
) -> Leaving:
    floor = replicas - rollout.max_unavailable
    most = rollout.max_surge
    return leaving(pods, there, floor=floor, max_surge=most, surged=surged, growing=["v1"])


def test_where_no_node_is_cordoned_nobody_leaves() -> None:
    pods = [pod("a", cordoned=False), pod("b", cordoned=False)]
    assert left(SURGES, pods, places(LIVE, LIVE)) == NOBODY_LEAVES


def test_another_worker_is_live_before_one_is_asked_to_leave() -> None:
    pods = [pod("a"), pod("b", cordoned=False)]
    assert left(SURGES, pods, places(LIVE, LIVE)) == Leaving({"v1": 1})
    pods.append(pod("c", cordoned=False))
    assert left(SURGES, pods, places(LIVE, LIVE, STARTING)) == Leaving({"v1": 1})
    goes = left(SURGES, pods, places(LIVE, LIVE, LIVE))
    assert goes == Leaving({"v1": 1}, frozenset("a"), {"v1": 1})


def test_without_a_surge_so_many_leave_as_may_be_missing_and_one_at_a_time() -> None:
    pods = [pod("a"), pod("b"), pod("c")]
    two = Rollout(max_surge=0, max_unavailable=2)
    assert left(two, pods, places(LIVE, LIVE, LIVE), 3) == Leaving({}, frozenset("a"))
    pods[0] = pod("a", going=True)
    assert left(two, pods, places(DRAINING, LIVE, LIVE), 3) == NOBODY_LEAVES
    assert left(SPARES, pods, places(DRAINING, LIVE, LIVE), 3) == NOBODY_LEAVES


def test_a_pod_that_does_no_work_goes_at_once() -> None:
    pods = [pod("a"), pod("b"), pod("c", cordoned=False)]
    goes = left(SURGES, pods, places(LIVE, STARTING, LIVE), 3)
    assert goes == Leaving({"v1": 1}, frozenset("b"))


def test_the_surge_lasts_until_the_last_worker_there_serves_no_more() -> None:
    pods = [pod("a", going=True), pod("b", cordoned=False), pod("c", cordoned=False)]
    assert left(SURGES, pods, places(LIVE, LIVE, LIVE)) == Leaving(
        {"v1": 1}, frozenset(), {"v1": 1}
    )
    assert left(SURGES, pods, places(DRAINING, LIVE, LIVE)) == NOBODY_LEAVES


def test_no_other_worker_is_taken_for_one_that_is_about_to_drain() -> None:
    uncordoned = [pod(name, cordoned=False, going=name == "a") for name in "abc"]
    serving = places(LIVE, LIVE, LIVE)
    assert left(SURGES, uncordoned, serving, surged=1) == Leaving({"v1": 1}, frozenset(), {"v1": 1})
    assert left(SURGES, uncordoned, serving, replicas=3) == NOBODY_LEAVES  # somebody evicts it


def on_cordoned(*tolerations: dict[str, str]) -> bool:
    spec = {"nodeName": "n1", "tolerations": list(tolerations)}
    return Pod.of({"metadata": {"name": "a"}, "spec": spec}, {"n1"}, NOW).is_cordoned


def test_a_pod_that_tolerates_cordons_stays_for_another_would_come_to_the_same_node() -> None:
    assert on_cordoned()
    assert on_cordoned({"key": "nvidia.com/gpu", "operator": "Exists"})
    assert on_cordoned({"operator": "Exists", "effect": "NoExecute"})
    assert not on_cordoned({"operator": "Exists"})
    assert not on_cordoned({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})


# --- a pool whose nodes are cordoned --------------------------------------------------------------


@dataclass
class Seat:
    """A place of the pool, as its supervisor keeps it."""

    index: int
    pod: str = ""
    state: PlaceState = PENDING
    is_leaving: bool = False

    def empty(self) -> None:
        self.pod, self.state = "", PENDING


@dataclass
class World:
    """A pool of one revision, its supervisor and KubeRay: each does what it was told last, one
    thing at a time and in any order."""

    replicas: int
    rollout: Rollout
    rng: random.Random

    def __post_init__(self) -> None:
        self.names = (f"pod-{number}" for number in itertools.count(10))
        first = [pod(next(self.names), cordoned=False) for _ in range(self.replicas)]
        self.pods = {each.name: each for each in first}
        self.seats = [Seat(number, each.name, LIVE) for number, each in enumerate(first)]
        self.size = self.num_pods = self.replicas
        self.doomed: tuple[str, ...] = ()

    @property
    def num_live(self) -> int:
        return sum(seat.state is LIVE for seat in self.seats)

    def cordon(self, names: set[str]) -> None:
        self.pods = {n: replace(p, is_cordoned=n in names) for n, p in self.pods.items()}

    def step(self) -> None:
        doing = (self.decide, self.make_pods, self.delete_pods, self.resize, self.start,
                 self.serve, self.close, self.leave)  # fmt: skip
        self.rng.choice(doing)()

    # --- the operator ---------------------------------------------------------------------------

    def decide(self) -> None:
        there = [Place(f"v1-{seat.index}", seat.pod, seat.state) for seat in self.seats]
        pods = list(self.pods.values())
        gone = left(self.rollout, pods, there, self.replicas, self.size - self.replicas)
        self.size = self.replicas + gone.surge.get("v1", 0)
        wanted = self.size - gone.replaced.get("v1", 0)
        told = group_size(wanted, pods, FleetPool(self.size, there), gone.pods)
        self.num_pods, self.doomed = told.replicas, told.to_delete

    # --- KubeRay and kubelets -------------------------------------------------------------------

    def staying(self) -> list[Pod]:
        return [p for p in self.pods.values() if not p.is_going and p.name not in self.doomed]

    def make_pods(self) -> None:
        for _ in range(self.num_pods - len(self.staying())):
            name = next(self.names)
            self.pods[name] = pod(name, cordoned=False)

    def delete_pods(self) -> None:
        for name in self.pods.keys() & set(self.doomed):
            self.pods[name] = replace(self.pods[name], is_going=True)

    def close(self) -> None:
        """`preStop`: what has not begun to serve runs nothing."""
        for seat in self.seats:
            if seat.pod and self.pods[seat.pod].is_going:
                if seat.state is STARTING:
                    seat.empty()
                elif seat.state is LIVE:
                    seat.state = DRAINING

    # --- the supervisor -------------------------------------------------------------------------

    def resize(self) -> None:
        """What is nearest to serving stays, then the lowest."""
        far = {LIVE: 0, STARTING: 2, DRAINING: 2, PENDING: 3}
        stay = [seat for seat in self.seats if not seat.is_leaving]
        stay.sort(key=lambda seat: (far[seat.state], seat.index))
        for seat in stay[self.size :]:
            seat.is_leaving = True
            seat.state = DRAINING if seat.state is LIVE else seat.state
        free = (n for n in itertools.count() if n not in [seat.index for seat in self.seats])
        lacking = max(0, self.size - len(stay))
        self.seats += [Seat(number) for number in list(itertools.islice(free, lacking))]
        self.seats = [s for s in self.seats if not s.is_leaving or s.state is DRAINING]

    def start(self) -> None:
        """Not on a pod that was chosen to go while nothing was on it: a worker that gets there in
        that moment drains, whatever is decided."""
        taken = {seat.pod for seat in self.seats}.union(self.doomed)
        free = [n for n, p in self.pods.items() if n not in taken and not p.is_going]
        for seat in self.seats:
            if seat.state is PENDING and free:
                seat.pod, seat.state = free.pop(self.rng.randrange(len(free))), STARTING

    def serve(self) -> None:
        for seat in self.seats:
            if seat.state is STARTING and not self.pods[seat.pod].is_going:
                seat.state = LIVE

    def leave(self) -> None:
        """One worker that drained has ended; pods that go and run nothing are gone."""
        for seat in [seat for seat in self.seats if seat.state is DRAINING][:1]:
            seat.empty()
            if seat.is_leaving:
                self.seats.remove(seat)
        taken = {seat.pod for seat in self.seats}
        self.pods = {n: p for n, p in self.pods.items() if not p.is_going or n in taken}


@given(
    st.integers(1, 4),
    st.sampled_from([SURGES, SPARES, Rollout(max_surge=2, max_unavailable=1)]),
    st.integers(0, 2**32),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_enough_workers_serve_at_every_step_until_all_have_moved(
    replicas: int, rollout: Rollout, seed: int, num_cordoned: int
) -> None:
    world = World(replicas, rollout, random.Random(seed))
    cordoned = set(list(world.pods)[:num_cordoned])
    world.cordon(cordoned)
    for _ in range(5000):
        world.step()
        assert world.num_live >= replicas - rollout.max_unavailable
        there = [seat.state for seat in world.seats if seat.pod in cordoned]
        assert there.count(DRAINING) <= 1
        assert len(world.staying()) <= replicas + rollout.max_surge + rollout.max_unavailable
        if world.pods.keys().isdisjoint(cordoned) and is_whole(world):
            return
    pytest.fail(f"it has not come to an end: {world.seats}, {world.pods}")


@given(st.integers(1, 3), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_pool_whose_nodes_are_uncordoned_halfway_comes_to_its_size_again(
    replicas: int, seed: int
) -> None:
    world = World(replicas, SURGES, random.Random(seed))
    world.cordon(set(world.pods))
    for _ in range(40):
        world.step()
        assert world.num_live >= replicas
    world.cordon(set())
    for _ in range(5000):
        world.step()
        assert world.num_live >= replicas
        if is_whole(world):
            return
    pytest.fail(f"it has not come to an end: {world.seats}, {world.pods}")


def is_whole(world: World) -> bool:
    return world.num_live == len(world.seats) == len(world.pods) == world.replicas
