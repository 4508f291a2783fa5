"""Where a prompt should run: a pure choice over what the fleet looks like now.

Every (prefill worker, decode worker) pair is a candidate, and so is every decode worker alone,
which then prefills by itself. A candidate's cost is in predicted seconds. Nothing is booked here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.config.router import RouterConfig
from router.placement.link_rates import LinkRates

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

RETRY_PENALTY_S = 30.0  # against a worker that just failed this very request
TIE_TOLERANCE_S = 1e-9
MANY_PAIRS = 16_384  # beyond so many to look at, decode workers that cannot win are left out first
SESSION_TOLERANCE_S = 1e-3  # a session stays on its decode worker if that costs no more than this


@dataclass
class FleetArrays:
    """The fleet as columns, one row per worker slot. Owned by `Fleet`; read here."""

    names: list[str]
    kv_class: Ints  # workers of one class exchange KV; -1: no worker
    can_prefill: Bools
    can_decode: Bools
    usable: Bools  # live, connected, not draining
    hold_until_s: Floats  # gets nothing before this time
    prefill_tokens_per_s: Floats
    prefill_measured_s: Floats  # when that was last reported; minus infinity: it is the default
    decode_step_s: Floats
    decode_measured_s: Floats
    handoff_bytes_per_s: Floats
    kv_bytes_per_token: Floats
    queued_tokens: Floats  # to be prefilled before a new prompt
    head_tokens: Floats  # of these, the prompt at the head of the queue
    head_since_s: Floats
    running: Floats  # requests that decode, or will
    max_running: Floats
    free_tokens: Floats  # room for KV by this router's bookings
    longest_request: Floats  # prompt plus output tokens that the worker accepts
    max_held_tokens: Floats  # that one request holds at once; infinite: its whole length
    unquarantined_tokens: Floats  # room for KV beside quarantine; infinite: nothing is in it
    links: LinkRates

    @classmethod
    def empty(cls, num_slots: int) -> FleetArrays:
        n = num_slots
        return cls(
            names=[""] * n,
            kv_class=np.full(n, -1, dtype=np.int64),
            can_prefill=np.zeros(n, dtype=np.bool_),
            can_decode=np.zeros(n, dtype=np.bool_),
            usable=np.zeros(n, dtype=np.bool_),
            hold_until_s=np.zeros(n),
            prefill_tokens_per_s=np.ones(n),
            prefill_measured_s=np.full(n, -np.inf),
            decode_step_s=np.zeros(n),
            decode_measured_s=np.full(n, -np.inf),
            handoff_bytes_per_s=np.ones(n),
            kv_bytes_per_token=np.zeros(n),
            queued_tokens=np.zeros(n),
            head_tokens=np.zeros(n),
            head_since_s=np.zeros(n),
            running=np.zeros(n),
            max_running=np.ones(n),
            free_tokens=np.zeros(n),
            longest_request=np.zeros(n),
            max_held_tokens=np.zeros(n),
            unquarantined_tokens=np.full(n, np.inf),
            links=LinkRates(n),
        )

    def grown(self) -> FleetArrays:
        """Twice the rows, the old ones first."""
        size = len(self.names)
        bigger = FleetArrays.empty(2 * size)
        for name, column in vars(self).items():
            if name == "links":
                bigger.links = self.links.grown()
            else:
                getattr(bigger, name)[:size] = column
        return bigger

    def queue_s(self, rates: Floats, now_s: float) -> Floats:
        """Predicted wait before a new prompt starts, of workers that prefill at `rates` tokens/s;
        the prompt at the head has made progress."""
        progress = np.minimum(self.head_tokens, rates * np.maximum(0.0, now_s - self.head_since_s))
        return np.maximum(0.0, self.queued_tokens - progress) / rates

    def queued_ahead(self, slot: int, now_s: float) -> float:
        """Tokens in a worker's queue, less what its own rate has made of the first prompt."""
        progress = self.prefill_tokens_per_s[slot] * max(0.0, now_s - self.head_since_s[slot])
        return float(max(0.0, self.queued_tokens[slot] - min(self.head_tokens[slot], progress)))

    def speeds(self, kv_class: int, since_s: float) -> tuple[Floats, Floats]:
        """(prefill tokens/s, seconds a decode step) [slots] to reckon with.

        A worker that was not measured since then counts as the best of its class. Else a worker
        that looks slow is never chosen, and so never measured again.
        """
        here = self.usable & (self.kv_class == kv_class)
        rates, steps = self.prefill_tokens_per_s, self.decode_step_s
        measured = np.isfinite(self.prefill_measured_s) & here
        if measured.any():
            is_old = ~measured | (self.prefill_measured_s < since_s)
            rates = np.where(is_old, rates[measured].max(), rates)
        measured = np.isfinite(self.decode_measured_s) & here
        if measured.any():
            is_old = ~measured | (self.decode_measured_s < since_s)
            steps = np.where(is_old, steps[measured].min(), steps)
        return rates, steps


