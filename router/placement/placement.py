"""What it would cost to run a prompt on each of the workers: pure functions of the fleet as it is.

Every (prefill worker, decode worker) pair is a candidate, and so is every decode worker alone,
which then prefills by itself. A candidate's cost is in predicted seconds. Nothing is booked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.config.router import PlacementConfig
from router.fleet.fleet_arrays import Bools, FleetArrays, Floats, Ints

RETRY_PENALTY_S = 30.0  # against a worker that just failed this very request


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

    def load(self, max_new_tokens: int) -> tuple[int | None, int, int, int]:
        """What `Fleet.book` takes: both slots, tokens to prefill, tokens that will need KV."""
        new = max(0, self.num_tokens - self.num_cached_tokens_decode) + max_new_tokens
        return self.prefill_slot, self.decode_slot, self.num_uncached_tokens, new

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

    def local_s(self, policy: PlacementConfig) -> Floats:
        """[decode workers] Cost of prefill on the decode worker itself; infinite if forbidden."""
        d = self.decode_slots
        if policy.local_prefill == "never":
            return np.full(len(d), np.inf)
        return self.queue_s[d] + self.prefill_s[d] + self.local_decode_s + self.decode_penalty_s

    def link_bytes_per_s(self, fleet: FleetArrays, writers: Ints, readers: Ints) -> Floats:
        """[writers, readers], or [writers, 1] where all links count as fast as their writers."""
        rates = fleet.handoff_bytes_per_s[writers]
        return fleet.links.rates(writers, readers, rates) if self.trusts_links else rates[:, None]


def transfer_s(
    num_bytes: Floats, bytes_per_s: Floats, prefill_s: Floats, policy: PlacementConfig
) -> Floats:
    """What a handoff adds to a prefill, elementwise."""
    move, overlap = num_bytes / bytes_per_s, policy.handoff_overlap
    never_hidden = (1 - overlap) * move  # the last layers
    return policy.handoff_overhead_s + np.maximum(never_hidden, move - overlap * prefill_s)


def terms_of(
    query: PlacementQuery, fleet: FleetArrays, policy: PlacementConfig, now_s: float
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


def evaluate(terms: Terms, fleet: FleetArrays, policy: PlacementConfig) -> Floats:
    """Cost of every candidate: rows are prefill workers and, last, local prefill; columns decode
    workers. Seconds; infinite where no candidate is."""
    p, d = terms.prefill_slots, terms.decode_slots
    prefill = terms.prefill_s[p]
    alone = terms.queue_s[p] + prefill + terms.prefill_penalty_s
    rates = terms.link_bytes_per_s(fleet, p, d)
    pairs = alone[:, None] + transfer_s(terms.bytes_to_move, rates, prefill[:, None], policy)
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


def reach(fleet: FleetArrays, policy: PlacementConfig) -> Reach:
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


def ranked(
    query: PlacementQuery, fleet: FleetArrays, policy: PlacementConfig, now_s: float, limit: int
) -> Sequence[Placement]:
    """Candidates, cheapest first, at most `limit`."""
    terms = terms_of(query, fleet, policy, now_s)
    costs = evaluate(terms, fleet, policy)
    found = []
    for flat in np.argsort(costs, axis=None, kind="stable")[:limit].tolist():
        if np.isfinite(costs.flat[flat]):
            at = divmod(flat, costs.shape[1])
            found.append(placement_at(query, fleet, policy, terms, at, now_s))
    return found


def placement_at(
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: PlacementConfig,
    terms: Terms,
    at: tuple[int, int],
    now_s: float,
) -> Placement:
    """The candidate in this row and column of `evaluate`."""
    row, column = at
    decode_slot = int(terms.decode_slots[column])
    is_local = row == len(terms.prefill_slots)
    slot = decode_slot if is_local else int(terms.prefill_slots[row])
    queue_s, prefill_s = float(terms.queue_s[slot]), float(terms.prefill_s[slot])
    penalty_s = float(terms.decode_penalty_s[column])
    if is_local:
        moving_s, decode_s = 0.0, float(terms.local_decode_s[column])
    else:
        ends = np.array([slot]), np.array([decode_slot])
        rate, lacks = terms.link_bytes_per_s(fleet, *ends)[0], terms.bytes_to_move[column]
        moving_s = float(transfer_s(lacks, rate, terms.prefill_s[slot], policy)[0])
        decode_s = float(terms.decode_s[column])
        penalty_s += float(terms.prefill_penalty_s[row])
    cost_s = queue_s + prefill_s + moving_s + decode_s + penalty_s
    costs = cost_s, queue_s, prefill_s, moving_s, decode_s
    return placement_of(query, fleet, None if is_local else slot, decode_slot, costs, now_s)


def placement_of(
    query: PlacementQuery,
    fleet: FleetArrays,
    prefill_slot: int | None,
    decode_slot: int,
    costs: tuple[float, float, float, float, float],
    now_s: float,
) -> Placement:
    """The candidate of these workers. `costs`: its cost, then queue, prefill, transfer, decode."""
    cached = query.cached_tokens
    slot = decode_slot if prefill_slot is None else prefill_slot
    uncached = max(1, query.num_tokens - int(cached[slot]))
    return Placement(
        prefill_slot,
        decode_slot,
        "" if prefill_slot is None else fleet.names[prefill_slot],
        fleet.names[decode_slot],
        *costs,
        num_cached_tokens_prefill=0 if prefill_slot is None else int(cached[prefill_slot]),
        num_cached_tokens_decode=int(cached[decode_slot]),
        num_tokens=query.num_tokens,
        num_tokens_ahead=fleet.queued_ahead(slot, now_s) + uncached,
    )


def earliest_first_token_s(
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: PlacementConfig,
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
