"""Of several candidates one leads, on a real API server, and has stopped before the next starts."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import ManualClock
from deploy.controller.kit.election import LEASES, Candidate, ElectionSettings, Elector
from deploy.controller.kit.errors import WriteRefusedError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from tests.deploy.controller.things import CONFIG_MAPS, config_map
from tests.k8s.api_clients import kube_through
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually
from tests.k8s.tcp_proxy import cut_proxy

_SETTINGS = ElectionSettings(lease_duration_s=15, renew_deadline_s=10, retry_s=2)
_FAST = ElectionSettings(lease_duration_s=2, renew_deadline_s=1.4, retry_s=0.1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lease(namespace: str) -> Key:
    return Key(namespace, "operator")


@pytest.fixture
def pair(kube: Kube, lease: Key, clock: ManualClock) -> tuple[Candidate, Candidate]:
    """Their clocks differ by a year."""
    one = Candidate(kube, lease, "one", _SETTINGS, clock.now_s)
    return one, Candidate(kube, lease, "two", _SETTINGS, lambda: clock.now_s() + 365 * 86400)


def leaders(*candidates: Candidate) -> int:
    return sum(candidate.is_leading() for candidate in candidates)


def test_the_first_one_leads_and_leads_on_while_it_renews(
    kube: Kube, lease: Key, clock: ManualClock, pair: tuple[Candidate, Candidate]
) -> None:
    one, two = pair
    for _ in range(10):
        one.attempt()
        two.attempt()
        clock.advance(8)
        assert (one.is_leading(), two.is_leading()) == (True, False)
    spec = kube.get(LEASES, lease)["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("one", 15)


def test_a_leader_that_stands_still_has_stopped_before_the_next_one_starts(
    kube: Kube, lease: Key, clock: ManualClock, pair: tuple[Candidate, Candidate]
) -> None:
    one, two = pair
    one.attempt()
    two.attempt()
    clock.advance(9.9)
    assert one.is_leading()
    clock.advance(0.1)
    assert not one.is_leading(), "by the clock alone: it need not be scheduled to find out"
    clock.advance(4.9)
    two.attempt()
    assert leaders(one, two) == 0
    clock.advance(0.1)
    two.attempt()
    one.attempt()
    assert (one.is_leading(), two.is_leading()) == (False, True)


def test_a_leader_that_stood_still_leads_on_where_nobody_took_over(
    clock: ManualClock, pair: tuple[Candidate, Candidate]
) -> None:
    one, two = pair
    one.attempt()
    clock.advance(1000)
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
    two.attempt()
    assert two.is_leading(), "a candidate that does not hold it gives nothing back"


def test_a_lease_that_somebody_edits_or_deletes_is_renewed_all_the_same(
    kube: Kube, lease: Key, clock: ManualClock, pair: tuple[Candidate, Candidate]
) -> None:
    one, two = pair
    one.attempt()
    kube.merge_patch(LEASES, lease, {"metadata": {"annotations": {"note": "hello"}}})
    clock.advance(8)
    one.attempt()
    clock.advance(4)
    assert one.is_leading()
    kube.delete(LEASES, lease)
    one.attempt()
    clock.advance(8)
    two.attempt()
    assert (one.is_leading(), two.is_leading()) == (True, False)


@pytest.mark.parametrize("num_looks", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_there_are_never_two_leaders_whichever_candidate_stops_and_whenever(
    kube: Kube, lease: Key, clock: ManualClock, num_looks: int
) -> None:
    """The candidates stand still, give back and come back at random."""
    rng = random.Random(num_looks)

    def candidate(number: int) -> Candidate:
        offset_s = rng.uniform(-1e6, 1e6)
        return Candidate(kube, lease, f"c{number}", _SETTINGS, lambda: clock.now_s() + offset_s)

    candidates = [candidate(number) for number in range(3)]
    paused_until = [0.0] * 3
    have_led: set[int] = set()
    for _ in range(num_looks):
        clock.advance(rng.expovariate(1.0))
        index = rng.randrange(3)
        if candidates[index].is_leading() and rng.random() < 0.3:
            paused_until[index] = clock.now_s() + rng.uniform(8, 40)
        if clock.now_s() >= paused_until[index]:
            if rng.random() < 0.03:
                candidates[index].release()
            candidates[index].attempt()
        assert leaders(*candidates) <= 1
        have_led |= {i for i, candidate in enumerate(candidates) if candidate.is_leading()}
    assert have_led == {0, 1, 2}


def test_settings_that_let_two_lead_are_refused() -> None:
    with pytest.raises(ValueError, match="lease_duration_s > renew_deadline_s"):
        ElectionSettings(lease_duration_s=10, renew_deadline_s=10)


@contextlib.contextmanager
def electing(kube: Kube, lease: Key, identity: str) -> Iterator[Elector]:
    elector = Elector(kube, lease, identity, _FAST)
    elector.start()
    try:
        yield elector
    finally:
        elector.stop()


def test_an_elector_that_ends_hands_over_at_once(kube: Kube, lease: Key) -> None:
    with electing(kube, lease, "one") as one:
        eventually(one.is_leading, "one leads")
        with electing(kube, lease, "two") as two:
            assert one.stop()
            eventually(two.is_leading, "two leads")
            assert not one.is_leading()
    assert kube.get(LEASES, lease)["spec"]["holderIdentity"] == ""


def test_an_elector_that_is_cut_off_has_lost_before_the_other_gains_and_writes_no_more(
    control_plane: ControlPlane, kube: Kube, lease: Key, tmp_path: Path
) -> None:
    key = Key(lease.namespace, "written")
    with cut_proxy(control_plane.address) as proxy:
        cut_off = kube_through(proxy, control_plane, tmp_path)
        with electing(cut_off, lease, "one") as one:
            eventually(one.is_leading, "one leads")
            writing = kube.guarded(one.is_leading)
            writing.apply(CONFIG_MAPS, config_map(key), force=False)
            with electing(kube, lease, "two") as two:
                proxy.silence()
                eventually(lambda: two.is_leading() or not one.is_leading(), "one has lost")
                assert not one.is_leading()
                eventually(two.is_leading, "two leads")
                with pytest.raises(WriteRefusedError):
                    writing.apply(CONFIG_MAPS, config_map(key), force=False)
                proxy.heal()
            eventually(one.is_leading, "the first one, healed, gains what the second gave back")
