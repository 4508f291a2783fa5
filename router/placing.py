"""From a request in line to where it runs: what of its prompt is cached where, which cohorts can
serve it, the cheapest placement, its booking.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from router.cohort_texts import TextId
from router.cohorts import Cohort
from router.config import RouterConfig
from router.fleet import Fleet
from router.placement import Bools, Placement, PlacementQuery, Reach, choose, ranked, reach
from router.prediction import earliest_first_token_s
from router.prefix_index import PrefixIndex
from router.ticket import Placed, Size, Ticket
from router.worker_facts import KvClass, ModelIds

Kinds = Mapping[KvClass, set[tuple[float, float]]]
"""Per class of workers, (request tokens, prompt tokens) of its decode workers (`Reach.kinds`)."""


class Placing:
    """Look up, choose and book; the line is `Admission`'s."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, index: PrefixIndex, rng: random.Random
    ) -> None:
        self._config, self._fleet, self._index, self._rng = config, fleet, index, rng

    # --- who can serve -------------------------------------------------------------------------

    def reach(self) -> Reach:
        return reach(self._fleet.arrays, self._config)

    def kinds(self, within_reach: Reach) -> Kinds:
        classes = self._fleet.kinds.classes
        if len(classes) == 1:
            return {classes[0][0]: within_reach.kinds()}
        held = self._fleet.arrays.kv_class
        return {kv_class: within_reach.of(held == number).kinds() for kv_class, number in classes}

    def _able(self, ticket: Ticket, kinds: Kinds) -> set[Cohort]:
        """The cohorts that can serve the request, once they have room."""
        able = set()
        for kv_class, taken in kinds.items():
            size = self._size_at(ticket, kv_class.cohort)
            if size is None or not self._fleet.kinds.runs(kv_class, ticket.model_ids):
                continue
            total, num_tokens = size
            if any(total <= longest and num_tokens <= prompt for longest, prompt in taken):
                able.add(kv_class.cohort)
        return able

    def _size_at(self, ticket: Ticket, cohort: Cohort) -> Size | None:
        """With the cohort's text, as far as is known: about as with another. None: that text is not
        read, or refuses it."""
        texts = self._fleet.texts
        text = texts.of(cohort)
        if ticket.keeps_text or text == ticket.text:
            return ticket.size
        if text is None or text in ticket.refusals:
            return None
        is_others = ticket.is_of_ids and not ticket.is_bound
        if is_others and not texts.have_the_same_ids(text, ticket.text):
            return None
        return ticket.other_sizes.get(text, ticket.size)

    def other_text(self, ticket: Ticket) -> TextId | None:
        """What the request has to be read with before it can go where it has drawn; None: it is."""
        texts = self._fleet.texts
        if ticket.keeps_text or ticket.cohort is None or not texts.knows(ticket.cohort):
            return None
        text = texts.of(ticket.cohort)
        return None if text == ticket.text else text

    def slots_for(self, ticket: Ticket) -> Bools:
        """[slots] The workers of its cohort and model."""
        numbers = [number for _, number in self._classes_for(ticket)]
        return np.isin(self._fleet.arrays.kv_class, numbers)

    def class_numbers(self) -> Callable[[Ticket], Sequence[int]]:
        """Of the classes of workers that a request may use, for as long as the fleet is as it is
        now: many in line may use the same."""
        known: dict[tuple[Cohort | None, ModelIds, TextId | None], Sequence[int]] = {}

        def numbers_for(ticket: Ticket) -> Sequence[int]:
            key = (ticket.cohort, ticket.model_ids, None if ticket.keeps_text else ticket.text)
            if key not in known:
                known[key] = [number for _, number in self._classes_for(ticket)]
            return known[key]

        return numbers_for

    def _classes_for(self, ticket: Ticket) -> Sequence[tuple[KvClass, int]]:
        """None of another text, whatever is drawn: its workers would be given another's ids. Those
        of a stream that has begun here are its model's."""
        kinds, texts = self._fleet.kinds, self._fleet.texts
        return [
            (kv_class, number)
            for kv_class, number in kinds.classes
            if ticket.cohort in (None, kv_class.cohort)
            and (ticket.keeps_text or texts.of(kv_class.cohort) == ticket.text)
            and kinds.runs(kv_class, ticket.model_ids)
        ]

    def draw(self, ticket: Ticket, kinds: Kinds, anew: bool) -> bool:
        """Give the request its cohort, unless it is bound to one, or has one that can serve it and
        nothing has changed (`anew`); whether it can be served. One that failed it again and again
        is its last choice: a version that is not fit must not cost its clients an error."""
        cohorts, able = self._fleet.cohorts, self._able(ticket, kinds)
        if ticket.is_bound:
            return ticket.cohort in able
        others = able - ticket.failed_cohorts
        if any(cohorts.weights.get(cohort) for cohort in others):
            able = others
        if ticket.cohort in able and not anew:
            return True
        ticket.cohort = cohorts.draw(ticket.wire_id, able) if able else None
        return bool(able)

    def draw_at_once(self, ticket: Ticket) -> None:
        """Before it is in line: with one cohort of its text there is nothing to draw."""
        here = self._fleet.kinds.cohorts
        if len(here) > 1 or not self._fleet.texts.is_only(ticket.text):
            self.draw(ticket, self.kinds(self.reach()), anew=True)

    # --- where it goes -------------------------------------------------------------------------

    def best(self, ticket: Ticket, reserved: Bools, now: float) -> Placement | None:
        """The cheapest placement where there is room, over all classes of workers."""
        found = (
            choose(query, self._fleet.arrays, self._config, now, self._rng)
            for query in self.queries(ticket, now, reserved)
        )
        return min((p for p in found if p is not None), key=lambda p: p.cost_s, default=None)

    def candidates(self, ticket: Ticket, now: float, limit: int) -> list[Placement]:
        """Every placement, cheapest first, those of the ticket's cohort before all others."""
        found: list[Placement] = []
        for query in self.queries(ticket, now, everywhere=True):
            found.extend(ranked(query, self._fleet.arrays, self._config, now, limit))
        return sorted(found, key=lambda p: (p.cohort != ticket.cohort, p.cost_s))[:limit]

    def earliest_s(self, ticket: Ticket, ahead_tokens: int, now: float) -> float | None:
        """Seconds until the first token at the earliest, with so many prompt tokens before it in
        line; None when it cannot be told."""
        expected = [
            earliest_first_token_s(query, self._fleet.arrays, self._config, ahead_tokens, now)
            for query in self.queries(ticket, now)
        ]
        known = [seconds for seconds in expected if seconds is not None]
        return min(known) if known and len(known) == len(expected) else None

    def book(self, ticket: Ticket, placement: Placement, now: float) -> Placed:
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        booking = self._fleet.book(placement, growth)
        facts = booking.decode.facts
        hashes = ticket.prompt.hashes(facts.kv_fingerprint, facts.block_size)
        expires_s = now + self._config.prediction_ttl_s
        slots = {booking.prefill.slot, booking.decode.slot}
        self._index.predict(slots, hashes, now, expires_s)
        return Placed(placement, booking, facts.kv_fingerprint)

    def queries(
        self,
        ticket: Ticket,
        now: float,
        reserved: Bools | None = None,
        everywhere: bool = False,
    ) -> Sequence[PlacementQuery]:
        """One per class of workers that exchange KV, of the ticket's cohort and model if it has
        them; notes on the ticket what of its prompt is left to compute."""
        prompt, num_slots = ticket.prompt, self._fleet.num_slots
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        failed = self._fleet.slots_of(ticket.failed)
        queries = []
        for kv_class, number in (
            self._fleet.kinds.classes if everywhere else self._classes_for(ticket)
        ):
            hashes = prompt.hashes(kv_class.kv_fingerprint, kv_class.block_size)
            blocks = self._index.lookup_predicted(hashes, num_slots, now)
            cached = np.minimum(blocks * kv_class.block_size, max(0, len(prompt) - 1))
            queries.append(
                PlacementQuery(
                    num_tokens=len(prompt),
                    max_new_tokens=growth,
                    kv_class=number,
                    cached_tokens=cached,
                    least_new_tokens=ticket.least_new_tokens,
                    failed=failed,
                    reserved=reserved,
                    explores=ticket.explores,
                    cohort=kv_class.cohort,
                )
            )
        if queries:
            most_cached = max(int(query.cached_tokens.max(initial=0)) for query in queries)
            ticket.uncached_tokens = len(prompt) - most_cached
        return queries
