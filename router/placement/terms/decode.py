"""How much the request slows down the streams that it joins."""

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.DECODE
HORIZON_TOKENS = 32  # over which a decode worker's load counts when workers are compared


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats:
    batch_s = HORIZON_TOKENS * query.step_s
    return batch_s * (fleet.running + 1) / fleet.max_running
