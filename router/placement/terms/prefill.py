"""Uncached tokens at the rate at which the worker prefills."""

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.PREFILL


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats:
    return query.prefill_s
