"""When a request's first token can be expected at the earliest: pure, over the fleet as it is."""

from __future__ import annotations

import numpy as np

from baton.config.router import RouterConfig
from router.placement import FleetArrays, PlacementQuery


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
    left out: they only add to it. A prefill worker whose rate is not learned yet may be the fast
    one, so the result is None; a decode worker that never prefilled counts as the fastest of all.
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
    """Seconds in which no worker that was measured could prefill so many tokens; 0 where
    none was."""
    learned = fleet.usable & np.isfinite(fleet.prefill_measured_s)
    if not learned.any():
        return 0.0
    return num_tokens / float(fleet.prefill_tokens_per_s[learned].max())
