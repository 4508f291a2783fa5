"""What people read in `kubectl describe` of a ServingCluster or WorkerPool: what has changed since
the operator looked last. What was before its first look is no news.

What makes a drain overdue stands in `drains`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.planner.planner import PoolPlan
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.drains import held_by, is_overdue
from deploy.controller.kit.events import EventType
from deploy.controller.kit.objects import Key, Object, key_of
from deploy.controller.observed import Place
from deploy.controller.status.conditions import AVAILABLE, DEGRADED, PROGRESSING
from deploy.controller.status.waiting import SILENT
from deploy.controller.view import ClusterView, PoolView

_ROUTINE = frozenset(
    {
        "AsWanted",
        "Changing",
        "Deleting",
        "Draining",
        "InvalidSpec",
        "KubeRayMissing",
    }
)
"""Reasons of Progressing that other events tell better, or that come and go."""
_WRITERS = {"kube-controller-manager": "a HorizontalPodAutoscaler"}

Record = Callable[[Object, EventType, str, str], None]
"""About what, its type, one word for programs, a sentence for people."""


@dataclass(frozen=True)
class Happening:
    type: EventType
    reason: str
    message: str


def _normal(reason: str, message: str) -> Happening:
    return Happening(EventType.NORMAL, reason, message)


def _warning(reason: str, message: str) -> Happening:
    return Happening(EventType.WARNING, reason, message)


@dataclass(frozen=True)
class Condition:
    is_true: bool
    reason: str
    message: str


Conditions = Mapping[str, Condition]


@dataclass(frozen=True)
class Drain:
    """A worker that drains; `since_s`: when that was seen first."""

    place: Place
    since_s: float
    is_overdue: bool


@dataclass(frozen=True)
class Written:
    """Who wrote a field, and when, as the API server has it."""

    manager: str
    at: str


@dataclass(frozen=True)
class PoolSeen:
    """A pool at one look."""

    replicas: int
    written: Written | None
    """`replicas`, as far as that was told; None: never."""
    conditions: Conditions
    pods: frozenset[str]
    drains: Mapping[str, Drain]
    """By worker; as they were while the supervisor is silent, or knows nothing yet."""
    planned: str
    """What the planner would change now, and why; empty: nothing."""


def conditions_of(obj: Object) -> Conditions:
    return {
        each["type"]: Condition(each["status"] == "True", each["reason"], each["message"])
        for each in obj.get("status", {}).get("conditions", ())
    }


def condition_happenings(before: Conditions, after: Conditions) -> list[Happening]:
    """Of conditions that say something else than before."""
    happenings = [
        _condition_happening(kind, before.get(kind), now)
        for kind, now in after.items()
        if before.get(kind) != now
    ]
    return [each for each in happenings if each is not None]


def _condition_happening(kind: str, then: Condition | None, now: Condition) -> Happening | None:
    was_true = then is not None and then.is_true
    if kind == AVAILABLE and now.is_true != was_true:
        make, reason = (_normal, "Available") if now.is_true else (_warning, "Unavailable")
        return make(reason, now.message)
    if kind == DEGRADED and now.is_true:
        return _warning(now.reason, now.message)
    if kind == DEGRADED and was_true:
        return _normal("Recovered", now.message)
    is_new = then is None or then.reason != now.reason
    if kind == PROGRESSING and is_new and now.reason not in _ROUTINE:
        is_normal = now.is_true and now.reason != SILENT.reason
        return (_normal if is_normal else _warning)(now.reason, now.message)
    return None


def pool_seen(
    pool: PoolView, drains: Mapping[str, Drain], plan: PoolPlan | None, before: PoolSeen | None
) -> PoolSeen:
    return PoolSeen(
        pool.spec.replicas,
        _written(pool.obj) or (None if before is None else before.written),
        conditions_of(pool.obj),
        frozenset(pod.name for pod in pool.pods),
        drains,
        "" if plan is None or pool.spec.scaling.mode != "planner" else _planned(pool, plan),
    )


def drains_of(
    pool: WorkerPoolSpec, draining: Sequence[Place], before: Mapping[str, Drain], now_s: float
) -> dict[str, Drain]:
    """`before`: at the last look; `now_s`: by any clock that never goes back."""
    drains = {}
    for place in draining:
        then = before.get(place.worker_id)
        since_s = now_s if then is None else then.since_s
        drains[place.worker_id] = Drain(place, since_s, is_overdue(pool, now_s - since_s))
    return drains


def _planned(pool: PoolView, plan: PoolPlan) -> str:
    parts = []
    if plan.desired_replicas != pool.spec.replicas:
        parts.append(f"from {pool.spec.replicas} to {plan.desired_replicas} replicas")
    roles = plan.role_plan
    if roles is not None and (roles.prefill, roles.decode) != pool.role_plan:
        parts.append(f"{roles.prefill} act as prefill alone, {roles.decode} as decode alone")
    return f"{', '.join(parts)}: {plan.reason}" if parts else ""


def _written(obj: Object) -> Written | None:
    """Of `spec.replicas`; None where the API server has not just told (see `cache`)."""
    owners = [
        (each.get("time", ""), each["manager"])
        for each in obj["metadata"].get("managedFields", ())
        if "f:replicas" in each.get("fieldsV1", {}).get("f:spec", {})
    ]
    if not owners:
        return None
    at, manager = max(owners)
    return Written(manager, at)


def exposure(view: ClusterView) -> Happening | None:
    """What hangs on Ray's head that need not, where workers may be on other nodes than it."""
    num_workers = sum(pool.replicas for pool in view.pools.values())
    if view.spec.ray.gcs_fault_tolerance is not None or num_workers < 2:
        return None
    message = (
        f"the loss of Ray's head would start all {num_workers} workers anew: "
        "spec.ray.gcsFaultTolerance names no Redis that keeps its state"
    )
    return _warning("HeadUnprotected", message)


