"""How much the request slows down the streams that it joins."""

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.DECODE


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats:
    batch_s = query.policy.decode_horizon_tokens * query.step_s
    return batch_s * (fleet.running + 1) / fleet.max_running
