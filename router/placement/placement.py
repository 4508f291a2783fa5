"""What is asked about a prompt, what is answered, and which lengths the fleet takes at all. Pure.

Every (prefill worker, decode worker) pair is a candidate, and so is every decode worker alone,
which then prefills by itself. A candidate's cost is in predicted seconds. Nothing is booked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from baton.config.router import PlacementConfig
from router.fleet.fleet_arrays import Bools, FleetArrays, Floats, Ints


@dataclass(frozen=True)
class PlacementQuery:
    """One prompt as the choice sees it."""

    num_tokens: int
    max_new_tokens: int
    kv_class: int
    cached_tokens: Ints  # [slots]
    tokens_per_s: Floats
    """[slots] Prefill rates to reckon with (`trusted_speeds`)."""
    step_s: Floats
    """[slots] Times of a decode step to reckon with."""
    policy: PlacementConfig
    now_s: float
    least_new_tokens: int = 1
    """Output tokens that must fit after the prompt."""
    failed: frozenset[int] = frozenset()
    """Slots on which this request failed before."""
    reserved: Bools | None = None
    """[slots] Decode workers that are kept for a request before this one."""
    explores: bool = False
    """Old measures of workers and links do not count, so that they are measured again."""
    preferred: int | None = None
    """Slot of the decode worker on which the request's session was last."""

    @cached_property
    def prefill_s(self) -> Floats:
        """[slots] How long the prompt's uncached tokens take there."""
        uncached = np.maximum(1, self.num_tokens - self.cached_tokens)
        seconds: Floats = uncached / self.tokens_per_s
        return seconds


@dataclass(frozen=True)
class Placement:
    """A candidate with every term of its cost, in seconds."""

    prefill_slot: int | None  # None: the decode worker prefills
    decode_slot: int
    prefill_worker: str
    decode_worker: str
    cost_s: float
    terms_s: Mapping[str, float]
    """Each term of the cost that was considered, by name."""
    num_cached_tokens_prefill: int
    num_cached_tokens_decode: int
    num_tokens: int
    num_tokens_ahead: float
    """Of this prompt and those before it in line, what its worker has to compute."""

    @property
    def queue_s(self) -> float:
        return self.terms_s["queue"]

    @property
    def prefill_s(self) -> float:
        return self.terms_s["prefill"]

    def first_token_s(self, tokens_per_s: float) -> float:
        """Return how long to wait: queue and prefill as predicted here, or by the rate that the
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
        """Return what `Fleet.book` takes: slots, tokens to prefill, tokens that will need KV."""
        new = max(0, self.num_tokens - self.num_cached_tokens_decode) + max_new_tokens
        return self.prefill_slot, self.decode_slot, self.num_uncached_tokens, new

    @property
    def reason(self) -> str:
        """Where it runs and why, in a line for people."""
        terms = " + ".join(
            f"{seconds * 1e3:.1f} ms {name}" for name, seconds in self.terms_s.items()
        )
        if self.prefill_slot is None:
            held = f"{self.num_cached_tokens_decode} of {self.num_tokens} tokens cached"
            return f"local prefill on {self.decode_worker} ({held}): {terms}"
        return (
            f"prefill on {self.prefill_worker} ({self.num_cached_tokens_prefill} of"
            f" {self.num_tokens} tokens cached), decode on {self.decode_worker}"
            f" ({self.num_cached_tokens_decode} cached): {terms}"
        )


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
    """Return the reach of the workers that are usable now, held or not. Pure."""
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
    """Return the longest request that a decode worker with a place takes; 0: none has one."""
    is_open = fleet.usable & fleet.can_decode & (fleet.hold_until_s <= now_s) & ~reserved
    is_open &= fleet.running < fleet.max_running
    return float(fleet.longest_request[is_open].max(initial=0.0))


def least_prefill_s(num_tokens: int, fleet: FleetArrays) -> float:
    """Return the seconds in which the fastest measured worker prefills so many tokens; 0: none was
    measured."""
    learned = fleet.usable & np.isfinite(fleet.prefill_measured_s)
    if not learned.any():
        return 0.0
    return num_tokens / float(fleet.prefill_tokens_per_s[learned].max())
