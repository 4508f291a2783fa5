"""A session stays on the decode worker where it was last, if that costs hardly more."""

import numpy as np

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.DECODE
SESSION_TOLERANCE_S = 1e-3


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats | None:
    if query.preferred is None:
        return None
    seconds = np.zeros(len(fleet.names))
    seconds[query.preferred] = -SESSION_TOLERANCE_S
    return seconds
