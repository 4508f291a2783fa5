"""From a request in line to where it runs: what of its prompt is cached where, the cheapest
placement, its booking.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from baton.config.router import PlacementConfig
from router.fleet.fleet import Fleet
from router.fleet.fleet_arrays import Bools, FleetArrays
from router.index.prefix_index import PrefixIndex
from router.placement.choice import choose, ranked, trusted_speeds
from router.placement.placement import Placement, PlacementQuery
from router.placement.terms import TERMS
from router.placement.ticket import Placed, Ticket

MAX_SESSIONS = 1 << 16


def earliest_first_token_s(
    query: PlacementQuery, fleet: FleetArrays, ahead_tokens: float
) -> float | None:
    """Predict the seconds until a first token if all goes well. None: unknown.

    It takes the best worker for the prompt itself and, for `ahead_tokens` (prompt tokens of the
    requests before it in line), all workers together. Held workers, decode room and transfers are
    left out: they only add to it. None while a prefill worker's rate is unknown: it may be the
    fastest. A decode worker that never prefilled counts as fast as the fastest.
    """
    here = fleet.usable & (fleet.kv_class == query.kv_class)
    prefill = here & fleet.can_prefill & (query.policy.local_prefill != "always")
    decode = here & fleet.can_decode & (query.policy.local_prefill != "never" or not prefill.any())
    workers = np.flatnonzero(prefill | decode)
    learned = np.isfinite(fleet.prefill_measured_s)
    if not learned[workers].any() or not learned[prefill].all():
        return None
    line_s = ahead_tokens / query.tokens_per_s[workers].sum()
    queue_s = TERMS["queue"].of(fleet, query)
    assert queue_s is not None
    waits_s = np.maximum(queue_s[workers], line_s)
    return float((waits_s + query.prefill_s[workers]).min())


class Placing:
    """Look up, choose and book; the line is `Admission`'s. Owns the last decode worker of each
    session; the session that was quiet for longest is forgotten first."""

    def __init__(
        self, config: PlacementConfig, fleet: Fleet, index: PrefixIndex, rng: random.Random
    ) -> None:
        self._config, self._fleet, self._index, self._rng = config, fleet, index, rng
        self._ran_on: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()

    def best(self, ticket: Ticket, reserved: Bools, now: float) -> Placement | None:
        """Return the cheapest placement where there is room, over all classes of workers."""
        found = (
            choose(query, self._fleet.arrays, self._rng)
            for query in self.queries(ticket, now, reserved)
        )
        return min((p for p in found if p is not None), key=lambda p: p.cost_s, default=None)

    def candidates(self, ticket: Ticket, now: float, limit: int) -> list[Placement]:
        """Return the placements, cheapest first, at most `limit`."""
        found: list[Placement] = []
        for query in self.queries(ticket, now):
            found.extend(ranked(query, self._fleet.arrays, limit))
        return sorted(found, key=lambda p: p.cost_s)[:limit]

    def earliest_s(self, ticket: Ticket, ahead_tokens: int, now: float) -> float | None:
        """Return the seconds until the first token at the earliest, with this many prompt tokens
        before it in line. None: unknown."""
        expected = [
            earliest_first_token_s(query, self._fleet.arrays, ahead_tokens)
            for query in self.queries(ticket, now)
        ]
        known = [seconds for seconds in expected if seconds is not None]
        return min(known) if known and len(known) == len(expected) else None

    def book(self, ticket: Ticket, placement: Placement, now: float) -> Placed:
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        booking = self._fleet.book(*placement.load(growth))
        facts = booking.decode.facts
        hashes = ticket.prompt.hashes(facts.kv_fingerprint, facts.block_size)
        expires_s = now + self._config.prediction_ttl_s
        slots = {booking.prefill.slot, booking.decode.slot}
        self._index.predict(slots, hashes, now, expires_s)
        if ticket.session is not None:
            self._ran_on[ticket.session] = facts.identity
            self._ran_on.move_to_end(ticket.session)
            if len(self._ran_on) > MAX_SESSIONS:
                self._ran_on.popitem(last=False)
        return Placed(placement, booking)

    def queries(
        self, ticket: Ticket, now: float, reserved: Bools | None = None
    ) -> Sequence[PlacementQuery]:
        """Make a query for each class of workers that exchange KV; note on the ticket what of its
        prompt is left to compute."""
        prompt, num_slots = ticket.prompt, self._fleet.num_slots
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        failed = self._fleet.slots_of(ticket.failed)
        last = None if ticket.session is None else self._ran_on.get(ticket.session)
        preferred = None if last is None else next(iter(self._fleet.slots_of([last])), None)
        since_s = now - self._config.trust_rates_s if ticket.explores else -math.inf
        queries = []
        for kv_class, number in self._fleet.kinds.classes:
            hashes = prompt.hashes(kv_class.kv_fingerprint, kv_class.block_size)
            blocks = self._index.lookup(hashes, num_slots, now)
            cached = np.minimum(blocks * kv_class.block_size, max(0, len(prompt) - 1))
            rates, steps = trusted_speeds(self._fleet.arrays, number, since_s)
            queries.append(
                PlacementQuery(
                    num_tokens=len(prompt),
                    max_new_tokens=growth,
                    kv_class=number,
                    cached_tokens=cached,
                    tokens_per_s=rates,
                    step_s=steps,
                    policy=self._config,
                    now_s=now,
                    least_new_tokens=ticket.least_new_tokens,
                    failed=failed,
                    reserved=reserved,
                    explores=ticket.explores,
                    preferred=preferred,
                )
            )
        if queries:
            most_cached = max(int(query.cached_tokens.max(initial=0)) for query in queries)
            ticket.uncached_tokens = len(prompt) - most_cached
        return queries
