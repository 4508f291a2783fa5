"""A ServingCluster's status from what is seen of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.api.naming import as_written
from deploy.api.serving_cluster import ModelSource, RouterSpec
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.manifests.cluster_yaml import model_field, model_name, model_path
from deploy.controller.manifests.common import ROUTER_PORT, Object
from deploy.controller.manifests.routers import FIRST_ROUTERS
from deploy.controller.pool_size import size_problem
from deploy.controller.rollout import State
from deploy.controller.status.conditions import AVAILABLE, DEGRADED, PROGRESSING, Verdict
from deploy.controller.status.pool_status import num_serving
from deploy.controller.status.waiting import (
    SILENT,
    STARTING,
    Silence,
    model_problem,
    pool_waits,
    router_waits,
    silence,
    with_waits,
)
from deploy.controller.view import ClusterView, PoolView


@dataclass(frozen=True)
class Refusals:
    """What of a cluster was not taken, in the words of who did not take it."""

    by_api_server: Sequence[str] = ()
    by_supervisor: Mapping[str, str] = field(default_factory=dict)
    """By pool; of none where it is of all."""
    unserved: Sequence[str] = ()
    """Kinds that the API server does not know."""


def cluster_status(view: ClusterView, verdicts: Sequence[Verdict]) -> Object:
    """Without conditions, None for what was told and is no more. What clients call the model stays
    once they could."""
    is_available = any(each.type == AVAILABLE and each.is_true for each in verdicts)
    called = {"model": model_name(view.spec)} if is_available else {}
    router = f"{view.owner.router_name}.{view.owner.namespace}.svc:{ROUTER_PORT}"
    if view.spec.router.tls is not None:
        router = f"grpcs://{router}"
    former = dict.fromkeys(view.obj.get("status", {}).get("pools", ()))
    return called | {
        "endpoints": {
            "grpc": router,
            "external": _external(view.spec.router),
            "control": view.owner.control_address,
        },
        "unit": view.step.unit or None,
        "rollout": {
            "state": view.step.state.value,
            "reason": view.step.reason,
            "units": _units(view) if len(view.units) > 1 else None,
        },
        "pools": former
        | {name: f"{num_serving(pool)}/{pool.replicas}" for name, pool in view.pools.items()},
    }


def _units(view: ClusterView) -> Object:
    shares = dict(view.step.routes)
    former = dict.fromkeys((view.obj.get("status", {}).get("rollout") or {}).get("units") or ())
    told = {}
    for unit in view.units:
        live = sum(len(pool.live) for pool in unit.pools.values())
        told[unit.code] = f"{shares.get(unit.code, 0.0):.0%} of requests, {live} workers live"
    return former | told


def _external(router: RouterSpec) -> str | None:
    """Its port is that of whoever lets it in. None: nothing leads to the routers from outside."""
    shows_another = router.ingress is not None and router.ingress.tls_secret_name is not None
    if router.hostname is None or (router.tls is None and not shows_another):
        return router.hostname
    return f"grpcs://{router.hostname}"


def cluster_verdicts(
    view: ClusterView, routers: Seen | None, refusals: Refusals, now: str
) -> list[Verdict]:
    """Available: a prompt would be answered; Progressing: something is still to become as wanted;
    Degraded: something has failed. `routers`: their Deployment."""
    silent = silence(view, now)
    num_ready = 0 if routers is None else routers.get("status", {}).get("readyReplicas", 0)
    errors = [f"{name}: {_start_error(view.spec.model, p.fleet.last_error)}"
              for name, p in view.pools.items()
              if p.fleet is not None and p.fleet.last_error]  # fmt: skip
    routers_wait = router_waits(view, routers)
    late = [_noted(f"{name} {num_serving(pool)}/{pool.replicas}", pool_waits(view, pool))
            for name, pool in view.pools.items()
            if num_serving(pool) != pool.replicas]  # fmt: skip
    num_routers = view.spec.router.replicas or _size_of(routers)
    if num_ready < num_routers:
        late.append(_noted(f"routers {num_ready}/{num_routers}", routers_wait))
    return [
        availability(view, num_ready, routers_wait, silent),
        _progressing(view, late, silent),
        _degraded(view, refusals, errors),
    ]


def _start_error(model: ModelSource, error: str) -> str:
    """With the field that it is about."""
    field = f"{model_field(model)}: " if model_path(model) in error else ""
    return field + as_written(error)


def _size_of(routers: Seen | None) -> int:
    return FIRST_ROUTERS if routers is None else int(routers.get("spec", {}).get("replicas", 1))


def availability(
    view: ClusterView, num_routers_ready: int, routers_wait: str = "", silent: Silence = SILENT
) -> Verdict:
    """Whether a prompt would be answered. `routers_wait`: what their pods wait for. A silent head
    prevents none by itself, but explains the rest."""
    missing = _missing(view, num_routers_ready, routers_wait)
    if missing is not None and view.fleet is None:
        return Verdict(AVAILABLE, False, *silent)
    if missing is not None:
        return missing
    if any(map(_is_stopped, view.pools.values())):
        stopped = "the planner has stopped pools: routers hold the next request until they are back"
        return Verdict(AVAILABLE, True, "Stopped", stopped)
    return Verdict(AVAILABLE, True, "Serving", "requests are served")


def _progressing(view: ClusterView, late: Sequence[str], silent: Silence) -> Verdict:
    """A unit that takes another one's place comes first: it explains the rest."""
    if view.is_rolling:
        is_over = view.step.state is State.REVERTED
        reason = f"Unit{view.step.state.value}"
        waits = [f"{name}: {waits}" for name, pool in view.pools.items()
                 if (waits := pool_waits(view, pool))]  # fmt: skip
        message = with_waits(view.step.reason, ", ".join(waits))
        return Verdict(PROGRESSING, not is_over, reason, message)
    if view.fleet is None:
        message = with_waits(silent.message, ", ".join(late))
        return Verdict(PROGRESSING, True, silent.reason, message)
    if untold := [name for name, pool in view.pools.items() if pool.is_untold]:
        told = f"Ray's head has just started, and waits for workers of {', '.join(untold)}"
        return Verdict(PROGRESSING, True, STARTING.reason, with_waits(told, ", ".join(late)))
    if late:
        return Verdict(PROGRESSING, True, "Changing", ", ".join(late))
    return Verdict(PROGRESSING, False, "AsWanted", "all workers and routers are there")


