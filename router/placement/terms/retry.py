"""A worker that failed this very request is taken only when no other is left."""

import numpy as np

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.EACH
RETRY_PENALTY_S = 30.0


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats | None:
    if not query.failed:
        return None
    seconds = np.zeros(len(fleet.names))
    seconds[list(query.failed)] = RETRY_PENALTY_S
    return seconds
