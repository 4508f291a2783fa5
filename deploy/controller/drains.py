"""How long a worker may drain, and what holds up one that takes longer: workers give up their
requests by the pool's drainTimeout, so that something is wrong then. Pure."""

from __future__ import annotations

from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.cluster_yaml import seconds
from deploy.controller.observed import Place, PlaceState

_MARGIN_S = 30.0


def is_overdue(pool: WorkerPoolSpec, spent_s: float) -> bool:
    return spent_s > seconds(pool.drain_timeout) + _MARGIN_S


def held_by(place: Place) -> str:
    if place.state is PlaceState.SUSPECT:
        return f"it is stuck or silent, {place.num_running} requests on it"
    if place.num_running:
        return f"{place.num_running} requests still run"
    return "nothing runs on it any more, but its processes do not end"
