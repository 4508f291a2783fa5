"""Of several candidates one leads, on a real API server, and has stopped before the next starts."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.kit.election import LEASES, Candidate, ElectionSettings, Elector
from deploy.controller.kit.errors import WriteRefusedError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from tests.deploy.controller.following import until
from tests.deploy.controller.things import CONFIG_MAPS, config_map
from tests.k8s.api_clients import fresh_namespace, kube_of, kube_through
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.cut_proxy import cut_proxy

_TIMEOUT_S = 20.0
_SETTINGS = ElectionSettings(lease_duration_s=15, renew_deadline_s=10, retry_s=2)
_FAST = ElectionSettings(lease_duration_s=2, renew_deadline_s=1.4, retry_s=0.1)


class FakeClock:
    """One machine's: `now` goes on for all alike, where it began is its own affair."""

    now = 0.0

    def __init__(self, offset_s: float = 0.0) -> None:
        self._offset_s = offset_s

    def __call__(self) -> float:
        return FakeClock.now + self._offset_s


@pytest.fixture(autouse=True)
def midnight() -> None:
    FakeClock.now = 0.0


@pytest.fixture
def kube(control_plane: ControlPlane) -> Kube:
    return kube_of(control_plane)


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with fresh_namespace(kube) as name:
        yield name


@pytest.fixture
def lease(namespace: str) -> Key:
    return Key(namespace, "operator")


@pytest.fixture
def pair(kube: Kube, lease: Key) -> tuple[Candidate, Candidate]:
    """Their clocks differ by a year."""
    clocks = FakeClock(), FakeClock(365 * 86400)
    one, two = (
        Candidate(kube, lease, identity, _SETTINGS, clock)
        for identity, clock in zip(("one", "two"), clocks, strict=True)
    )
    return one, two


def leaders(*candidates: Candidate) -> int:
    return sum(candidate.is_leading() for candidate in candidates)


