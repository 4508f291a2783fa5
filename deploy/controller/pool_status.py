"""A WorkerPool's status from what is seen of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.conditions import AVAILABLE, DEGRADED, PROGRESSING, Verdict
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL, Object
from deploy.controller.observed import FleetPool, Place, PlaceState, Pod


def pool_status(
    spec: WorkerPoolSpec, pods: Sequence[Pod], pool: FleetPool | None, config_hash: str
) -> Object:
    """Without conditions, None for what is not known; no `pool` while the supervisor is silent."""
    places = pool.places if pool is not None else ()
    ready = [place for place in places if place.state is PlaceState.LIVE]
    draining = [place for place in places if place.state is PlaceState.DRAINING]
    updated = {pod.name for pod in pods if pod.config_hash == config_hash}
    steps = [place.decode_step_s for place in ready if place.decode_step_s > 0]
    return {
        "replicas": len([pod for pod in pods if not pod.is_going]),
        "readyReplicas": len(ready),
        "updatedReplicas": len([place for place in ready if place.pod in updated]),
        "draining": [_draining(place) for place in draining],
        "selector": f"{CLUSTER_LABEL}={spec.cluster},{POOL_LABEL}={spec.pool}",
        "queue": sum(place.num_waiting for place in places),
        "kvUsePercent": round(100 * max((place.kv_use for place in ready), default=0.0)),
        "lastError": (pool.last_error or None) if pool is not None else None,
        "itlSeconds": round(max(steps), 4) if steps else None,
    }


def _draining(place: Place) -> Object:
    where = {"pod": place.pod} if place.pod else {}
    return {"worker": place.worker_id, "numRunning": place.num_running} | where


def pool_verdicts(spec: WorkerPoolSpec, pool: FleetPool | None) -> list[Verdict]:
    """Available, Progressing and Degraded, each with a reason."""
    if pool is None:
        silent = "the supervisor does not answer; workers that run go on"
        return [
            Verdict(AVAILABLE, False, "SupervisorSilent", silent),
            Verdict(PROGRESSING, True, "SupervisorSilent", silent),
            Verdict(DEGRADED, False, "SupervisorSilent", silent),
        ]
    num_live = sum(place.state is PlaceState.LIVE for place in pool.places)
    num_draining = sum(place.state is PlaceState.DRAINING for place in pool.places)
    told = f"{num_live} of {spec.replicas} workers live"
    has_enough = num_live >= min(spec.replicas, max(1, spec.min_replicas))
    return [
        Verdict(AVAILABLE, has_enough, "Live" if has_enough else "TooFewLive", told),
        _progressing(spec, num_live, num_draining, told),
        Verdict(DEGRADED, bool(pool.last_error), "StartFailed", pool.last_error)
        if pool.last_error
        else Verdict(DEGRADED, False, "Sound", "nothing has failed"),
    ]


def _progressing(spec: WorkerPoolSpec, num_live: int, num_draining: int, told: str) -> Verdict:
    if num_draining:
        return Verdict(PROGRESSING, True, "Draining", f"{told}, {num_draining} drain")
    if num_live < spec.replicas:
        return Verdict(PROGRESSING, True, "Starting", told)
    return Verdict(PROGRESSING, False, "AsWanted", told)
