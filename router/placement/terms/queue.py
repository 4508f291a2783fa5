"""The wait before the prompt starts: the prompts before it, less what is done of the first."""

import numpy as np

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.PREFILL


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats:
    progress = query.tokens_per_s * (query.now_s - fleet.head_since_s)
    queued = fleet.queued_tokens - np.minimum(fleet.head_tokens, progress)
    waits: Floats = queued / query.tokens_per_s
    return waits
