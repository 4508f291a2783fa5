"""The router's queue: a request leaves it with a placement and its booking.

A request goes on only when a decode worker has room and the prefill it is best off with can start
within `lease_lead_s`, so that queued prompts strand no decode memory. Order: priority, then a fair
share for every tenant, then arrival; a request may be overtaken by one that can start now. After
`max_bypass_s` the decode workers that it could itself use are kept for it; others serve whom they
can. One that no usable worker takes is refused after `fleet_wait_s`, which begins anew for as long
as a pool that it needs was scaled to zero: it is held until that is back. A full line sheds its
last request: the newest of the tenant that asked for most. A request whose first token would come
after its own deadline is refused at once.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from baton.errors import NoCapacityError, OverloadedError
from router.config import RouterConfig
from router.fair_share import FairShare
from router.fleet import Fleet
from router.placement import (
    Bools,
    Placement,
    PlacementQuery,
    Reach,
    choose,
    longest_open,
    ranked,
    reach,
)
from router.prediction import earliest_first_token_s
from router.prefix_index import PrefixIndex
from router.prompt import PromptBlocks
from router.refusals import stranded, too_large
from router.ticket import Placed, Ticket

SCAN_AHEAD = 32  # requests tried per round, of those that fit some open worker and can run at all
POLL_S = 0.25  # longest time between rounds while requests wait
ROUND_PAUSE = 4.0  # times what a round spent in vain: the event loop is left to the streams


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
        self._shares = FairShare()
        self._owed: Counter[str] = Counter()  # tokens that requests in line do not account for yet
        self._waiting: list[Ticket] = []
        self._round: asyncio.TimerHandle | asyncio.Handle | None = None
        self._round_at_s = self._pause_until_s = 0.0
        self._kinds: set[tuple[float, float]] = set()  # of workers, when last looked
        self._looked_at_s = -math.inf  # for who is stranded

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Sequence[Ticket]:
        """In line, first come first; placed ones may still be among them."""
        return self._waiting

    def ticket(
        self,
        prompt: PromptBlocks,
        max_new_tokens: int,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
    ) -> Ticket:
        """Raises OverloadedError when the queue is full of requests that go first."""
        rank = (-priority, self._shares.stamp(tenant), next(self._arrivals))
        if len(self._waiting) >= self._config.max_queue and not self._shed_after(rank):
            raise self._full()
        growth = min(max_new_tokens, self._config.decode_growth_tokens)
        work = len(prompt) + growth
        self._shares.charge(tenant, work)
        ticket = Ticket(rank, prompt, max_new_tokens, max_new_tokens, tenant, work)
        ticket.deadline_s, ticket.uncached_tokens = deadline_s, len(prompt)
        return ticket

    def emitted(self, tenant: str, num_before: int, num_after: int) -> None:
        """A request of the tenant has put out more tokens: it pays for those that its ticket did
        not, and so do its requests in line, which are to wait for as long."""
        paid = self._config.decode_growth_tokens
        work = max(0, num_after - paid) - max(0, num_before - paid)
        if work > 0:
            self._shares.charge(tenant, work)
            if self._waiting:
                self._owed[tenant] += work

    def _settle(self) -> None:
        """Put the requests in line where what their tenants owe moves them."""
        if not self._owed:
            return
        for ticket in self._waiting:
            if owed := self._owed[ticket.tenant] - ticket.owed_before:
                priority, stamp, arrival = ticket.rank
                ticket.rank = (priority, stamp + owed, arrival)
            ticket.owed_before = 0
        self._waiting.sort(key=lambda ticket: ticket.rank)
        self._owed.clear()

    def _shed_after(self, rank: tuple[int, float, int]) -> bool:
        """Refuse the last in line if it comes after `rank`, unless it has been placed before."""
        last = self._waiting[-1]
        if last.rank < rank or last.was_placed or last.placed is None or last.placed.done():
            return False
        del self._waiting[-1]
        last.placed.set_exception(self._full())
        return True

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"{self._config.max_queue} requests are waiting already",
            retry_after_s=self._config.overload_retry_s,
        )

    async def place(self, ticket: Ticket) -> Placed:
        """Wait in line, then return a booked placement: the caller releases the booking.

        Raises NoCapacityError when the request is too large for any worker, UnavailableError when
        no usable worker took it for `fleet_wait_s`, OverloadedError when it would come too late.
        """
        try:
            return await self._wait_in_line(ticket)
        finally:
            if not ticket.was_placed:
                self._shares.refund(ticket.tenant, ticket.charged)
                ticket.charged = 0

    async def _wait_in_line(self, ticket: Ticket) -> Placed:
        if error := self._too_large(ticket):
            raise error
        if not ticket.was_placed and (self._waiting or ticket.deadline_s is not None):
            self._refuse_too_late(ticket)
        ticket.since_s, ticket.stranded_since_s = self._clock(), None
        ticket.owed_before = self._owed[ticket.tenant]
        ticket.explores = self._rng.random() < self._config.explore_share
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

    def candidates(
        self, prompt: PromptBlocks, max_new_tokens: int, least_new_tokens: int, limit: int
    ) -> list[Placement]:
        """Every placement of a prompt, cheapest first. Books nothing."""
        ticket = Ticket((0, 0.0, 0), prompt, max_new_tokens, least_new_tokens)
        now = self._clock()
        found: list[Placement] = []
        for query in self._queries(ticket, now):
            found.extend(ranked(query, self._fleet.arrays, self._config, now, limit))
        return sorted(found, key=lambda p: p.cost_s)[:limit]

    # --- rounds --------------------------------------------------------------------------------

    def _schedule(self, delay_s: float) -> None:
        now = self._clock()
        at_s = max(now + delay_s, self._pause_until_s)
        if self._round is not None:
            if self._round_at_s <= at_s:
                return
            self._round.cancel()
        loop = asyncio.get_running_loop()
        self._round_at_s = at_s
        self._round = (
            loop.call_later(at_s - now, self._run_round)
            if at_s > now
            else loop.call_soon(self._run_round)
        )

    def _unschedule(self) -> None:
        if self._round is not None:
            self._round.cancel()
            self._round = None

    def _run_round(self) -> None:
        self._round = None
        now = self._clock()
        within_reach = reach(self._fleet.arrays, self._config)
        kinds = within_reach.kinds()
        if kinds != self._kinds or now - self._looked_at_s >= POLL_S:
            self._kinds, self._looked_at_s = kinds, now
            self._refuse_stranded(within_reach, now)
        next_s = self._try_in_order(within_reach, now)
        self._waiting = [t for t in self._waiting if t.placed is not None and not t.placed.done()]
        if self._waiting:
            self._schedule(max(next_s, 0.002))
        else:
            self._owed.clear()
            self._shares.idle()
            self._unschedule()

    def _try_in_order(self, within_reach: Reach, now: float) -> float:
        """Place who can start; return after how many seconds trying again may help."""
        config, arrays = self._config, self._fleet.arrays
        next_s, tries, in_vain = self._next_release_s(now), 0, 0
        reserved = np.zeros(self._fleet.num_slots, dtype=np.bool_)
        longest = longest_open(arrays, reserved, now)
        if longest:
            self._settle()
        for ticket in self._waiting:
            if not longest or tries == SCAN_AHEAD:
                break
            assert ticket.placed is not None
            if ticket.placed.done() or ticket.num_tokens > longest:
                continue
            if ticket.stranded_since_s is not None:
                continue  # and no worker's reach has changed since that was seen
            tries += 1
            best = self._best(ticket, reserved, now)
            if best is not None and best.queue_s <= config.lease_lead_s:
                ticket.placed.set_result(self._book(ticket, best, now))
            else:
                in_vain += 1
                if best is not None:
                    next_s = min(next_s, best.queue_s - config.lease_lead_s)
                if now - ticket.since_s <= config.max_bypass_s:
                    continue
                self._reserve(reserved, ticket, best, within_reach)
            longest = longest_open(arrays, reserved, now)
        ended_s = self._clock()
        spent_s = (ended_s - now) * (in_vain / tries if tries else 1.0)
        self._pause_until_s = ended_s + ROUND_PAUSE * spent_s
        return next_s

    def _best(self, ticket: Ticket, reserved: Bools, now: float) -> Placement | None:
        """The cheapest placement where there is room, over all classes of workers."""
        found = (
            choose(query, self._fleet.arrays, self._config, now, self._rng)
            for query in self._queries(ticket, now, reserved)
        )
        return min((p for p in found if p is not None), key=lambda p: p.cost_s, default=None)

    @staticmethod
    def _reserve(reserved: Bools, ticket: Ticket, best: Placement | None, limits: Reach) -> None:
        """Keep room for a request that has been overtaken for long enough: where it goes once its
        prefill can start, or wherever it could."""
        if best is not None:
            reserved[best.decode_slot] = True
        else:
            reserved |= limits.takes(len(ticket.prompt), ticket.least_new_tokens)

    def _next_release_s(self, now: float) -> float:
        """Until a held worker may be asked again; other changes come as kicks."""
        holds = self._fleet.arrays.hold_until_s - now
        return min(POLL_S, float(min(holds[holds > 0], default=POLL_S)))

    def _book(self, ticket: Ticket, placement: Placement, now: float) -> Placed:
        ticket.was_placed = True
        self._shares.served(ticket.rank[1])
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        booking = self._fleet.book(placement, growth)
        facts = booking.decode.facts
        hashes = ticket.prompt.hashes(*facts.kv_class)
        expires_s = now + self._config.prediction_ttl_s
        slots = {booking.prefill.slot, booking.decode.slot}
        self._index.predict(slots, hashes, now, expires_s)
        return Placed(placement, booking, facts.kv_fingerprint)

    def _queries(
        self, ticket: Ticket, now: float, reserved: Bools | None = None
    ) -> Sequence[PlacementQuery]:
        """One per class of workers that exchange KV."""
        prompt, num_slots = ticket.prompt, self._fleet.num_slots
        growth = min(ticket.max_new_tokens, self._config.decode_growth_tokens)
        failed = self._fleet.slots_of(ticket.failed)
        queries = []
        for fingerprint, block_size, kv_class in self._fleet.classes():
            hashes = prompt.hashes(fingerprint, block_size)
            blocks = self._index.lookup_predicted(hashes, num_slots, now)
            cached = np.minimum(blocks * block_size, max(0, len(prompt) - 1))
            queries.append(
                PlacementQuery(
                    num_tokens=len(prompt),
                    max_new_tokens=growth,
                    kv_class=kv_class,
                    cached_tokens=cached,
                    least_new_tokens=ticket.least_new_tokens,
                    failed=failed,
                    reserved=reserved,
                    explores=ticket.explores,
                )
            )
        if queries:
            most_cached = max(int(query.cached_tokens.max(initial=0)) for query in queries)
            ticket.uncached_tokens = len(prompt) - most_cached
        return queries

    # --- refusals ------------------------------------------------------------------------------

    def _too_large(self, ticket: Ticket) -> NoCapacityError | None:
        num_tokens, least = len(ticket.prompt), ticket.least_new_tokens
        return too_large(num_tokens, least, self._fleet, self._config)

    def _refuse_too_late(self, ticket: Ticket) -> None:
        now, queries = self._clock(), self._queries(ticket, self._clock())
        if not queries or ticket.deadline_s is None:
            return
        ahead = sum(other.uncached_tokens for other in self._waiting if other.rank < ticket.rank)
        expected = [
            earliest_first_token_s(query, self._fleet.arrays, self._config, ahead, now)
            for query in queries
        ]
        known = [seconds for seconds in expected if seconds is not None]
        left_s = ticket.deadline_s - now
        if len(known) == len(expected) and min(known) > left_s:
            raise OverloadedError(
                f"the first token is expected in {min(known):.2f} s at the earliest, the request's"
                f" deadline is in {left_s:.2f} s",
                retry_after_s=max(self._config.overload_retry_s, min(known) - left_s),
            )

    def _refuse_stranded(self, within_reach: Reach, now: float) -> None:
        """What counts is for how long nobody took the request, not for how long it has waited: a
        worker that is away for a moment costs nobody a place in line."""
        are_held = self._fleet.stopped.holds(self._config.local_prefill)
        for ticket in self._waiting:
            assert ticket.placed is not None
            total, num_tokens = ticket.num_tokens, len(ticket.prompt)
            if ticket.placed.done():
                continue
            if any(total <= longest and num_tokens <= prompt for longest, prompt in self._kinds):
                ticket.stranded_since_s = None
            elif error := self._too_large(ticket):  # those that could take it have left
                ticket.placed.set_exception(error)
            elif ticket.stranded_since_s is None or are_held:
                ticket.stranded_since_s = now
            elif now - ticket.stranded_since_s >= self._config.fleet_wait_s:
                ticket.placed.set_exception(stranded(total, num_tokens, within_reach))
