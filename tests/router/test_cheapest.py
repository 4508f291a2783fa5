"""The choice must find what looking at every pair finds, and name the same terms."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.router import LocalPrefill, PlacementConfig
from router.placement.choice import TIE_TOLERANCE_S, choose, ranked
from tests.router.fleets import entry_of, query, two_and_two
from tests.router.placement_oracle import NOW_S, candidates, random_fleet, random_query


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_slots=st.sampled_from([2, 6, 16, 40, 150]),
    local_prefill=st.sampled_from(["auto", "auto", "never", "always"]),
)
def test_the_choice_is_one_of_the_cheapest_of_all_pairs(
    seed: int, num_slots: int, local_prefill: LocalPrefill
) -> None:
    rng = np.random.default_rng(seed)
    fleet = random_fleet(rng, num_slots)
    asked = random_query(rng, fleet, PlacementConfig(local_prefill=local_prefill))
    expected = candidates(asked, fleet)
    chosen = choose(asked, fleet, random.Random(seed))
    everything = ranked(asked, fleet, len(expected) + 1)
    assert {(p.prefill_slot, p.decode_slot) for p in everything} == expected.keys()
    assert [p.cost_s for p in everything] == sorted(p.cost_s for p in everything)
    for placement in everything if chosen is None else (chosen, *everything):
        terms_s = expected[placement.prefill_slot, placement.decode_slot]
        named = {name: seconds for name, seconds in placement.terms_s.items() if seconds}
        assert named == pytest.approx({n: s for n, s in terms_s.items() if s}, abs=2e-9)
        assert placement.cost_s == pytest.approx(sum(terms_s.values()), abs=2e-9)
    if chosen is None:
        assert not expected
    else:
        least_s = min(sum(terms_s.values()) for terms_s in expected.values())
        assert chosen.cost_s == pytest.approx(least_s, abs=2e-9)


@pytest.mark.parametrize("seed", range(20))
def test_each_of_the_cheapest_pairs_is_chosen_at_times(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fleet = random_fleet(rng, 8)
    asked = random_query(rng, fleet)
    fleet.queued_tokens[:] = fleet.running[:] = fleet.head_tokens[:] = 0
    asked = dataclasses.replace(asked, cached_tokens=asked.cached_tokens * 0, preferred=None)
    costs = {pair: sum(terms_s.values()) for pair, terms_s in candidates(asked, fleet).items()}
    least = min(costs.values(), default=np.inf)
    draws = random.Random(seed)
    chosen = {
        (found.prefill_slot, found.decode_slot)
        for _ in range(300)
        if (found := choose(asked, fleet, draws))
    }
    assert chosen == {pair for pair, cost in costs.items() if cost <= least + TIE_TOLERANCE_S}


@pytest.mark.parametrize("queued", range(0, 8000, 250))
def test_a_prefill_worker_with_a_queue_is_chosen_where_its_link_makes_up_for_it(
    queued: int,
) -> None:
    """p0 is the cheapest for d0, which holds the prompt and is busy; so others may be for d1."""
    fleet = two_and_two()
    p0, p1, d0, d1 = (entry_of(fleet, name).slot for name in ("p0", "p1", "d0", "d1"))
    columns = fleet.arrays
    columns.handoff_bytes_per_s[[p0, p1]] = 5e7, 1e10
    columns.queued_tokens[p1] = queued
    columns.decode_step_s[[d0, d1]] = 3.0, 0.01
    columns.decode_measured_s[[d0, d1]] = NOW_S
    asked = dataclasses.replace(
        query(fleet, 4000, d0=3999), policy=PlacementConfig(local_prefill="never")
    )
    expected = candidates(asked, columns)
    chosen = choose(asked, columns, random.Random(0))
    assert chosen is not None
    pair = chosen.prefill_slot, chosen.decode_slot
    assert pair == min(expected, key=lambda each: sum(expected[each].values()))
