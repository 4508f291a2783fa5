"""The router's queue: a request leaves it with a placement and its booking.

A request leaves only when a decode worker has room and its best prefill can start within
`lease_lead_s`. So queued prompts strand no decode memory.

- Order: urgency as far as tenants are granted any, then a fair share for every tenant, then
  arrival. A tenant's request of lower priority takes the place of its tenant's own first one of
  higher priority; those wait for its work too, and no other tenant does. A request that can start
  now may overtake others. After `max_bypass_s` the decode workers that a request could use are
  kept for it; other workers serve other requests.
- A request that no usable worker takes is refused after `fleet_wait_s`. While a pool that it needs
  is scaled to zero, the request is held, and that time starts again once the pool is back.
- A full line sheds its last request: the newest of the tenant that asked for most.
- A request whose first token would come after its own deadline is refused at once.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.clock import Clock, Timer
from baton.config.router import PlacementConfig, RouterConfig
from baton.errors import BatonError, NoCapacityError, OverloadedError, UnavailableError
from kv_transfer.block_hash import CacheScope, TokenIds
from router.fleet.fleet import Fleet
from router.fleet.fleet_arrays import Bools
from router.index.prefix_index import PrefixIndex
from router.placement.fairness import FairShare
from router.placement.placement import (
    Placement,
    Reach,
    longest_open,
    reach,
)
from router.placement.placing import Placing
from router.placement.public_prefix import NO_PREFIX, PublicPrefix
from router.placement.ticket import Placed, PromptBlocks, Ticket
from router.report.figures import Waiting


def too_large(ticket: Ticket, fleet: Fleet, policy: PlacementConfig) -> NoCapacityError | None:
    """Return why no worker of the fleet takes the request, usable now or not; None: one does."""
    num_tokens, least_new_tokens = len(ticket.prompt), ticket.least_new_tokens
    longest = fleet.kinds.longest_request
    if longest is not None and num_tokens + least_new_tokens > longest:
        return NoCapacityError(
            f"{num_tokens} tokens and {least_new_tokens} more exceed what every decode worker takes"
            f" ({longest} tokens)"
        )
    longest = fleet.kinds.longest_prompt
    if policy.local_prefill == "never" and longest is not None and num_tokens > longest:
        return NoCapacityError(
            f"{num_tokens} tokens exceed what every prefill worker takes ({longest} tokens)"
        )
    return None


def stranded(ticket: Ticket, within_reach: Reach) -> UnavailableError:
    """Return the error for a request that no usable worker took for `fleet_wait_s`."""
    total_tokens, num_tokens = ticket.num_tokens, len(ticket.prompt)
    longest = int(within_reach.request_tokens.max(initial=0.0))
    if not longest:
        message = "no decode worker is live"
    elif total_tokens > longest:
        message = f"no decode worker that takes {total_tokens} tokens is live"
    elif not within_reach.prompt_tokens.any():
        message = "no prefill worker is live, or quarantine leaves nobody any room"
    else:
        message = (
            f"no prefill worker that takes {num_tokens} tokens is live, or quarantine leaves them"
            " no room"
        )
    return UnavailableError(message, retry_after_s=1.0)


SCAN_AHEAD = 32  # requests tried per round that fit some open worker and can run at all
POLL_S = 0.25  # longest time between rounds while requests wait
ROUND_PAUSE = 4.0  # times what a round spent in vain: the rest of the event loop is for the streams


@dataclass
class _Tally:
    """What one round tried."""

    next_s: float = math.inf
    """Seconds until a queue is short enough for another try."""
    num_tries: int = 0
    num_in_vain: int = 0

    @property
    def share_in_vain(self) -> float:
        return self.num_in_vain / self.num_tries if self.num_tries else 1.0


class Admission:
    """Own the queue of requests that wait for a placement."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        index: PrefixIndex,
        clock: Clock,
        rng: random.Random,
        public: PublicPrefix = NO_PREFIX,
    ) -> None:
        self._config, self._fleet, self._public = config, fleet, public
        self._clock, self._rng = clock, rng
        self._placing = Placing(config.placement, fleet, index, rng)
        self._arrivals = itertools.count()
        self._shares = FairShare()
        self._owed: Counter[str] = Counter()  # tokens that requests in line do not account for yet
        self._waiting: list[Ticket] = []
        self._answers: list[tuple[Ticket, Placed | BatonError]] = []  # not given yet
        self._round: Timer | None = None
        self._round_at_s = self._pause_until_s = 0.0
        self._has_left_some = False  # in line, the last round
        self._least_urgent = -math.inf  # of the priorities since somebody is in line
        self._kinds: set[tuple[float, float]] = set()  # of decode workers (`Reach.kinds`)
        self._looked_at_s = -math.inf  # at them, for who is stranded

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def serves(self) -> bool:
        """Whether a short request would be placed some time, and not be refused as stranded."""
        within_reach = reach(self._fleet.arrays, self._config.placement)
        return self._holds or bool(within_reach.takes(1, 1).any())

    @property
    def _holds(self) -> bool:
        """Whether requests wait for a pool that is scaled to zero."""
        local_prefill = self._config.placement.local_prefill
        return not self._fleet.is_leaving and self._fleet.away.hold(local_prefill)

    @property
    def waiting(self) -> Sequence[Ticket]:
        """Requests in line, oldest first."""
        return self._waiting

    def waits(self) -> list[Waiting]:
        """Report who waits, and for what: a prefill is useless without room at a decode worker."""
        arrays, now_s = self._fleet.arrays, self._clock.now_s()
        decodes = arrays.usable & arrays.can_decode
        prefills = arrays.usable & arrays.can_prefill
        never_local = self._config.placement.local_prefill == "never"
        has_roles = decodes.any() and (not never_local or prefills.any())
        open_ = decodes & (arrays.running < arrays.max_running)
        room = float(arrays.free_tokens[open_].max(initial=0.0))
        return [
            Waiting(
                num_uncached_tokens=ticket.uncached_tokens,
                wait_s=max(0.0, now_s - ticket.since_s),
                for_decode=room < ticket.num_tokens,
                is_held=not has_roles,
            )
            for ticket in self._waiting
        ]

    def prompt(self, token_ids: TokenIds, tenant: str, cache_salt: str) -> PromptBlocks:
        """Make a request's tokens, of which its tenant shares the public prefix alone."""
        num_public = self._public.num_tokens(token_ids)
        return PromptBlocks(token_ids, CacheScope(tenant, cache_salt, num_public))

    def ticket(
        self,
        prompt: PromptBlocks,
        max_new_tokens: int,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        session_id: str = "",
        urgency: int = 0,
    ) -> Ticket:
        """Charge for a place in line. `priority` orders the tenant's own requests, `urgency` all.
        Raises OverloadedError when the queue is full of requests that go first."""
        overtaken = self._overtaken(tenant, priority)
        stamp = min((t.rank[1] for t in overtaken), default=self._shares.stamp(tenant))
        rank = (urgency, stamp, next(self._arrivals))
        charged = len(prompt) + min(max_new_tokens, self._config.placement.decode_growth_tokens)
        self._put_back(overtaken, charged)
        if len(self._waiting) >= self._config.admission.max_queue and not self._shed_after(rank):
            self._put_back(overtaken, -charged)
            raise self._full()
        session = (tenant, session_id) if session_id else None
        ticket = Ticket(rank, prompt, max_new_tokens, max_new_tokens, tenant, priority)
        ticket.session, ticket.charged = session, charged
        ticket.deadline_s, ticket.uncached_tokens = deadline_s, len(prompt)
        self._shares.charge(tenant, ticket.charged)
        return ticket

    def _overtaken(self, tenant: str, priority: int, before: float = math.inf) -> list[Ticket]:
        """Return a tenant's requests in line that one of this priority goes before, of those that
        arrived `before`."""
        if priority >= self._least_urgent:
            return []
        own = (t for t in self._waiting if t.tenant == tenant and t.rank[2] < before)
        return [t for t in own if t.priority > priority and not t.was_placed]

    def _put_back(self, tickets: Sequence[Ticket], work: int) -> None:
        """Let the requests wait for so much more work."""
        for ticket in tickets:
            urgency, stamp, arrival = ticket.rank
            ticket.rank = (urgency, stamp + work, arrival)
        if tickets:
            self._waiting.sort(key=lambda ticket: ticket.rank)

    def emitted(self, tenant: str, num_before: int, num_after: int) -> None:
        """Charge a tenant for tokens that a request emitted beyond its ticket. The tenant's
        requests in line wait for them too."""
        paid = self._config.placement.decode_growth_tokens
        work = max(0, num_after - paid) - max(0, num_before - paid)
        if work > 0:
            self._shares.charge(tenant, work)
            if self._waiting:
                self._owed[tenant] += work

    def _charge_owed(self) -> None:
        """Sort the line again by what the tenants owe."""
        if not self._owed:
            return
        for ticket in self._waiting:
            if owed := self._owed[ticket.tenant] - ticket.owed_before:
                urgency, stamp, arrival = ticket.rank
                ticket.rank = (urgency, stamp + owed, arrival)
            ticket.owed_before = 0
        self._waiting.sort(key=lambda ticket: ticket.rank)
        self._owed.clear()

    def _shed_after(self, rank: tuple[int, float, int]) -> bool:
        """Refuse the last in line if it comes after `rank`, unless it has been placed before."""
        last = self._waiting[-1]
        if last.rank < rank or last.was_placed:
            return False
        self._refuse(last, self._full())
        self._give_answers()
        return True

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"{self._config.admission.max_queue} requests are waiting already",
            retry_after_s=self._config.admission.overload_retry_s,
        )

    def enter(self, ticket: Ticket, answer: Callable[[Placed | BatonError], None]) -> None:
        """Take the position in line. `answer` gets a booked placement, whose booking it releases,
        or an error: UnavailableError when no usable worker took the request for `fleet_wait_s`,
        OverloadedError when it was shed.

        Raises NoCapacityError when the request is too large for any worker, OverloadedError when it
        would come too late.
        """
        try:
            if error := too_large(ticket, self._fleet, self._config.placement):
                raise error
            if not ticket.was_placed and (self._waiting or ticket.deadline_s is not None):
                self._refuse_too_late(ticket)
        except BatonError:
            self._refund(ticket)
            raise
        ticket.since_s, ticket.stranded_since_s = self._clock.now_s(), None
        ticket.owed_before = self._owed[ticket.tenant]
        ticket.explores = self._rng.random() < self._config.placement.explore_share
        ticket.answer = answer
        self._least_urgent = max(self._least_urgent, ticket.priority)
        bisect.insort(self._waiting, ticket)
        self.kick()

    def leave(self, ticket: Ticket) -> None:
        """Give up the position in line, if it is there."""
        if ticket.answer is not None:
            ticket.answer = None
            self._remove(ticket)
            self._refund(ticket)

    def _refund(self, ticket: Ticket) -> None:
        if not ticket.was_placed:
            self._shares.refund(ticket.tenant, ticket.charged)
            overtaken = self._overtaken(ticket.tenant, ticket.priority, ticket.rank[2])
            self._put_back(overtaken, -ticket.charged)
            ticket.charged = 0

    def _refuse(self, ticket: Ticket, error: BatonError) -> None:
        self._remove(ticket)
        self._refund(ticket)
        self._answers.append((ticket, error))

    def _give_answers(self) -> None:
        """Answer those that were placed or refused. It comes last: they may enter again."""
        answers, self._answers = self._answers, []
        for ticket, result in answers:
            answer, ticket.answer = ticket.answer, None
            if answer is not None:
                answer(result)
            elif isinstance(result, Placed):  # it left meanwhile
                self._fleet.release(result.booking)

    def _remove(self, ticket: Ticket) -> None:
        at = bisect.bisect_left(self._waiting, ticket)
        if at < len(self._waiting) and self._waiting[at] is ticket:
            del self._waiting[at]

    def kick(self) -> None:
        """Something changed: try the waiting requests soon, many changes at once."""
        if self._waiting:
            self._schedule(0.0)

    def candidates(self, ticket: Ticket, limit: int) -> list[Placement]:
        """Return the placements of a request that is not in line, cheapest first. Books nothing."""
        return self._placing.candidates(ticket, self._clock.now_s(), limit)

    # --- rounds --------------------------------------------------------------------------------

    def _schedule(self, delay_s: float) -> None:
        now = self._clock.now_s()
        at_s = max(now + delay_s, self._pause_until_s)
        if self._round is not None:
            if self._round_at_s <= at_s:
                return
            self._round.cancel()
        self._round_at_s = at_s
        self._round = (
            self._clock.call_later(at_s - now, self._run_round)
            if at_s > now
            else asyncio.get_running_loop().call_soon(self._run_round)
        )

    def _unschedule(self) -> None:
        if self._round is not None:
            self._round.cancel()
            self._round = None

    def _run_round(self) -> None:
        self._round = None
        now = self._clock.now_s()
        were_in_line, tally = self._has_left_some, _Tally()
        if were_in_line:
            self._review_stranded(now)
        self._try_in_order(tally)
        if self._waiting and not were_in_line:  # most requests are placed at once
            self._review_stranded(now)
        self._has_left_some = bool(self._waiting)
        ended_s = self._clock.now_s()
        self._pause_until_s = ended_s + ROUND_PAUSE * (ended_s - now) * tally.share_in_vain
        if self._waiting:
            self._schedule(max(min(tally.next_s, self._next_release_s(now)), 0.002))
        else:
            self._owed.clear()
            self._least_urgent = -math.inf
            self._shares.idle()
            self._unschedule()
        self._give_answers()

    def _try_in_order(self, tally: _Tally) -> None:
        """Place requests that can start on decode workers that are not reserved."""
        config, arrays, now = self._config, self._fleet.arrays, self._clock.now_s()
        reserved = np.zeros(self._fleet.num_slots, dtype=np.bool_)
        # One alone is not worth a look at all workers before its own.
        longest = longest_open(arrays, reserved, now) if len(self._waiting) > 1 else math.inf
        if longest:
            self._charge_owed()
        waiting = list(self._waiting)
        for ticket in waiting:
            if not longest or tally.num_tries >= SCAN_AHEAD:
                break
            if not ticket.may_fit(longest):
                continue
            tally.num_tries += 1
            best = self._placing.best(ticket, reserved, now)
            if best is not None and best.queue_s <= config.admission.lease_lead_s:
                self._remove(ticket)
                self._answers.append((ticket, self._book(ticket, best, now)))
            else:
                tally.num_in_vain += 1
                if best is not None:
                    tally.next_s = min(tally.next_s, best.queue_s - config.admission.lease_lead_s)
                if now - ticket.since_s <= config.admission.max_bypass_s:
                    continue
                self._reserve(reserved, ticket, best)
            if ticket is not waiting[-1]:
                longest = longest_open(arrays, reserved, now)

    def _reserve(self, reserved: Bools, ticket: Ticket, best: Placement | None) -> None:
        """Reserve room for a request that was overtaken too long: at its chosen worker or, if none
        is chosen, at every worker that could take it."""
        if best is not None:
            reserved[best.decode_slot] = True
        else:
            within_reach = reach(self._fleet.arrays, self._config.placement)
            reserved |= within_reach.takes(len(ticket.prompt), ticket.least_new_tokens)

    def _next_release_s(self, now: float) -> float:
        """Wait until a held worker may be asked again. Other changes come as kicks."""
        holds = self._fleet.arrays.hold_until_s - now
        return min(POLL_S, float(min(holds[holds > 0], default=POLL_S)))

    def _book(self, ticket: Ticket, placement: Placement, now: float) -> Placed:
        ticket.was_placed = True
        self._shares.served(ticket.rank[1])
        return self._placing.book(ticket, placement, now)

    # --- refusals ------------------------------------------------------------------------------

    def _refuse_too_late(self, ticket: Ticket) -> None:
        now = self._clock.now_s()
        if ticket.deadline_s is None:
            self._placing.queries(ticket, now)  # notes what it leaves to compute, for those behind
            return
        ahead = sum(
            other.uncached_tokens
            for other in self._waiting
            if other.rank < ticket.rank and other.stranded_since_s is None
        )
        expected_s, left_s = self._placing.earliest_s(ticket, ahead, now), ticket.deadline_s - now
        if expected_s is not None and expected_s > left_s:
            raise OverloadedError(
                f"the first token is expected in {expected_s:.2f} s at the earliest, the request's"
                f" deadline is in {left_s:.2f} s",
                retry_after_s=max(self._config.admission.overload_retry_s, expected_s - left_s),
            )

    def _review_stranded(self, now: float) -> None:
        within_reach = reach(self._fleet.arrays, self._config.placement)
        kinds = within_reach.kinds()
        if kinds != self._kinds or now - self._looked_at_s >= POLL_S:
            self._kinds, self._looked_at_s = kinds, now
            self._refuse_stranded(within_reach, now)

    def _refuse_stranded(self, within_reach: Reach, now: float) -> None:
        """The time without a usable worker counts, not the whole wait: a worker that is away for a
        moment costs no request its position in line."""
        are_held = self._holds
        for ticket in list(self._waiting):
            total, num_tokens = ticket.num_tokens, len(ticket.prompt)
            if any(total <= longest and num_tokens <= prompt for longest, prompt in self._kinds):
                ticket.stranded_since_s = None
            elif error := too_large(
                ticket, self._fleet, self._config.placement
            ):  # the worker that took it has left
                self._refuse(ticket, error)
            elif ticket.stranded_since_s is None or are_held:
                ticket.stranded_since_s = now
            elif now - ticket.stranded_since_s >= self._config.admission.fleet_wait_s:
                self._refuse(ticket, stranded(ticket, within_reach))
