"""A ServingCluster's status from what is seen of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.fleet import Role
from deploy.api.naming import as_written
from deploy.api.serving_cluster import ModelSource, RouterSpec
from deploy.api.status import State
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.manifests.cluster_yaml import model_field, model_name, model_path
from deploy.controller.manifests.common import HTTP_PORT, ROUTER_PORT, Object
from deploy.controller.manifests.routers import FIRST_ROUTERS
from deploy.controller.observed.view import ClusterView, PoolView
from deploy.controller.status.conditions import AVAILABLE, DEGRADED, PROGRESSING, Verdict
from deploy.controller.status.pool_status import gpu_problem, size_problem
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


@dataclass(frozen=True)
class Refusals:
    """What was refused of a cluster, in the words of who refused it."""

    by_api_server: Sequence[str] = ()
    by_supervisor: Mapping[str, str] = field(default_factory=dict)
    """What a supervisor refused, by pool; under the empty name, what is about all."""
    unserved: Sequence[str] = ()
    """Kinds that the API server does not know."""


def cluster_status(view: ClusterView, verdicts: Sequence[Verdict]) -> Object:
    """Make a ServingCluster's status without conditions; None takes an entry away. The model's name
    stays once clients could use it."""
    is_available = any(each.type == AVAILABLE and each.is_true for each in verdicts)
    called = {"model": model_name(view.spec)} if is_available else {}
    host = f"{view.owner.router_name}.{view.owner.namespace}.svc"
    ways = view.spec.router
    is_plain = ways.tls is None
    router, openai = f"{host}:{ROUTER_PORT}", f"{host}:{HTTP_PORT}/v1"
    if not is_plain:
        router = f"grpcs://{router}"
    former = dict.fromkeys(view.obj.get("status", {}).get("pools", ()))
    return called | {
        "endpoints": {
            "grpc": router,
            "openai": f"{'http' if is_plain else 'https'}://{openai}",
            "external": _external(ways, ways.hostname, "grpcs://"),
            "externalOpenai": _external(ways, ways.http_hostname and f"{ways.http_hostname}/v1"),
            "control": view.owner.control_address,
        },
        "unit": view.step.unit or None,
        "rollout": {
            "state": view.step.state.value,
            "reason": view.step.reason,
            **_units(view),
        },
        "pools": former
        | {name: f"{pool.num_serving}/{pool.replicas}" for name, pool in view.pools.items()},
    }


def _units(view: ClusterView) -> Object:
    """Show each unit's share and workers; nothing of one alone."""
    if len(view.units) < 2:
        return {"units": None, "shares": None}
    routes = dict(view.step.routes)
    former = dict.fromkeys((view.obj.get("status", {}).get("rollout") or {}).get("units") or ())
    units, shares = dict(former), dict(former)
    for unit in view.units:
        live = sum(len(pool.live) for pool in unit.pools.values())
        share = routes.get(unit.code, 0.0)
        units[unit.code] = f"{share:.0%} of requests, {live} workers live"
        shares[unit.code] = round(100 * share)
    return {"units": units, "shares": shares}


def _external(router: RouterSpec, hostname: str | None, scheme: str = "https://") -> str | None:
    """Return the routers' address outside, at the gateway's or ingress's port; None: none."""
    shows_another = router.ingress is not None and router.ingress.tls_secret_name is not None
    if hostname is None or (router.tls is None and not shows_another):
        return hostname
    return f"{scheme}{hostname}"


def cluster_verdicts(
    view: ClusterView, routers: Seen | None, refusals: Refusals, now: str
) -> list[Verdict]:
    """Judge a cluster. Available: a prompt would be answered. Progressing: something is not yet as
    wanted. Degraded: something has failed. `routers`: their Deployment."""
    silent = silence(view, now)
    num_ready = 0 if routers is None else routers.get("status", {}).get("readyReplicas", 0)
    errors = [f"{name}: {_start_error(view.spec.model, p.fleet.last_error)}"
              for name, p in view.pools.items()
              if p.fleet is not None and p.fleet.last_error]  # fmt: skip
    routers_wait = router_waits(view, routers)
    late = [_noted(f"{name} {pool.num_serving}/{pool.replicas}", pool_waits(view, pool))
            for name, pool in view.pools.items()
            if pool.num_serving != pool.replicas]  # fmt: skip
    size = FIRST_ROUTERS if routers is None else int(routers.get("spec", {}).get("replicas", 1))
    num_routers = view.spec.router.replicas or size
    if num_ready < num_routers:
        late.append(_noted(f"routers {num_ready}/{num_routers}", routers_wait))
    return [
        availability(view, num_ready, routers_wait, silent),
        _progressing(view, late, silent),
        _degraded(view, refusals, errors),
    ]