@dataclass(frozen=True)
class PlacementQuery:
    """One prompt as the choice sees it."""

    num_tokens: int
    max_new_tokens: int
    kv_class: int
    cached_tokens: Ints  # [slots]
    least_new_tokens: int = 1
    """Output tokens that must fit after the prompt."""
    failed: frozenset[int] = frozenset()
    """Slots on which this request failed before."""
    reserved: Bools | None = None
    """[slots] Decode workers that are kept for a request before this one."""
    explores: bool = False
    """Old measures of a worker's speed do not count, so that it is measured again."""
    preferred: int | None = None
    """Slot of the decode worker on which the request's session was last."""


@dataclass(frozen=True)
class Placement:
    """A candidate with every term of its cost, in seconds."""

    prefill_slot: int | None  # None: the decode worker prefills
    decode_slot: int
    prefill_worker: str
    decode_worker: str
    cost_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    num_cached_tokens_prefill: int
    num_cached_tokens_decode: int
    num_tokens: int
    num_tokens_ahead: float
    """Of this prompt and those before it in line, what its worker has to compute."""

    def first_token_s(self, tokens_per_s: float) -> float:
        """How long to be patient: queue and prefill as predicted here, or by the rate that the
        worker itself reported last, if that is longer."""
        return max(self.queue_s + self.prefill_s, self.num_tokens_ahead / tokens_per_s)

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens the chosen worker has to compute."""
        cached = (
            self.num_cached_tokens_decode
            if self.prefill_slot is None
            else self.num_cached_tokens_prefill
        )
        return max(1, self.num_tokens - cached)

    @property
    def reason(self) -> str:
        """One line a person can read."""
        terms = (
            f"{self.queue_s * 1e3:.0f} ms queue + {self.prefill_s * 1e3:.0f} ms prefill"
            f" + {self.transfer_s * 1e3:.1f} ms transfer + {self.decode_s * 1e3:.1f} ms decode load"
        )
        if self.prefill_slot is None:
            held = f"{self.num_cached_tokens_decode} of {self.num_tokens} tokens cached"
            return f"local prefill on {self.decode_worker} ({held}): {terms}"
        return (
            f"prefill on {self.prefill_worker} ({self.num_cached_tokens_prefill} of"
            f" {self.num_tokens} tokens cached), decode on {self.decode_worker}"
            f" ({self.num_cached_tokens_decode} cached): {terms}"
        )


@dataclass(frozen=True)
class Terms:
    """What candidates cost, in seconds, by worker. Only the transfer depends on both workers."""

    prefill_slots: Ints
    decode_slots: Ints
    queue_s: Floats
    """[slots] Wait before the prompt starts there."""
    prefill_s: Floats
    """[slots]"""
    bytes_to_move: Floats
    """[decode workers]"""
    decode_s: Floats
    """[decode workers] Slow-down of the decode batch."""
    local_decode_s: Floats
    """[decode workers] The same if the decode worker prefills too."""
    prefill_penalty_s: Floats
    """[prefill workers] What is added if the request failed there."""
    decode_penalty_s: Floats
    trusts_links: bool
    """Links count as slow or fast as they were learned; else all are as fast as their writers."""

    def local_s(self, policy: RouterConfig) -> Floats:
        """[decode workers] Cost of prefill on the decode worker itself; infinite if forbidden."""
        d = self.decode_slots
        if policy.local_prefill == "never":
            return np.full(len(d), np.inf)
        return self.queue_s[d] + self.prefill_s[d] + self.local_decode_s + self.decode_penalty_s

    def writers_s(self, fleet: FleetArrays, policy: RouterConfig, columns: Ints) -> Floats:
        """[prefill workers, columns] What a pair costs before its decode worker, which is one of
        `columns`, begins. Of the decode worker only the bytes that it lacks and its links count."""
        p = self.prefill_slots
        prefill = self.prefill_s[p]
        alone = self.queue_s[p] + prefill + self.prefill_penalty_s
        rates = self.link_bytes_per_s(fleet, p, columns)
        lacks = self.bytes_to_move[columns]
        return alone[:, None] + transfer_s(lacks, rates, prefill[:, None], policy)

    def link_bytes_per_s(self, fleet: FleetArrays, p: Ints, columns: Ints) -> Floats:
        """[p, columns], or [p, 1] where all links are as fast as their writers."""
        rates = fleet.handoff_bytes_per_s[p]
        if self.trusts_links and not fleet.links.are_plain:
            return fleet.links.rates(p, self.decode_slots[columns], rates)
        return rates[:, None]

    def groups(self, fleet: FleetArrays) -> tuple[Ints, Ints]:
        """Decode workers with equal `writers_s` are a group: a column of each group, and the group
        of each decode worker."""
        key = self.bytes_to_move
        if self.trusts_links and not fleet.links.are_plain:  # both are whole numbers
            key = key * len(fleet.links.kinds) + fleet.links.kinds[self.decode_slots]
        if key.min() == key.max():
            return np.zeros(1, dtype=np.int64), np.zeros(len(key), dtype=np.int64)
        _, columns, group = np.unique(key, return_index=True, return_inverse=True)
        return columns, group


def transfer_s(
    num_bytes: Floats, bytes_per_s: Floats, prefill_s: Floats, policy: RouterConfig
) -> Floats:
    """What a handoff adds to a prefill, elementwise."""
    move, overlap = num_bytes / bytes_per_s, policy.handoff_overlap
    never_hidden = (1 - overlap) * move  # the last layers
    return policy.handoff_overhead_s + np.maximum(never_hidden, move - overlap * prefill_s)


def terms_of(
    query: PlacementQuery, fleet: FleetArrays, policy: RouterConfig, now_s: float
) -> Terms:
    """Terms of every candidate that has room, vectorised over the fleet. Pure."""
    open_ = fleet.usable & (fleet.kv_class == query.kv_class) & (fleet.hold_until_s <= now_s)
    left = fleet.unquarantined_tokens
    open_ &= (query.num_tokens <= left) | (fleet.max_held_tokens <= left)
    needed = query.num_tokens - query.cached_tokens + query.max_new_tokens
    room = fleet.free_tokens >= np.minimum(needed, fleet.max_held_tokens)
    room |= fleet.running == 0
    room &= fleet.running < fleet.max_running
    if query.reserved is not None:
        room &= ~query.reserved
    fits = fleet.longest_request >= query.num_tokens + query.least_new_tokens
    takes_prompt = fleet.longest_request > query.num_tokens
    (p,) = (open_ & fleet.can_prefill & takes_prompt).nonzero()
    (d,) = (open_ & fleet.can_decode & fits & room).nonzero()
    since_s = now_s - policy.trust_rates_s if query.explores else -np.inf
    rates, steps = fleet.speeds(query.kv_class, since_s)
    prefill = np.maximum(1, query.num_tokens - query.cached_tokens) / rates
    bytes_to_move = (query.num_tokens - query.cached_tokens[d]) * fleet.kv_bytes_per_token[d]
    share = (fleet.running[d] + 1) / fleet.max_running[d]
    decode = policy.decode_horizon_tokens * steps[d] * share
    local_decode = decode
    if len(p):  # a decode worker's compute is dearer than a prefill worker's: streams wait for it
        local_decode = decode + prefill[d] * (policy.local_prefill_weight - 1.0 + share)
    return Terms(
        prefill_slots=p,
        decode_slots=d,
        queue_s=fleet.queue_s(rates, now_s),
        prefill_s=prefill,
        bytes_to_move=np.maximum(0.0, bytes_to_move),
        decode_s=decode,
        local_decode_s=local_decode,
        prefill_penalty_s=_penalty_s(p, query.failed),
        decode_penalty_s=_penalty_s(d, query.failed),
        trusts_links=not query.explores,
    )


def _penalty_s(slots: Ints, failed: frozenset[int]) -> Floats:
    penalty = np.zeros(len(slots))
    for slot in failed:
        penalty[slots == slot] = RETRY_PENALTY_S
    return penalty


def evaluate(terms: Terms, fleet: FleetArrays, policy: RouterConfig) -> Floats:
    """Cost of every candidate: rows are prefill workers and, last, local prefill; columns decode
    workers. Seconds; infinite where no candidate is."""
    p, d = terms.prefill_slots, terms.decode_slots
    pairs = terms.writers_s(fleet, policy, np.arange(len(d)))
    pairs += terms.decode_s + terms.decode_penalty_s
    pairs[p[:, None] == d[None, :]] = np.inf  # that is local prefill
    if policy.local_prefill == "always":
        pairs[:] = np.inf
    return np.vstack([pairs, terms.local_s(policy)])


def _longest_beside_quarantine(fleet: FleetArrays) -> Floats:
    """[slots] The longest prompt that could start while quarantine lasts; infinite where it leaves
    room for any. Cached tokens make no difference: their blocks are among those left, or in
    quarantine until a late reader has stopped."""
    left = fleet.unquarantined_tokens
    return np.where(fleet.max_held_tokens <= left, np.inf, left)


@dataclass(frozen=True)
class Reach:
    """The longest request that each decode worker could take if it and a prefill worker were empty
    but for quarantine.

    Tokens, float64 [slots]; 0: it takes none. The prompt has a bound of its own, by who prefills it
    and by quarantine at either.
    """

    request_tokens: Floats
    prompt_tokens: Floats

    def takes(self, num_tokens: int, least_new_tokens: int) -> Bools:
        """[slots] Decode workers with which such a request can run."""
        fits: Bools = num_tokens + least_new_tokens <= self.request_tokens
        return fits & (num_tokens <= self.prompt_tokens)

    def kinds(self) -> set[tuple[float, float]]:
        """(request tokens, prompt tokens), each once: few, even of many workers."""
        return set(zip(self.request_tokens.tolist(), self.prompt_tokens.tolist()))


def reach(fleet: FleetArrays, policy: RouterConfig) -> Reach:
    """Reach over the workers that are usable now, held or not. Pure."""
    request = np.where(fleet.usable & fleet.can_decode, fleet.longest_request, 0.0)
    beside = _longest_beside_quarantine(fleet)
    if policy.local_prefill != "never":  # a partner has the prompt held here as well
        return Reach(request, np.minimum(request, beside))
    prompt = np.zeros_like(request)
    prefills = fleet.usable & fleet.can_prefill
    bound = np.minimum(fleet.longest_request - 1, beside)
    for kv_class in np.unique(fleet.kv_class[prefills]):
        peers = np.flatnonzero(prefills & (fleet.kv_class == kv_class))
        peers = peers[np.argsort(-bound[peers], kind="stable")]
        longest = bound[peers]
        prompt[fleet.kv_class == kv_class] = longest[0]
        prompt[peers[0]] = longest[1] if len(peers) > 1 else 0  # none is its own partner
    return Reach(request, np.minimum(prompt, beside))


def longest_open(fleet: FleetArrays, reserved: Bools, now_s: float) -> float:
    """The longest request that some decode worker with a free slot takes; 0: none has one."""
    is_open = fleet.usable & fleet.can_decode & (fleet.hold_until_s <= now_s) & ~reserved
    is_open &= fleet.running < fleet.max_running
    return float(fleet.longest_request[is_open].max(initial=0.0))


def choose(
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: RouterConfig,
    now_s: float,
    rng: random.Random,
) -> Placement | None:
    """The cheapest placement, ties at random; None when no decode worker has room. A session stays
    on its decode worker if that costs hardly more.

    The same as the least of `evaluate`, without looking at every pair. Decode workers that lack
    equally many bytes, over equal links, are a group. Within a group the cheapest prefill worker is
    the same for all, unless it is the decode worker itself.
    """
    terms = terms_of(query, fleet, policy, now_s)
    p, d = terms.prefill_slots, terms.decode_slots
    if not len(d):
        return None
    columns, group = terms.groups(fleet)
    if len(columns) * len(p) > MANY_PAIRS:
        terms = _without_losers(terms, fleet, policy)
        d = terms.decode_slots
        columns, group = terms.groups(fleet)
    writers = terms.writers_s(fleet, policy, columns)
    if policy.local_prefill == "always":
        writers = writers[:0]
    local = terms.local_s(policy)
    decode = terms.decode_s + terms.decode_penalty_s
    total = np.minimum(local, _cheapest_writer_s(writers, p, d, group) + decode)
    best = total.min()
    if best == np.inf:
        return None
    (ties,) = (total <= best + TIE_TOLERANCE_S).nonzero()
    if query.preferred is not None:
        (stays,) = ((d == query.preferred) & (total <= best + SESSION_TOLERANCE_S)).nonzero()
        ties = stays if len(stays) else ties
    column = int(ties[rng.randrange(len(ties))])
    costs = np.append(writers[:, group[column]] + decode[column], local[column])
    costs[:-1][p[: len(writers)] == d[column]] = np.inf
    (ties,) = (costs <= costs.min() + TIE_TOLERANCE_S).nonzero()
    row = int(ties[rng.randrange(len(ties))])
    is_local = row == len(writers)
    return _placement(query, fleet, policy, terms, (None if is_local else row, column), now_s)


def _without_losers(terms: Terms, fleet: FleetArrays, policy: RouterConfig) -> Terms:
    """The same without decode workers that cannot be chosen: what they cost at least exceeds what
    another costs with one good prefill worker."""
    p, d = terms.prefill_slots, terms.decode_slots
    least = local = terms.local_s(policy)
    bound = local.min()
    if len(p) and policy.local_prefill != "always":
        decode = terms.decode_s + terms.decode_penalty_s
        prefill, rates = terms.prefill_s[p], fleet.handoff_bytes_per_s[p]
        alone = terms.queue_s[p] + prefill + terms.prefill_penalty_s
        fastest = rates.max() * fleet.links.most_gained
        at_least = transfer_s(terms.bytes_to_move, fastest, prefill.max(), policy)
        least = np.minimum(local, alone.min() + at_least + decode)
        good = alone.argmin()
        one = replace(
            terms,
            prefill_slots=p[[good]],
            prefill_penalty_s=terms.prefill_penalty_s[[good]],
        )
        costs = one.writers_s(fleet, policy, np.arange(len(d)))[0] + decode
        bound = min(bound, costs[d != p[good]].min(initial=np.inf))
    (kept,) = (least <= bound + SESSION_TOLERANCE_S + TIE_TOLERANCE_S).nonzero()
    return replace(
        terms,
        decode_slots=d[kept],
        bytes_to_move=terms.bytes_to_move[kept],
        decode_s=terms.decode_s[kept],
        local_decode_s=terms.local_decode_s[kept],
        decode_penalty_s=terms.decode_penalty_s[kept],
    )


def _cheapest_writer_s(writers: Floats, p: Ints, d: Ints, group: Ints) -> Floats:
    """[decode workers] Of the prefill workers' costs to each group, the least of another worker
    than the decode worker itself; infinite without one."""
    if not len(writers):
        return np.full(len(d), np.inf)
    first = writers.argmin(axis=0)
    columns = np.arange(len(first))
    least: Floats = writers[first, columns][group]
    is_own = p[first][group] == d
    if is_own.any():
        others = writers.copy()
        others[first, columns] = np.inf
        least = np.where(is_own, others.min(axis=0)[group], least)
    return least


def ranked(
    query: PlacementQuery, fleet: FleetArrays, policy: RouterConfig, now_s: float, limit: int
) -> Sequence[Placement]:
    """Candidates, cheapest first, at most `limit`."""
    terms = terms_of(query, fleet, policy, now_s)
    costs = evaluate(terms, fleet, policy)
    num_rows, num_columns = costs.shape
    found = []
    for flat in np.argsort(costs, axis=None, kind="stable")[:limit].tolist():
        if np.isfinite(costs.flat[flat]):
            row, column = divmod(flat, num_columns)
            at = (None if row == num_rows - 1 else row, column)
            found.append(_placement(query, fleet, policy, terms, at, now_s))
    return found


def _placement(
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: RouterConfig,
    terms: Terms,
    at: tuple[int | None, int],
    now_s: float,
) -> Placement:
    """The candidate of a prefill worker (None: local prefill) and a decode worker of the terms."""
    row, column = at
    decode_slot = int(terms.decode_slots[column])
    prefill_slot = None if row is None else int(terms.prefill_slots[row])
    slot = decode_slot if prefill_slot is None else prefill_slot
    queue_s, prefill_s = float(terms.queue_s[slot]), float(terms.prefill_s[slot])
    penalty_s = float(terms.decode_penalty_s[column])
    if row is None:
        moving_s, decode_s = 0.0, float(terms.local_decode_s[column])
    else:
        (rate,) = terms.link_bytes_per_s(fleet, terms.prefill_slots[[row]], np.array([column]))[0]
        lacks = terms.bytes_to_move[column]
        moving_s = float(transfer_s(lacks, rate, terms.prefill_s[slot], policy))
        decode_s = float(terms.decode_s[column])
        penalty_s += float(terms.prefill_penalty_s[row])
    cached = query.cached_tokens
    uncached = max(1, query.num_tokens - int(cached[slot]))
    return Placement(
        prefill_slot=prefill_slot,
        decode_slot=decode_slot,
        prefill_worker="" if prefill_slot is None else fleet.names[prefill_slot],
        decode_worker=fleet.names[decode_slot],
        cost_s=queue_s + prefill_s + moving_s + decode_s + penalty_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=moving_s,
        decode_s=decode_s,
        num_cached_tokens_prefill=0 if prefill_slot is None else int(cached[prefill_slot]),
        num_cached_tokens_decode=int(cached[decode_slot]),
        num_tokens=query.num_tokens,
        num_tokens_ahead=fleet.queued_ahead(slot, now_s) + uncached,
    )


def earliest_first_token_s(
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: RouterConfig,
    ahead_tokens: float,
    now_s: float,
) -> float | None:
    """Seconds until a first token if all goes well. None: unknown.

    It takes the best worker for the prompt itself and, for `ahead_tokens` (prompt tokens of the
    requests before it in line), all workers together. Held workers, decode room and transfers are
    left out: they only add to it. None while a prefill worker's rate is unknown: it may be the
    fastest. A decode worker that never prefilled counts as fast as the fastest.
    """
    here = fleet.usable & (fleet.kv_class == query.kv_class)
    prefill = here & fleet.can_prefill & (policy.local_prefill != "always")
    decode = here & fleet.can_decode & (policy.local_prefill != "never" or not prefill.any())
    workers = np.flatnonzero(prefill | decode)
    learned = np.isfinite(fleet.prefill_measured_s)
    if not learned[workers].any() or not learned[prefill].all():
        return None
    all_rates, _ = fleet.speeds(query.kv_class, -np.inf)
    rates = all_rates[workers]
    line_s = ahead_tokens / rates.sum()
    compute_s = np.maximum(1, query.num_tokens - query.cached_tokens[workers]) / rates
    return float((np.maximum(fleet.queue_s(all_rates, now_s)[workers], line_s) + compute_s).min())


def least_prefill_s(num_tokens: int, fleet: FleetArrays) -> float:
    """Seconds that the fastest measured worker takes to prefill this many tokens; 0: none was
    measured."""
    learned = fleet.usable & np.isfinite(fleet.prefill_measured_s)
    if not learned.any():
        return 0.0
    return num_tokens / float(fleet.prefill_tokens_per_s[learned].max())
