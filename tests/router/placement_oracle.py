"""What every placement of a prompt costs, one worker and one pair at a time: the oracle of
`choice.cpp` and of the terms. And fleets and prompts at random to compare them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from baton.config.router import PlacementConfig
from router.fleet.fleet_arrays import FleetArrays, Floats
from router.placement.choice import trusted_speeds
from router.placement.placement import PlacementQuery
from tests.router.fleets import POLICY

NOW_S = 100.0
Pair = tuple[int | None, int]
"""Prefill slot (None: the decode worker prefills) and decode slot."""


def random_fleet(rng: np.random.Generator, num_slots: int) -> FleetArrays:
    """Few distinct values in every column, so that groups, ties and shortages all occur."""
    fleet = FleetArrays(num_slots)
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


def random_query(
    rng: np.random.Generator, fleet: FleetArrays, policy: PlacementConfig = POLICY
) -> PlacementQuery:
    num_slots, explores = len(fleet.names), bool(rng.random() < 0.3)
    speeds = trusted_speeds(fleet, 0, NOW_S - policy.trust_rates_s if explores else -np.inf)
    num_tokens = int(rng.choice([1, 300, 700, 4000]))
    held = [0, 0, 16, 256, 3999] if rng.random() < 0.7 else range(4000)  # few or many groups
    cached = np.minimum(rng.choice(held, num_slots), num_tokens - 1)
    failed = rng.choice(num_slots, rng.integers(0, 3), replace=False)
    return PlacementQuery(
        num_tokens,
        max_new_tokens=16,
        kv_class=0,
        cached_tokens=cached,
        tokens_per_s=speeds[0],
        step_s=speeds[1],
        policy=policy,
        now_s=NOW_S,
        failed=frozenset(failed.tolist()),
        reserved=rng.random(num_slots) < 0.1 if rng.random() < 0.5 else None,
        explores=explores,
        preferred=int(rng.integers(num_slots)) if rng.random() < 0.5 else None,
    )


def believed(
    figures: Floats,
    measured_s: Floats,
    here: Iterable[int],
    since_s: float,
    best: Callable[..., float],
) -> list[float]:
    """A speed of each worker: that of the best, where none was measured since then."""
    known = [figures[slot] for slot in here if np.isfinite(measured_s[slot])]
    is_old = [when < since_s or not np.isfinite(when) for when in measured_s]
    return [best(known) if known and old else own for own, old in zip(figures.tolist(), is_old)]


def candidates(query: PlacementQuery, fleet: FleetArrays) -> Mapping[Pair, Mapping[str, float]]:
    """The terms of every placement that is possible, in seconds by name."""
    return _Oracle(query, fleet).candidates()


class _Oracle:
    def __init__(self, query: PlacementQuery, fleet: FleetArrays) -> None:
        self.query, self.fleet, self.policy = query, fleet, query.policy
        self.uncached = (query.num_tokens - query.cached_tokens).tolist()
        since_s = query.now_s - self.policy.trust_rates_s if query.explores else -np.inf
        here = np.flatnonzero(fleet.usable & (fleet.kv_class == query.kv_class)).tolist()
        self.rates = believed(
            fleet.prefill_tokens_per_s, fleet.prefill_measured_s, here, since_s, max
        )
        self.steps = believed(fleet.decode_step_s, fleet.decode_measured_s, here, since_s, min)
        self.open = [slot for slot in here if self.is_open(slot)]

    def is_open(self, slot: int) -> bool:
        fleet, left = self.fleet, self.fleet.unquarantined_tokens[slot]
        has_room = self.query.num_tokens <= left or fleet.max_held_tokens[slot] <= left
        return bool(has_room and fleet.hold_until_s[slot] <= self.query.now_s)

    def may_prefill(self, slot: int) -> bool:
        fleet = self.fleet
        return bool(fleet.can_prefill[slot] and fleet.longest_request[slot] > self.query.num_tokens)

    def may_decode(self, slot: int) -> bool:
        fleet, query = self.fleet, self.query
        if query.reserved is not None and query.reserved[slot]:
            return False
        needed = min(self.uncached[slot] + query.max_new_tokens, fleet.max_held_tokens[slot])
        has_room = fleet.running[slot] == 0 or fleet.free_tokens[slot] >= needed
        fits = fleet.longest_request[slot] >= query.num_tokens + query.least_new_tokens
        has_place = fleet.running[slot] < fleet.max_running[slot]
        return bool(fleet.can_decode[slot] and has_room and fits and has_place)

    def at_prefill(self, slot: int) -> dict[str, float]:
        fleet, rate = self.fleet, self.rates[slot]
        done = min(fleet.head_tokens[slot], rate * (self.query.now_s - fleet.head_since_s[slot]))
        queue_s = float(fleet.queued_tokens[slot] - done) / rate
        return {"queue": queue_s, "prefill": max(1, self.uncached[slot]) / rate}

    def at_decode(self, slot: int) -> dict[str, float]:
        decode_s = 32 * self.steps[slot] * self.share(slot)
        return {"decode": decode_s, "session": -1e-3 if slot == self.query.preferred else 0.0}

    def share(self, slot: int) -> float:
        return float((self.fleet.running[slot] + 1) / self.fleet.max_running[slot])

    def retry(self, *slots: int) -> dict[str, float]:
        return {"retry": 30.0 * len(self.query.failed & set(slots))}

    def transfer_s(self, writer: int, reader: int, prefill_s: float) -> float:
        move_s = max(0, self.uncached[reader]) * self.fleet.kv_bytes_per_token[reader]
        move_s /= self.fleet.handoff_bytes_per_s[writer]
        if not self.query.explores:
            move_s *= self.fleet.links.slowness[writer, reader]
        hidden_s = 0.9 * min(move_s, prefill_s)
        return float(0.002 + move_s - hidden_s)

    def candidates(self) -> Mapping[Pair, Mapping[str, float]]:
        found: dict[Pair, Mapping[str, float]] = {}
        writers = [slot for slot in self.open if self.may_prefill(slot)]
        for reader in filter(self.may_decode, self.open):
            if self.policy.local_prefill != "never":
                terms = self.at_prefill(reader) | self.at_decode(reader) | self.retry(reader)
                weight = self.policy.local_prefill_weight - 1.0 + self.share(reader)
                terms["stall"] = terms["prefill"] * weight if writers else 0.0
                found[None, reader] = terms
            if self.policy.local_prefill != "always":
                for writer in set(writers) - {reader}:
                    terms = self.at_prefill(writer) | self.at_decode(reader)
                    terms["transfer"] = self.transfer_s(writer, reader, terms["prefill"])
                    found[writer, reader] = terms | self.retry(writer, reader)
        return found
