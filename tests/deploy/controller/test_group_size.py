"""Scale-in by levels: whenever the operator looks, no pod with a worker on it goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.fleet import WorkerState
from deploy.controller.manifests.ray_cluster import GroupSize
from deploy.controller.observed.fleet import FleetPool, Slot
from deploy.controller.observed.pod import Pod
from deploy.controller.reconcile.kuberay import group_size


def pod(name: str, going: bool = False, ready: bool = True) -> Pod:
    return Pod(name, "decode", ready, going, "v1", "2026-01-01T00:00:00Z")


def slot(index: int, on: str, state: WorkerState = WorkerState.LIVE) -> Slot:
    return Slot(f"decode-{index}", on, state, num_running=1)


def pods(names: str) -> list[Pod]:
    return [pod(name) for name in names]


HOME = slot(0, "a")
DRAINS = slot(1, "b", WorkerState.DRAINING)
WAITS = slot(1, "", None)


@pytest.mark.parametrize(
    ("replicas", "have", "slots", "expected"),
    [
        (3, pods("a"), [HOME], GroupSize(3)),  # it grows at once
        (1, pods("ab"), [HOME, DRAINS], GroupSize(2)),  # a pod whose worker drains stays
        (1, pods("abc"), [slot(0, "b")], GroupSize(3, (), frozenset("ac"))),  # to be closed first
        (1, [pod("a"), pod("b", going=True)], [HOME], GroupSize(1, ("b",), frozenset("b"))),
        (1, pods("abc"), None, GroupSize(3)),  # the supervisor is silent: nothing goes
        # a pod that is not seen yet counts: KubeRay would choose two of three
        (1, pods("a"), [HOME, slot(1, "b"), slot(2, "c")], GroupSize(3)),
        (2, pods("abc"), [HOME, WAITS], GroupSize(3, (), frozenset("b"))),  # one stays for WAITS
        (2, [*pods("ab"), pod("c", ready=False)], [HOME, WAITS], GroupSize(3, (), frozenset("c"))),
    ],
)
def test_only_pods_without_a_worker_go(
    replicas: int, have: list[Pod], slots: list[Slot] | None, expected: GroupSize
) -> None:
    fleet = None if slots is None else FleetPool(replicas, slots)
    assert group_size(replicas, have, fleet) == expected


# --- a model of KubeRay and the supervisor --------------------------------------------------------


@dataclass
class Model:
    """Pods and slots that take one step at a time to what was asked of them."""

    replicas: int = 2
    asked: int = 2
    pods: dict[str, bool] = field(default_factory=dict)  # whether it goes
    homes: dict[int, str] = field(default_factory=dict)  # pods of slots
    draining: set[int] = field(default_factory=set)
    closed: frozenset[str] = frozenset()
    heard: tuple[FleetPool, frozenset[str]] = (FleetPool(2, ()), frozenset())
    """The supervisor's newest report."""
    num_made: int = 0
    killed_with_worker: list[str] = field(default_factory=list)

    def slots(self) -> list[Slot]:
        wanted = dict.fromkeys(range(self.asked), "")
        return [
            slot(
                index,
                home,
                WorkerState.DRAINING
                if index in self.draining
                else (WorkerState.LIVE if home else None),
            )
            for index, home in sorted((wanted | self.homes).items())
        ]

    def report(self) -> None:
        self.heard = FleetPool(self.asked, self.slots()), self.closed

    def operate(self, sees_fleet: bool) -> None:
        """One look of the operator: what it asks of KubeRay takes effect. What it hears of the
        supervisor is old."""
        have = [pod(name, going) for name, going in self.pods.items()]
        fleet, closed = self.heard
        size = group_size(self.replicas, have, fleet if sees_fleet else None, closed)
        for name in size.to_delete:
            if name in self.homes.values():
                self.killed_with_worker.append(name)
            self.pods[name] = True
        staying = [name for name, going in self.pods.items() if not going]
        assert len(staying) <= size.replicas, "KubeRay would choose which pod goes"
        for _ in range(size.replicas - len(staying)):
            self.num_made += 1
            self.pods[f"pod-{self.num_made}"] = False
        if sees_fleet:
            self.closed, self.asked = size.to_close, self.replicas

    def supervise(self) -> None:
        """The supervisor places what has room, and drains what is too much. A pod that goes
        has room for a while yet."""
        self.draining |= {index for index in self.homes if index >= self.asked}
        free = [n for n in self.pods if n not in {*self.closed, *self.homes.values()}]
        for index in range(self.asked):
            if index not in self.homes and free:
                self.homes[index] = free.pop()
                assert not self.pods[self.homes[index]], "it was placed on a pod that goes"

    def end_streams(self) -> None:
        for index in sorted(self.draining):
            self.homes.pop(index, None)
        self.draining.clear()

    def end_pods(self) -> None:
        self.pods = {name: going for name, going in self.pods.items() if not going}


OFTEN = ["operate", "supervise", "streams", "report"]
STEPS = st.sampled_from([*OFTEN, "blind", "pods", "0", "1", "3", "5"])


@given(st.lists(STEPS, max_size=60))
@settings(deadline=None)
def test_however_steps_follow_each_other_no_pod_goes_with_a_worker_and_the_end_is_what_is_wanted(
    steps: list[str],
) -> None:
    model = Model()
    for step in [*steps, *[*OFTEN, "pods"] * 6]:
        if step.isdigit():
            model.replicas = int(step)
        elif step in ("operate", "blind"):
            model.operate(sees_fleet=step == "operate")
        elif step == "supervise":
            model.supervise()
        elif step == "streams":
            model.end_streams()
        elif step == "report":
            model.report()
        else:
            model.end_pods()
        assert model.killed_with_worker == []
    assert len(model.pods) == model.replicas
    assert sorted(model.homes) == list(range(model.replicas))