def test_the_first_one_leads_and_the_other_waits(
    kube: Kube, lease: Key, pair: tuple[Candidate, Candidate]
) -> None:
    one, two = pair
    one.attempt()
    two.attempt()
    assert (one.is_leading(), two.is_leading()) == (True, False)
    spec = kube.get(LEASES, lease)["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("one", 15)
    assert spec["leaseTransitions"] == 0


def test_who_renews_leads_on(pair: tuple[Candidate, Candidate]) -> None:
    one, two = pair
    for _ in range(10):
        one.attempt()
        two.attempt()
        FakeClock.now += 8
        assert one.is_leading()
        assert not two.is_leading()


def test_a_leader_that_stands_still_has_stopped_before_the_next_one_starts(
    kube: Kube, lease: Key, pair: tuple[Candidate, Candidate]
) -> None:
    one, two = pair
    one.attempt()
    two.attempt()
    FakeClock.now = 9.9
    assert one.is_leading()
    FakeClock.now = 10
    assert not one.is_leading(), "by the clock alone: it need not be scheduled to find out"
    FakeClock.now = 14.9
    two.attempt()
    assert leaders(one, two) == 0
    FakeClock.now = 15
    two.attempt()
    assert two.is_leading()
    one.attempt()
    assert not one.is_leading()
    assert kube.get(LEASES, lease)["spec"]["leaseTransitions"] == 1


def test_a_leader_that_stood_still_leads_on_where_nobody_took_over(
    pair: tuple[Candidate, Candidate],
) -> None:
    one, two = pair
    one.attempt()
    FakeClock.now = 1000
    assert not one.is_leading()
    one.attempt()
    assert one.is_leading()
    two.attempt()
    assert not two.is_leading(), "it saw the renewal for the first time just now"


def test_a_lease_that_was_given_back_is_taken_at_once(pair: tuple[Candidate, Candidate]) -> None:
    one, two = pair
    one.attempt()
    two.attempt()
    one.release()
    assert leaders(one, two) == 0
    two.attempt()
    assert two.is_leading()
    one.release()
    assert two.is_leading(), "who does not hold it gives nothing back"
    two.attempt()
    assert two.is_leading()


def test_a_lease_that_somebody_edits_or_deletes_is_renewed_all_the_same(
    kube: Kube, lease: Key, pair: tuple[Candidate, Candidate]
) -> None:
    one, two = pair
    one.attempt()
    kube.merge_patch(LEASES, lease, {"metadata": {"annotations": {"note": "hello"}}})
    FakeClock.now = 8
    one.attempt()
    FakeClock.now = 12
    assert one.is_leading()
    kube.delete(LEASES, lease)
    one.attempt()
    FakeClock.now = 20
    two.attempt()
    assert (one.is_leading(), two.is_leading()) == (True, False)


@pytest.mark.parametrize("num_looks", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_whoever_stops_whenever_there_are_never_two_leaders(
    kube: Kube, lease: Key, num_looks: int
) -> None:
    """The candidates stand still, give back and come back at random."""
    rng = random.Random(num_looks)
    candidates = [
        Candidate(kube, lease, f"c{i}", _SETTINGS, FakeClock(rng.uniform(-1e6, 1e6)))
        for i in range(3)
    ]
    paused_until = [0.0] * 3
    have_led: set[int] = set()
    for _ in range(num_looks):
        FakeClock.now += rng.expovariate(1.0)
        index = rng.randrange(3)
        if candidates[index].is_leading() and rng.random() < 0.3:
            paused_until[index] = FakeClock.now + rng.uniform(8, 40)
        if FakeClock.now >= paused_until[index]:
            if rng.random() < 0.03:
                candidates[index].release()
            candidates[index].attempt()
        assert leaders(*candidates) <= 1
        have_led |= {i for i, candidate in enumerate(candidates) if candidate.is_leading()}
    assert have_led == {0, 1, 2}


def test_settings_that_let_two_lead_are_refused() -> None:
    with pytest.raises(ValueError, match="lease_duration_s > renew_deadline_s"):
        ElectionSettings(lease_duration_s=10, renew_deadline_s=10)


class Story:
    """What the electors tell, in its order."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self._changed = threading.Condition()

    def teller(self, what: str) -> None:
        with self._changed:
            self._told.append(what)
            self._changed.notify_all()

    def until(self, *expected: str) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: self._told == [*expected], _TIMEOUT_S)
        assert came, f"{self._told}, not {expected}"


@contextlib.contextmanager
def electing(kube: Kube, lease: Key, identity: str, story: Story) -> Iterator[Elector]:
    elector = Elector(kube, lease, identity, _FAST)
    elector.start(
        on_gained=lambda: story.teller(f"{identity} gained"),
        on_lost=lambda: story.teller(f"{identity} lost"),
    )
    try:
        yield elector
    finally:
        elector.stop()


def test_who_ends_hands_over_at_once(kube: Kube, lease: Key) -> None:
    story = Story()
    with electing(kube, lease, "one", story) as one:
        story.until("one gained")
        with electing(kube, lease, "two", story) as two:
            assert one.stop()
            story.until("one gained", "one lost", "two gained")
            assert (one.is_leading(), two.is_leading()) == (False, True)
    assert kube.get(LEASES, lease)["spec"]["holderIdentity"] == ""


def test_who_ends_has_stopped_what_acts_before_the_lease_is_given_back(
    kube: Kube, lease: Key
) -> None:
    elector, ends = Elector(kube, lease, "one", _FAST), []

    def end() -> None:
        holder = kube.get(LEASES, lease)["spec"]["holderIdentity"]
        ends.append((holder, elector.is_leading()))

    began = threading.Event()
    elector.start(on_gained=began.set, on_lost=end)
    assert began.wait(_TIMEOUT_S)
    assert elector.stop()
    assert ends == [("one", False)]
    assert kube.get(LEASES, lease)["spec"]["holderIdentity"] == ""


def test_who_is_cut_off_has_lost_before_the_other_gains_and_writes_no_more(
    control_plane: ControlPlane, kube: Kube, lease: Key, tmp_path: Path
) -> None:
    story = Story()
    key = Key(lease.namespace, "written")
    with cut_proxy(control_plane.address) as proxy:
        cut_off = kube_through(proxy, control_plane, tmp_path)
        with electing(cut_off, lease, "one", story) as one:
            story.until("one gained")
            writing = kube.guarded(one.is_leading)
            writing.apply(CONFIG_MAPS, config_map(key), force=False)
            with electing(kube, lease, "two", story):
                proxy.silence()
                story.until("one gained", "one lost", "two gained")
                with pytest.raises(WriteRefusedError):
                    writing.apply(CONFIG_MAPS, config_map(key), force=False)
                proxy.heal()
        story.until("one gained", "one lost", "two gained", "two lost")


def test_of_many_who_start_together_one_leads(kube: Kube, lease: Key) -> None:
    story = Story()
    with contextlib.ExitStack() as stack:
        electors = [
            stack.enter_context(electing(kube, lease, f"c{number}", story)) for number in range(5)
        ]

        def one_leads() -> bool:
            assert sum(elector.is_leading() for elector in electors) <= 1
            return any(elector.is_leading() for elector in electors)

        until(one_leads, "a leader")
