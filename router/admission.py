"""The router's queue: a request leaves it with a placement and its booking.

A request goes on only when a decode worker has room and the prefill it is best off with can start
within `lease_lead_s`, so that queued prompts strand no decode memory. Order: priority, arrival;
a request may be overtaken by one that can start now, but not for longer than `max_bypass_s`.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.errors import NoCapacityError, OverloadedError, UnavailableError
from router.config import RouterConfig
from router.fleet import Booking, Fleet
from router.placement import Placement, PlacementQuery, choose, ranked
from router.prefix_index import PrefixIndex
from router.prompt import PromptBlocks

SCAN_AHEAD = 32  # requests tried per round
POLL_S = 0.25  # longest time between rounds while requests wait


@dataclass(order=True)
class Ticket:
    """A request's place in line, kept over its retries."""

    rank: tuple[int, int]  # (-priority, arrival)
    prompt: PromptBlocks = field(compare=False)
    max_new_tokens: int = field(compare=False)
    failed: set[int] = field(compare=False, default_factory=set)
    """Slots on which the request failed."""
    since_s: float = field(compare=False, default=0.0)
    placed: asyncio.Future[Placed] | None = field(compare=False, default=None)


@dataclass(frozen=True)
class Placed:
    placement: Placement
    booking: Booking
    kv_fingerprint: bytes
    alternatives: int


class Admission:
    """Own the queue of requests that wait for a placement."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        index: PrefixIndex,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._config, self._fleet, self._index = config, fleet, index
        self._clock, self._rng = clock, rng
        self._arrivals = itertools.count()
        self._waiting: list[Ticket] = []
        self._round: asyncio.TimerHandle | asyncio.Handle | None = None
        self._round_at_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def ticket(self, prompt: PromptBlocks, max_new_tokens: int, priority: int) -> Ticket:
        """Raises OverloadedError when the queue is full."""
        if len(self._waiting) >= self._config.max_queue:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting already",
                retry_after_s=self._config.overload_retry_s,
            )
        return Ticket((-priority, next(self._arrivals)), prompt, max_new_tokens)

    async def place(self, ticket: Ticket) -> Placed:
        """Wait in line, then return a booked placement: the caller releases the booking.

        Raises NoCapacityError when the request is too large for any worker, UnavailableError when
        no worker could run it for `fleet_wait_s`.
        """
        self._refuse_too_large(ticket)
        ticket.since_s = self._clock()
        ticket.placed = asyncio.get_running_loop().create_future()
        bisect.insort(self._waiting, ticket)
        self.kick()
        try:
            return await ticket.placed
        except asyncio.CancelledError:
            done = ticket.placed
            if done.done() and not done.cancelled() and done.exception() is None:
                self._fleet.release(done.result().booking)  # placed and cancelled at once
            raise
        finally:
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        at = bisect.bisect_left(self._waiting, ticket)
        if at < len(self._waiting) and self._waiting[at] is ticket:
            del self._waiting[at]

    def kick(self) -> None:
        """Something changed: try the waiting requests soon, many changes at once."""
        if self._waiting:
            self._schedule(0.0)

    def candidates(self, prompt: PromptBlocks, max_new_tokens: int, limit: int) -> list[Placement]:
        """Every placement of a prompt, cheapest first. Books nothing."""
        ticket = Ticket((0, 0), prompt, max_new_tokens)
        now = self._clock()
        found: list[Placement] = []
        for query in self._queries(ticket, now):
            found.extend(ranked(query, self._fleet.arrays, self._config, now, limit))
        return sorted(found, key=lambda p: p.cost_s)[:limit]

    # --- rounds --------------------------------------------------------------------------------

    def _schedule(self, delay_s: float) -> None:
        at_s = self._clock() + delay_s
        if self._round is not None:
            if self._round_at_s <= at_s:
                return
            self._round.cancel()
        loop = asyncio.get_running_loop()
        self._round_at_s = at_s
        self._round = (
            loop.call_later(delay_s, self._run_round)
            if delay_s
            else loop.call_soon(self._run_round)
        )

    def _run_round(self) -> None:
        self._round = None
        now = self._clock()
        next_s = POLL_S
        for ticket in self._waiting[:SCAN_AHEAD]:
            assert ticket.placed is not None
            if ticket.placed.done():
                continue
            wait_s = self._try(ticket, now)
            if wait_s is None:
                continue
            next_s = min(next_s, wait_s)
            if now - ticket.since_s > self._config.max_bypass_s:
                break
        self._waiting = [t for t in self._waiting if t.placed is not None and not t.placed.done()]
        if self._waiting:
            self._refuse_without_fleet(now)
            self._schedule(max(next_s, 0.002))

    def _try(self, ticket: Ticket, now: float) -> float | None:
        """Place a request; or say after how many seconds trying again may help."""
        best: tuple[Placement, PlacementQuery] | None = None
        for query in self._queries(ticket, now):
            placement = choose(query, self._fleet.arrays, self._config, now, self._rng)
            if placement and (best is None or placement.cost_s < best[0].cost_s):
                best = placement, query
        if best is None:
            return self._next_release_s(now)
        placement, _ = best
        if placement.queue_s > self._config.lease_lead_s:
            return placement.queue_s - self._config.lease_lead_s
        assert ticket.placed is not None
        ticket.placed.set_result(self._book(ticket, placement, now))
        return None

    def _next_release_s(self, now: float) -> float:
        """Until a held worker may be asked again; other changes come as kicks."""
        holds = self._fleet.arrays.hold_until_s - now
        return float(min(holds[holds > 0], default=POLL_S))

    def _book(self, ticket: Ticket, placement: Placement, now: float) -> Placed:
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        booking = self._fleet.book(placement, growth)
        facts = booking.decode.facts
        hashes = ticket.prompt.hashes(*facts.kv_class)
        expires_s = now + self._config.prediction_ttl_s
        for entry in {booking.prefill.slot, booking.decode.slot}:
            self._index.predict(entry, hashes, now, expires_s)
        return Placed(placement, booking, facts.kv_fingerprint, len(self._fleet))

    def _queries(self, ticket: Ticket, now: float) -> Sequence[PlacementQuery]:
        """One per class of workers that exchange KV."""
        prompt, num_slots = ticket.prompt, self._fleet.num_slots
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        queries = []
        for fingerprint, block_size, kv_class in self._fleet.classes():
            hashes = prompt.hashes(fingerprint, block_size)
            blocks = self._index.lookup_predicted(hashes, num_slots, now)
            cached = np.minimum(blocks * block_size, max(0, len(prompt) - 1))
            failed = frozenset(ticket.failed)
            queries.append(PlacementQuery(len(prompt), growth, kv_class, cached, failed))
        return queries

    # --- refusals ------------------------------------------------------------------------------

    def _refuse_too_large(self, ticket: Ticket) -> None:
        holders = [e.facts for e in self._fleet if e.facts.can_decode]
        largest = max((f.num_blocks * f.block_size for f in holders), default=None)
        if largest is not None and len(ticket.prompt) >= largest:
            raise NoCapacityError(
                f"{len(ticket.prompt)} tokens exceed the KV memory of every decode worker"
                f" ({largest} tokens)"
            )

    def _refuse_without_fleet(self, now: float) -> None:
        if any(entry.usable and entry.facts.can_decode for entry in self._fleet):
            return
        for ticket in self._waiting:
            if now - ticket.since_s >= self._config.fleet_wait_s:
                assert ticket.placed is not None
                ticket.placed.set_exception(
                    UnavailableError("no decode worker is live", retry_after_s=1.0)
                )