def pool_happenings(before: PoolSeen, after: PoolSeen, own_manager: str) -> list[Happening]:
    """`own_manager`: the operator's name among those who write fields."""
    return [
        *condition_happenings(before.conditions, after.conditions),
        *_plan_happenings(before, after),
        *_size_happenings(before, after, own_manager),
        *_drain_happenings(before.drains, after.drains),
        *(
            _normal("PodRemoved", f"pod {name} is gone")
            for name in sorted(before.pods - after.pods)
        ),
    ]


def _plan_happenings(before: PoolSeen, after: PoolSeen) -> list[Happening]:
    """Its next look may say so again, before what it wrote is heard of."""
    if not after.planned or after.planned == before.planned:
        return []
    return [_normal("Planned", after.planned)]


def _size_happenings(before: PoolSeen, after: PoolSeen, own_manager: str) -> list[Happening]:
    if after.replicas == before.replicas:
        return []
    reason = "ScaledOut" if after.replicas > before.replicas else "ScaledIn"
    writers = {**_WRITERS, own_manager: "the planner"}
    by = ""
    if after.written is not None and after.written != before.written:
        # An API server before 1.22 does not note who writes through the scale subresource.
        by = f", by {writers.get(after.written.manager, after.written.manager)}"
    return [_normal(reason, f"from {before.replicas} to {after.replicas} replicas{by}")]


def _drain_happenings(before: Mapping[str, Drain], after: Mapping[str, Drain]) -> list[Happening]:
    happenings = []
    for worker, drain in sorted(after.items()):
        where = f" in pod {drain.place.pod}" if drain.place.pod else ""
        if worker not in before:
            running = f"{drain.place.num_running} requests run"
            happenings.append(_normal("Draining", f"worker {worker}{where} drains, {running}"))
        if drain.is_overdue and not (worker in before and before[worker].is_overdue):
            message = f"worker {worker}{where} does not finish its drain: {held_by(drain.place)}"
            happenings.append(_warning("DrainOverdue", message))
    gone = sorted(before.keys() - after.keys())
    return [*happenings, *(_normal("Drained", f"worker {worker} has drained") for worker in gone)]


@dataclass
class _Seen:
    conditions: Conditions
    is_exposed: bool
    """See `exposure`; no news of a cluster that an operator before this one has looked at."""
    pools: Mapping[str, PoolSeen] = field(default_factory=dict)
    """By the WorkerPools' uids."""


class ClusterEvents:
    """Own what was seen of each cluster; one cluster's is used by one thread at a time."""

    def __init__(
        self, record: Record, own_manager: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record, self._own_manager, self._clock = record, own_manager, clock
        self._seen: dict[Key, _Seen] = {}

    def look_at(self, cluster: Object) -> None:
        """At its conditions, also where its spec cannot be read."""
        now = conditions_of(cluster)
        seen = self._seen.setdefault(key_of(cluster), _Seen(now, is_exposed=bool(now)))
        self._tell(cluster, condition_happenings(seen.conditions, now))
        seen.conditions = now

    def look(self, view: ClusterView, plans: Mapping[str, PoolPlan]) -> None:
        """At its pools; after `look_at`. `plans`: by the pools' names."""
        seen = self._seen[view.key]
        now_s = self._clock()
        pools = {}
        for name, pool in view.pools.items():
            uid = pool.obj["metadata"]["uid"]
            before = seen.pools.get(uid)
            drains: Mapping[str, Drain] = {} if before is None else before.drains
            if pool.fleet is not None and view.heard.is_settled:
                drains = drains_of(pool.spec, pool.draining, drains, now_s)
            pools[uid] = after = pool_seen(pool, drains, plans.get(name), before)
            if before is not None:
                self._tell(pool.obj, pool_happenings(before, after, self._own_manager))
        seen.pools = pools
        exposed = exposure(view)
        if exposed is not None and not seen.is_exposed:
            self._tell(view.obj, [exposed])
        seen.is_exposed = exposed is not None

    def forget(self, cluster: Key) -> None:
        self._seen.pop(cluster, None)

    def _tell(self, about: Object, happenings: Sequence[Happening]) -> None:
        for each in happenings:
            self._record(about, each.type, each.reason, each.message)
