"""A WorkerPool's status from what is seen and decided of it. Pure."""

from __future__ import annotations

import datetime

from baton.config.planner import PlannerTargets
from deploy.api.naming import as_written
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.drains import held_by, is_overdue
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL, Object
from deploy.controller.observed import Place
from deploy.controller.pool_size import size_problem
from deploy.controller.status.conditions import AVAILABLE, DEGRADED, PROGRESSING, Verdict, shortened
from deploy.controller.status.waiting import SILENT, STARTING, Silence, model_problem, with_waits
from deploy.controller.view import PoolView

_LOOKS = Silence(STARTING.reason, "Ray's head has just started, and waits for workers to report")


def pool_status(view: PoolView, targets: PlannerTargets, now: str) -> Object:
    """Without conditions, None for what is not known; no places while nobody tells of them, but for
    those that drained before."""
    spec, pool = view.spec, view.fleet
    places = pool.places if pool is not None else ()
    draining = _draining(view, now)
    return {
        "replicas": len([pod for pod in view.pods if not pod.is_going]),
        "readyReplicas": num_serving(view),
        "draining": draining,
        "drainingReplicas": len(draining),
        "selector": f"{CLUSTER_LABEL}={spec.cluster},{POOL_LABEL}={spec.pool}",
        "queue": sum(place.num_waiting for place in places),
        "kvUsePercent": round(100 * max((place.kv_use for place in view.live), default=0.0)),
        "lastError": (shortened(as_written(pool.last_error)) or None) if pool is not None else None,
        "ttftSeconds": _seconds(pool.seen.ttft_s) if pool is not None else None,
        "ttftTargetSeconds": targets.ttft_target_s if spec.role != "decode" else None,
        "itlSeconds": _seconds(pool.seen.itl_s) if pool is not None else None,
        "itlTargetSeconds": targets.itl_target_s if spec.role != "prefill" else None,
    }


def _seconds(seen: float | None) -> float | None:
    return None if seen is None else round(seen, 4)


def _draining(view: PoolView, now: str) -> list[Object]:
    """Since when is kept here alone: another operator goes on counting."""
    before = view.obj.get("status", {}).get("draining", [])
    if view.is_untold:
        return list(before)
    since = {each["worker"]: each.get("since", now) for each in before}
    return [
        _drain(view.spec, place, since.get(place.worker_id, now), now) for place in view.draining
    ]


def _drain(pool: WorkerPoolSpec, place: Place, since: str, now: str) -> Object:
    drain = {"worker": place.worker_id, "numRunning": place.num_running, "since": since}
    if place.pod:
        drain["pod"] = place.pod
    spent = datetime.datetime.fromisoformat(now) - datetime.datetime.fromisoformat(since)
    if is_overdue(pool, spent.total_seconds()):
        drain["heldBy"] = held_by(place)
    return drain


def num_serving(view: PoolView) -> int:
    """Workers that take requests: as the supervisor says, or as their pods' own probes do while
    nobody says anything else."""
    if view.is_untold:
        return sum(pod.is_ready and not pod.is_going for pod in view.pods)
    return len(view.live)


def pool_verdicts(
    view: PoolView, refused: str, waits: str = "", silent: Silence = SILENT
) -> list[Verdict]:
    """Available, Progressing and Degraded, each with a reason. `refused`: what the supervisor did
    not take of the pool; `waits`: what its pods wait for; both empty: nothing."""
    spec, num_live, num_draining = view.spec, num_serving(view), len(view.draining)
    has_enough = num_live >= min(spec.replicas, max(1, spec.min_replicas))
    if view.is_untold:
        reason, why = silent if view.is_silent else _LOOKS
        told = with_waits(f"{why}; workers that run go on", waits)
        ready = f"{num_live} of {spec.replicas} workers are ready, as their pods say"
        return [
            Verdict(AVAILABLE, True, "Live", ready)
            if has_enough
            else Verdict(AVAILABLE, False, reason, told),
            Verdict(PROGRESSING, True, reason, told),
            _degraded(view, refused, silent),
        ]
    told = f"{num_live} of {spec.replicas} workers live"
    late = waits if num_live < spec.replicas else ""
    return [
        Verdict(
            AVAILABLE, has_enough, "Live" if has_enough else "TooFewLive", with_waits(told, late)
        ),
        _progressing(view, num_draining, told, late),
        _degraded(view, refused, silent),
    ]


def _degraded(view: PoolView, refused: str, silent: Silence) -> Verdict:
    pool = view.fleet
    if problem := size_problem(view):
        return Verdict(DEGRADED, True, "InvalidSpec", problem)
    if refused:
        return Verdict(DEGRADED, True, "SupervisorRefused", f"Ray's head: {refused}")
    if problem := model_problem(view.pods):
        where = f"spec.model of ServingCluster {view.spec.cluster}"
        return Verdict(DEGRADED, True, "ModelUnavailable", f"{where}: {problem}")
    if view.is_silent:
        return Verdict(DEGRADED, False, *silent)
    if pool is not None and pool.last_error:
        return Verdict(DEGRADED, True, "StartFailed", as_written(pool.last_error))
    return Verdict(DEGRADED, False, "Sound", "nothing has failed")


def _progressing(view: PoolView, num_draining: int, told: str, waits: str) -> Verdict:
    if num_draining:
        drains = with_waits(f"{told}, {num_draining} drain", waits)
        return Verdict(PROGRESSING, True, "Draining", drains)
    if view.makes_way:
        way = f"{told}: their unit makes way for another one"
        return Verdict(PROGRESSING, True, "MakesWay", way)
    if num_serving(view) < view.spec.replicas:
        return Verdict(PROGRESSING, True, "Starting", with_waits(told, waits))
    return Verdict(PROGRESSING, False, "AsWanted", told)
