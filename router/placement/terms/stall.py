"""A decode worker's compute is dearer than a prefill worker's: streams wait for it."""

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.ITSELF


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats | None:
    if query.policy.local_prefill == "never":
        return None
    share = (fleet.running + 1) / fleet.max_running
    return query.prefill_s * (share + (query.policy.local_prefill_weight - 1.0))
