"""A ServingCluster's status from what is seen of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.conditions import AVAILABLE, DEGRADED, PROGRESSING, Verdict
from deploy.controller.manifests.common import ROUTER_PORT, Object
from deploy.controller.objects import Object as Seen
from deploy.controller.observed import PlaceState
from deploy.controller.revisions import cohort_of
from deploy.controller.rolling import Rolling
from deploy.controller.rolling_status import progress_status
from deploy.controller.view import ClusterView, PoolView

_DOES = {
    Phase.GROWING: "gets workers for more",
    Phase.WATCHING: "is watched",
    Phase.RETURNING: "is taken back",
}


def cluster_status(view: ClusterView, progress: Progress) -> Object:
    """Without conditions."""
    router = f"{view.owner.router_name}.{view.owner.namespace}.svc:{ROUTER_PORT}"
    if view.spec.router.tls is not None:
        router = f"grpcs://{router}"
    return {
        "endpoints": {"grpc": router, "control": view.owner.control_address},
        "revision": cohort_of(view.obj["spec"]),
        "cohort": progress_status(progress),
        "pools": {name: f"{num_live(pool)}/{pool.replicas}" for name, pool in view.pools.items()},
    }


def num_live(pool: PoolView) -> int:
    places = pool.fleet.places if pool.fleet is not None else ()
    return sum(place.state is PlaceState.LIVE for place in places)


def cluster_verdicts(
    view: ClusterView, rolling: Rolling, routers: Seen | None, refused: Sequence[str]
) -> list[Verdict]:
    """Available: a prompt would be answered; Progressing: something is still to become as wanted;
    Degraded: something has failed. `routers`: their Deployment; `refused`: what the API server or
    the supervisor did not take."""
    num_ready = 0 if routers is None else routers.get("status", {}).get("readyReplicas", 0)
    errors = [f"{name}: {p.fleet.last_error}" for name, p in view.pools.items()
              if p.fleet is not None and p.fleet.last_error]  # fmt: skip
    late = [f"{name} {num_live(pool)}/{pool.replicas}" for name, pool in view.pools.items()
            if num_live(pool) != pool.replicas]  # fmt: skip
    if num_ready < view.spec.router.replicas:
        late.append(f"routers {num_ready}/{view.spec.router.replicas}")
    return [
        availability(view, num_ready),
        _progressing(view, rolling, late),
        _degraded(rolling.progress, refused, errors),
    ]


def availability(view: ClusterView, num_routers_ready: int) -> Verdict:
    """Whether a prompt would be answered."""
    missing = _missing(view, num_routers_ready)
    if missing:
        return Verdict(AVAILABLE, False, "Missing", missing)
    if any(map(_is_stopped, view.pools.values())):
        stopped = "the planner has stopped pools: routers hold the next request until they are back"
        return Verdict(AVAILABLE, True, "Stopped", stopped)
    return Verdict(AVAILABLE, True, "Serving", "requests are served")


def _progressing(view: ClusterView, rolling: Rolling, late: Sequence[str]) -> Verdict:
    """What is rolled out comes first: it explains the rest."""
    progress = rolling.progress
    stopped = [name for name, pool in rolling.pools.items() if pool.is_stopped]
    if stopped and progress.phase in (Phase.SERVING, Phase.GROWING):
        told = f"{', '.join(stopped)}: the new version does not get ready, older workers serve on"
        return Verdict(PROGRESSING, False, "RolloutStopped", told)
    if progress.phase in _DOES:
        told = (
            f"{progress.weight}% of requests go to {progress.next}, which {_DOES[progress.phase]}"
        )
        return Verdict(PROGRESSING, True, f"Cohort{progress.phase.value}", told)
    if progress.phase is Phase.RETURNED:
        told = f"{progress.next} was taken back: nothing is tried again until the spec changes"
        return Verdict(PROGRESSING, False, "CohortReturned", told)
    rolled = [
        f"{name} {pool.updated.num_live} of {pool.replicas} updated"
        for name, pool in view.pools.items()
        if pool.others and pool.updated.num_live != pool.replicas
    ]
    if rolled:
        return Verdict(PROGRESSING, True, "RollingOut", ", ".join(rolled))
    if late:
        return Verdict(PROGRESSING, True, "Changing", ", ".join(late))
    return Verdict(PROGRESSING, False, "AsWanted", "all workers and routers are there")


def _degraded(progress: Progress, refused: Sequence[str], errors: Sequence[str]) -> Verdict:
    if refused:
        return Verdict(DEGRADED, True, "Refused", "; ".join(refused))
    if progress.is_fault:
        told = f"{progress.next} was taken back, {progress.serving} serves: {progress.reason}"
        return Verdict(DEGRADED, True, "CohortTakenBack", told)
    if errors:
        return Verdict(DEGRADED, True, "StartFailed", "; ".join(errors))
    return Verdict(DEGRADED, False, "Sound", "nothing has failed")


def _missing(view: ClusterView, num_routers_ready: int) -> str:
    """What keeps a prompt from being answered; empty: nothing."""
    if view.fleet is None:
        return "the supervisor does not answer"
    if not num_routers_ready:
        return "no router is ready"
    pools = view.pools.values()
    roles = {pool.spec.role for pool in pools if num_live(pool) or _is_stopped(pool)}
    if not roles & {"decode", "mixed"}:
        return "no worker that decodes is live"
    never_local = view.spec.router.settings.local_prefill == "never"
    if never_local and not roles & {"prefill", "mixed"}:
        return "no worker that prefills is live"
    return ""


def _is_stopped(pool: PoolView) -> bool:
    """At zero by the planner, who starts it again for the next request."""
    is_planned = pool.spec.scaling.mode == "planner" and not pool.is_going
    return is_planned and not pool.spec.replicas
