"""The native choice must find what looking at every pair finds, and so must its twin in Python."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.router import PlacementConfig
from router.fleet.fleet_arrays import FleetArrays
from router.placement.choice import (
    SESSION_TOLERANCE_S,
    TIE_TOLERANCE_S,
    choose,
    choose_in_python,
    native_library,
)
from router.placement.placement import (
    Placement,
    PlacementQuery,
    evaluate,
    ranked,
    terms_of,
)

NOW_S = 100.0
Pair = tuple[int | None, int]
Way = Callable[..., Placement | None]


def costs_of(found: Placement) -> list[float]:
    """Each term in seconds, and their sum."""
    return [found.queue_s, found.prefill_s, found.transfer_s, found.decode_s, found.cost_s]


def random_fleet(rng: np.random.Generator, num_slots: int) -> FleetArrays:
    """Few distinct values in every column, so that groups, ties and shortages all occur."""
    fleet = FleetArrays.empty(num_slots)
    fleet.names = [f"w{slot}" for slot in range(num_slots)]

    def column(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return rng.choice(np.array(values), num_slots)

    fleet.kv_class[:] = rng.choice([0, 0, 0, 1, -1], num_slots)
    roles = rng.choice([1, 2, 2, 3], num_slots)
    fleet.can_prefill[:], fleet.can_decode[:] = roles & 1 > 0, roles & 2 > 0
    fleet.usable[:] = rng.random(num_slots) < 0.9
    fleet.hold_until_s[:] = column(0.0, 0.0, 0.0, NOW_S + 1)
    fleet.prefill_tokens_per_s[:] = column(1000.0, 2000.0, 8000.0)
    fleet.prefill_measured_s[:] = column(-np.inf, NOW_S - 60, NOW_S)
    fleet.decode_step_s[:] = column(0.01, 0.02)
    fleet.decode_measured_s[:] = column(-np.inf, NOW_S - 60, NOW_S)
    fleet.handoff_bytes_per_s[:] = column(1e8, 1e9, 1e10)
    fleet.kv_bytes_per_token[:] = column(1 << 16, 1 << 17)
    fleet.queued_tokens[:] = column(0, 0, 500, 20_000)
    fleet.head_tokens[:] = np.minimum(fleet.queued_tokens, column(0, 400))
    fleet.head_since_s[:] = column(NOW_S - 1, NOW_S)
    fleet.running[:] = column(0, 0, 1, 3, 8)
    fleet.max_running[:] = column(8, 16)
    fleet.free_tokens[:] = column(0, 500, 10_000)
    fleet.longest_request[:] = column(600, 10_000)
    fleet.max_held_tokens[:] = column(np.inf, 512)
    fleet.unquarantined_tokens[:] = column(np.inf, np.inf, 400)
    if rng.random() < 0.7:
        for writer, reader in rng.integers(0, num_slots, (int(rng.choice([1, 4, 200])), 2)):
            rate = fleet.handoff_bytes_per_s[writer]
            for _ in range(20):
                fleet.links.observe(writer, reader, rate * rng.choice([0.1, 1.0, 8.0]), rate)
            fleet.links.compare(writer, rate)
    return fleet


def random_query(rng: np.random.Generator, num_slots: int) -> PlacementQuery:
    num_tokens = int(rng.choice([1, 300, 700, 4000]))
    held = [0, 0, 16, 256, 3999] if rng.random() < 0.7 else range(4000)  # few or many groups
    cached = np.minimum(rng.choice(held, num_slots), num_tokens - 1)
    failed = rng.choice(num_slots, rng.integers(0, 3), replace=False)
    return PlacementQuery(
        num_tokens,
        max_new_tokens=16,
        kv_class=0,
        cached_tokens=cached,
        failed=frozenset(failed.tolist()),
        reserved=rng.random(num_slots) < 0.1 if rng.random() < 0.5 else None,
        explores=bool(rng.random() < 0.3),
        preferred=int(rng.integers(num_slots)) if rng.random() < 0.5 else None,
    )


def cheapest_pairs(
    query: PlacementQuery, fleet: FleetArrays, policy: PlacementConfig
) -> tuple[float, set[Pair]]:
    """The least cost of all candidates, and who has it."""
    terms = terms_of(query, fleet, policy, NOW_S)
    costs = evaluate(terms, fleet, policy)
    least = float(costs.min(initial=np.inf))
    if least == np.inf:
        return least, set()
    writers = [*terms.prefill_slots.tolist(), None]
    rows, columns = (costs <= least + TIE_TOLERANCE_S).nonzero()
    return least, {(writers[r], int(terms.decode_slots[c])) for r, c in zip(rows, columns)}


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_slots=st.sampled_from([2, 6, 16, 40, 150]),
    local_prefill=st.sampled_from(["auto", "auto", "never", "always"]),
    way=st.sampled_from([choose, choose_in_python]),
)
def test_the_choice_is_one_of_the_cheapest_of_all_pairs(
    seed: int, num_slots: int, local_prefill: str, way: Way
) -> None:
    assert native_library() is not None
    rng = np.random.default_rng(seed)
    fleet, query = random_fleet(rng, num_slots), random_query(rng, num_slots)
    policy = PlacementConfig(local_prefill=local_prefill)  # type: ignore[arg-type]
    least, pairs = cheapest_pairs(query, fleet, policy)
    chosen = way(query, fleet, policy, NOW_S, random.Random(seed))
    if chosen is None:
        assert not pairs
    elif chosen.decode_slot == query.preferred:
        assert chosen.cost_s <= least + SESSION_TOLERANCE_S + 2e-9
    else:
        assert (chosen.prefill_slot, chosen.decode_slot) in pairs
        assert query.preferred not in {decode for _, decode in pairs}
        assert chosen.cost_s == pytest.approx(least, abs=2e-9)
    if chosen is not None:
        pair = (chosen.prefill_slot, chosen.decode_slot)
        everything = ranked(query, fleet, policy, NOW_S, 10**6)
        (same,) = [p for p in everything if (p.prefill_slot, p.decode_slot) == pair]
        assert costs_of(chosen) == pytest.approx(costs_of(same), abs=2e-9)


@pytest.mark.parametrize("way", [choose, choose_in_python])
@pytest.mark.parametrize("seed", range(20))
def test_each_of_the_cheapest_pairs_is_chosen_at_times(seed: int, way: Way) -> None:
    rng = np.random.default_rng(seed)
    fleet, query = random_fleet(rng, 8), random_query(rng, 8)
    fleet.queued_tokens[:] = fleet.running[:] = 0
    query = dataclasses.replace(query, cached_tokens=query.cached_tokens * 0, preferred=None)
    _, pairs = cheapest_pairs(query, fleet, PlacementConfig())
    draws = random.Random(seed)
    chosen = {
        (found.prefill_slot, found.decode_slot)
        for _ in range(300)
        if (found := way(query, fleet, PlacementConfig(), NOW_S, draws))
    }
    assert chosen == pairs
