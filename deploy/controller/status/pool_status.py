"""A WorkerPool's status from what is seen and decided of it. Pure."""

from __future__ import annotations

import datetime

from baton.config.planner import PlannerTargets
from baton.fleet import Role, WorkerState
from deploy.api.naming import as_written
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec, seconds
from deploy.controller.manifests.cluster_yaml import gpu_field, pool_device
from deploy.controller.manifests.common import CLUSTER_LABEL, POOL_LABEL, Object
from deploy.controller.observed.fleet import Slot
from deploy.controller.observed.view import PoolView
from deploy.controller.status.conditions import AVAILABLE, DEGRADED, PROGRESSING, Verdict, shortened
from deploy.controller.status.waiting import SILENT, STARTING, Silence, model_problem, with_waits

_DRAIN_MARGIN_S = 30.0
"""Workers give up their requests by the pool's drainTimeout: a drain that takes longer than this
beyond it is stuck."""
_LOOKS = Silence(STARTING.reason, "Ray's head has just started, and waits for workers to report")


def pool_status(view: PoolView, targets: PlannerTargets, now: str) -> Object:
    """Make a WorkerPool's status without conditions; None for what is not known."""
    spec, pool = view.spec, view.fleet
    slots = pool.slots if pool is not None else ()
    draining = _draining(view, now)
    return {
        "replicas": len([pod for pod in view.pods if not pod.is_going]),
        "readyReplicas": view.num_serving,
        "draining": draining,
        "drainingReplicas": len(draining),
        "selector": f"{CLUSTER_LABEL}={spec.cluster},{POOL_LABEL}={spec.pool}",
        "queue": sum(slot.num_waiting for slot in slots),
        "kvUsePercent": round(100 * max((slot.kv_use for slot in view.live), default=0.0)),
        "lastError": (shortened(as_written(pool.last_error)) or None) if pool is not None else None,
        "ttftSeconds": _seconds(pool.seen.ttft_s) if pool is not None else None,
        "ttftTargetSeconds": targets.ttft_target_s if spec.role is not Role.DECODE else None,
        "itlSeconds": _seconds(pool.seen.itl_s) if pool is not None else None,
        "itlTargetSeconds": targets.itl_target_s if spec.role is not Role.PREFILL else None,
    }


def _seconds(seen: float | None) -> float | None:
    return None if seen is None else round(seen, 4)


def _draining(view: PoolView, now: str) -> list[Object]:
    """List what drains, and since when, which the status alone remembers: another operator goes on
    counting. Drains stay while nobody reports."""
    before = view.obj.get("status", {}).get("draining", [])
    if view.is_unknown:
        return list(before)
    since = {each["worker"]: each.get("since", now) for each in before}
    return [_drain(view.spec, slot, since.get(slot.worker_id, now), now) for slot in view.draining]


def _drain(pool: WorkerPoolSpec, slot: Slot, since: str, now: str) -> Object:
    drain = {"worker": slot.worker_id, "numRunning": slot.num_running, "since": since}
    if slot.pod:
        drain["pod"] = slot.pod
    spent = datetime.datetime.fromisoformat(now) - datetime.datetime.fromisoformat(since)
    if spent.total_seconds() > seconds(pool.drain_timeout) + _DRAIN_MARGIN_S:
        drain["heldBy"] = held_by(slot)
    return drain


def held_by(slot: Slot) -> str:
    """Say what holds up a drain."""
    if slot.state is WorkerState.SUSPECT:
        return f"it is stuck or silent, {slot.num_running} requests on it"
    if slot.num_running:
        return f"{slot.num_running} requests still run"
    return "nothing runs on it any more, but its processes do not end"


def size_problem(pool: PoolView) -> str:
    """Say why a pool's size is not as asked; empty: it is."""
    spec = pool.spec
    asked = pool.obj.get("spec", {}).get("replicas", spec.replicas)
    if asked == spec.replicas:
        return ""
    field = f"of spec.pools.{spec.pool} in ServingCluster {spec.cluster}"
    if asked > spec.replicas:
        bound = f"above maxReplicas {spec.max_replicas}"
        remedy = f"scale to {spec.max_replicas} at most, or raise maxReplicas {field}"
    else:
        bound = f"below minReplicas {spec.min_replicas}"
        remedy = f"scale to {spec.min_replicas} at least, or lower minReplicas {field}"
    return f"spec.replicas is {asked}, {bound}: the size stays {spec.replicas}; {remedy}"


def gpu_problem(spec: ServingClusterSpec, pool: WorkerPoolSpec) -> str:
    """Say why a pool's GPUs stay idle; empty: they do not, or it asks for none."""
    field = gpu_field(pool)
    if not field or pool_device(spec, pool) == "cuda":
        return ""
    return f"spec.pools.{pool.pool}.{field} is for GPUs, but its engine.device is cpu: none is used"


def pool_verdicts(
    view: PoolView, refused: str, waits: str = "", silent: Silence = SILENT
) -> list[Verdict]:
    """Judge whether a pool is available, progressing and degraded. `refused`: what the supervisor
    refused of the pool; `waits`: what its pods wait for; both empty: nothing."""
    spec, num_live, num_draining = view.spec, view.num_serving, len(view.draining)
    has_enough = num_live >= min(spec.replicas, max(1, spec.min_replicas))
    if view.is_unknown:
        reason, why = silent if view.is_silent else _LOOKS
        message = with_waits(f"{why}; workers that run go on", waits)
        ready = f"{num_live} of {spec.replicas} workers are ready, as their pods say"
        return [
            Verdict(AVAILABLE, True, "Live", ready)
            if has_enough
            else Verdict(AVAILABLE, False, reason, message),
            Verdict(PROGRESSING, True, reason, message),
            _degraded(view, refused, silent),
        ]
    message = f"{num_live} of {spec.replicas} workers live"
    late = waits if num_live < spec.replicas else ""
    return [
        Verdict(
            AVAILABLE, has_enough, "Live" if has_enough else "TooFewLive", with_waits(message, late)
        ),
        _progressing(view, num_draining, message, late),
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


def _progressing(view: PoolView, num_draining: int, message: str, waits: str) -> Verdict:
    if num_draining:
        drains = with_waits(f"{message}, {num_draining} drain", waits)
        return Verdict(PROGRESSING, True, "Draining", drains)
    if view.makes_way:
        way = f"{message}: their unit makes way for another one"
        return Verdict(PROGRESSING, True, "MakesWay", way)
    if view.num_serving < view.spec.replicas:
        return Verdict(PROGRESSING, True, "Starting", with_waits(message, waits))
    return Verdict(PROGRESSING, False, "AsWanted", message)
