"""Links that are slower or faster than their writers."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.fleet import DEFAULT_HANDOFF_BYTES_PER_S, Fleet
from router.fleet.link_rates import LinkRates
from tests.router.fleets import POLICY, cheapest, entry_of, facts, pick, query, two_and_two

NEVER = dataclasses.replace(POLICY, local_prefill="never")
GIB = 1 << 30


def hand_off(fleet: Fleet, prefill: str, decode: str, bytes_per_s: float, times: int = 1) -> None:
    """Handoffs from one to the other, at this rate."""
    held = {prefill: 999, decode: 999}
    placement = cheapest(fleet, query(fleet, 1000, **held), NEVER)
    assert (placement.prefill_worker, placement.decode_worker) == (prefill, decode)
    booking = fleet.book(*placement.load(1))
    for _ in range(times):
        fleet.observe_handoff(booking, GIB, GIB / bytes_per_s)
    fleet.release(booking)


def test_a_slow_link_is_avoided_but_not_its_ends() -> None:
    fleet = two_and_two()
    rate = DEFAULT_HANDOFF_BYTES_PER_S
    for prefill in ("p0", "p1"):
        for decode in ("d0", "d1"):
            hand_off(fleet, prefill, decode, rate)
    for _ in range(20):
        hand_off(fleet, "p0", "d0", rate / 16)
        hand_off(fleet, "p0", "d1", rate)
    assert pick(fleet, query(fleet, 4000, p0=3999), NEVER) == ("p0", "d1")
    assert pick(fleet, query(fleet, 4000, p0=3000, d0=3000), NEVER)[0] == "p0"
    wanted = query(fleet, 4000, explores=True, p0=3999, d1=0)
    slow = cheapest(fleet, dataclasses.replace(wanted, reserved=only(fleet, "d0")), NEVER)
    assert (slow.prefill_worker, slow.decode_worker) == ("p0", "d0")  # looked at again at times


def only(fleet: Fleet, worker_id: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Everyone else is kept for another request."""
    reserved = np.ones(fleet.num_slots, dtype=np.bool_)
    reserved[entry_of(fleet, worker_id).slot] = False
    return reserved


def test_a_worker_that_gets_a_slot_inherits_no_link() -> None:
    fleet = two_and_two()
    hand_off(fleet, "p0", "d0", 1e6, times=30)
    hand_off(fleet, "p0", "d1", 1e10, times=30)
    assert not fleet.arrays.links.are_plain
    for worker_id, prefills in (("p0", True), ("d0", False)):
        fleet.remove(entry_of(fleet, worker_id))
        fleet.add(facts(f"new-{worker_id}", prefills, not prefills))
    assert fleet.arrays.links.are_plain


STEPS = st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from([1e6, 1e8, 1e9, 1e11]))


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=40), st.lists(st.integers(0, 5), max_size=3))
def test_links_are_plain_when_all_are_as_fast_as_their_writers(
    seen: list[tuple[int, int, float]], left: list[int]
) -> None:
    links = LinkRates(3).grown()
    for writer, reader, rate in seen:
        for _ in range(12):
            links.observe(writer, reader, rate, 1e9)
        links.compare(writer, 1e9)
    for slot in left:
        links.forget(slot)
    assert links.are_plain == bool((links.slowness == 1).all())