def _start_error(model: ModelSource, error: str) -> str:
    """Word a start's error, with the field that names the model where it is about the model."""
    field = f"{model_field(model)}: " if model_path(model) in error else ""
    return field + as_written(error)


def availability(
    view: ClusterView, num_routers_ready: int, routers_wait: str = "", silent: Silence = SILENT
) -> Verdict:
    """Tell whether a prompt would be answered. `routers_wait`: what their pods wait for. A silent
    head prevents no answer, but explains what is missing."""
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
    """Tell whether something is not yet as wanted. A rollout comes first: it explains the rest."""
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
    if unknown := [name for name, pool in view.pools.items() if pool.is_unknown]:
        message = f"Ray's head has just started, and waits for workers of {', '.join(unknown)}"
        return Verdict(PROGRESSING, True, STARTING.reason, with_waits(message, ", ".join(late)))
    if late:
        return Verdict(PROGRESSING, True, "Changing", ", ".join(late))
    return Verdict(PROGRESSING, False, "AsWanted", "all workers and routers are there")


def _degraded(view: ClusterView, refusals: Refusals, errors: Sequence[str]) -> Verdict:
    """Give the reason of the worst fault, and the messages of all."""
    problems = {name: size_problem(pool) for name, pool in view.pools.items()}
    no_model = model_problem([pod for pool in view.pools.values() for pod in pool.pods])
    idle = [gpu_problem(view.spec, pool.spec) for pool in view.pools.values()]
    has_failed = view.step.state in (State.REVERTING, State.REVERTED, State.STRANDED)
    faults = {
        "RolloutFailed": [view.step.reason] if has_failed else [],
        "InvalidSpec": [f"{name}: {problem}" for name, problem in problems.items() if problem],
        "Refused": refusals.by_api_server,
        "SupervisorRefused": [
            ": ".join(filter(None, ("Ray's head", *refusal)))
            for refusal in refusals.by_supervisor.items()
        ],
        "ModelUnavailable": [f"{model_field(view.spec.model)}: {no_model}"] if no_model else [],
        "StartFailed": errors,
        "NotServed": refusals.unserved,
        "GpuUnused": list(filter(None, idle)),
    }
    found = {reason: "; ".join(messages) for reason, messages in faults.items() if messages}
    if not found:
        return Verdict(DEGRADED, False, "Sound", "nothing has failed")
    return Verdict(DEGRADED, True, next(iter(found)), "; ".join(found.values()))


def _missing(view: ClusterView, num_routers_ready: int, routers_wait: str) -> Verdict | None:
    """Say what prevents an answer to a prompt; None: nothing."""
    if not num_routers_ready:
        message = with_waits("no router is ready", routers_wait)
        return Verdict(AVAILABLE, False, "NoRouterReady", message)
    missing = _without_worker(view, Role.DECODE, "NoDecodeWorker", "no worker that decodes is live")
    if missing is None and view.spec.advanced.router.placement.local_prefill == "never":
        message = "no worker that prefills is live"
        missing = _without_worker(view, Role.PREFILL, "NoPrefillWorker", message)
    return missing


def _without_worker(view: ClusterView, role: Role, reason: str, message: str) -> Verdict | None:
    """Say that no worker of a role serves. None: one is live, or starts for the next request."""
    pools = [pool for pool in view.pools.values() if pool.spec.role in (role, Role.MIXED)]
    wakes = view.fleet is not None
    if any(pool.num_serving or (wakes and _is_stopped(pool)) for pool in pools):
        return None
    if not any(pool.replicas for pool in pools):
        message = f"{message}, and none is wanted: replicas 0"
        return Verdict(AVAILABLE, False, "ScaledToZero", message)
    waits = [_noted(pool.spec.pool, waits) for pool in pools if (waits := pool_waits(view, pool))]
    return Verdict(AVAILABLE, False, reason, with_waits(message, ", ".join(waits)))


def _noted(message: str, waits: str) -> str:
    return f"{message} ({waits})" if waits else message


def _is_stopped(pool: PoolView) -> bool:
    """Tell whether the planner has a pool at zero, and starts it again for the next request."""
    is_planned = pool.spec.scaling.mode == "planner" and not pool.is_going
    return is_planned and not pool.spec.replicas