def _degraded(view: ClusterView, refusals: Refusals, errors: Sequence[str]) -> Verdict:
    """The reason of what is worst; the message has all of it."""
    problems = {name: size_problem(pool) for name, pool in view.pools.items()}
    has_failed = view.step.state in (State.REVERTING, State.REVERTED)
    faults = {
        "RolloutFailed": [view.step.reason] if has_failed else [],
        "InvalidSpec": [f"{name}: {problem}" for name, problem in problems.items() if problem],
        "Refused": refusals.by_api_server,
        "SupervisorRefused": [
            ": ".join(filter(None, ("Ray's head", *refusal)))
            for refusal in refusals.by_supervisor.items()
        ],
        "ModelUnavailable": _model_faults(view),
        "StartFailed": errors,
        "NotServed": refusals.unserved,
    }
    found = {reason: "; ".join(told) for reason, told in faults.items() if told}
    if not found:
        return Verdict(DEGRADED, False, "Sound", "nothing has failed")
    return Verdict(DEGRADED, True, next(iter(found)), "; ".join(found.values()))


def _model_faults(view: ClusterView) -> list[str]:
    """The first worker that does not get the model speaks for all."""
    pods = [pod for pool in view.pools.values() for pod in pool.pods]
    problem = model_problem(pods)
    return [f"{model_field(view.spec.model)}: {problem}"] if problem else []


def _missing(view: ClusterView, num_routers_ready: int, routers_wait: str) -> Verdict | None:
    """What prevents an answer to a prompt; None: nothing."""
    if not num_routers_ready:
        told = with_waits("no router is ready", routers_wait)
        return Verdict(AVAILABLE, False, "NoRouterReady", told)
    missing = _without_worker(view, "decode", "NoDecodeWorker", "no worker that decodes is live")
    if missing is None and view.spec.advanced.router.local_prefill == "never":
        told = "no worker that prefills is live"
        missing = _without_worker(view, "prefill", "NoPrefillWorker", told)
    return missing


def _without_worker(view: ClusterView, role: str, reason: str, told: str) -> Verdict | None:
    """None: one of the role is live, or starts for the next request."""
    pools = [pool for pool in view.pools.values() if pool.spec.role in (role, "mixed")]
    wakes = view.fleet is not None
    if any(num_serving(pool) or (wakes and _is_stopped(pool)) for pool in pools):
        return None
    if not any(pool.replicas for pool in pools):
        return Verdict(AVAILABLE, False, "ScaledToZero", f"{told}, and none is wanted: replicas 0")
    waits = [_noted(pool.spec.pool, waits) for pool in pools if (waits := pool_waits(view, pool))]
    return Verdict(AVAILABLE, False, reason, with_waits(told, ", ".join(waits)))


def _noted(told: str, waits: str) -> str:
    return f"{told} ({waits})" if waits else told


def _is_stopped(pool: PoolView) -> bool:
    """At zero by the planner, who starts it again for the next request."""
    is_planned = pool.spec.scaling.mode == "planner" and not pool.is_going
    return is_planned and not pool.spec.replicas
