"""Brings one ServingCluster one step nearer to what its spec wants. Of levels: it may be cut off at
any line, by another one goes on.

1. Read the spec; one that cannot be read, or has a pool become what it cannot, is told in a
   condition, and nothing of it is touched. Neither is anything while KubeRay's kind is not served.
2. WorkerPools (see `pools`), the unit that they ask for (see `units`), and what there is.
3. What becomes of the units that there are (see `rollout`).
4. Ray's token and account, then each unit's RayCluster and configuration (see `kuberay`).
5. Each unit's supervisor gets pools, sizes and shares; it drains what is too much.
6. Routers, and what stands beside all of it (see `companions`).
7. Statuses.

A deleted ServingCluster keeps its finalizer until its pools have drained and its RayCluster is
gone; a deleted WorkerPool until it has drained.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from baton.config import settings
from baton.config.cluster import ClusterConfig
from baton.errors import ConfigError
from baton.v1 import control_pb2
from cluster.planner.planner import PoolPlan
from deploy.api.checked import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.caches import Caches, cluster_keys
from deploy.controller.companions import Companions
from deploy.controller.fleet_watch import FleetWatch, merged
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.errors import (
    KubeError,
    StatusError,
    each,
)
from deploy.controller.kit.finalizers import Finalizers
from deploy.controller.kit.kube import Discovery, Kube
from deploy.controller.kit.objects import Key, Object, Resource, key_of
from deploy.controller.kuberay import KubeRay, NewGroups, new_groups
from deploy.controller.manifests.cluster_yaml import (
    cluster_config,
    model_name,
    router_config_map,
    seconds,
    with_name,
)
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import (
    image_in,
    name_in,
    record_in,
    unit_in,
)
from deploy.controller.manifests.routers import (
    control_service,
    first_routers,
    router_deployment,
    router_service,
)
from deploy.controller.observed import NOTHING_HEARD, Heard, Pod
from deploy.controller.planning import Planning
from deploy.controller.pool_size import with_accepted_size
from deploy.controller.pools import Pools
from deploy.controller.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    SERVICES,
    SERVING_CLUSTERS,
    WORKER_POOLS,
)
from deploy.controller.rollout import Figures, PoolSeen, Strategy, UnitSeen, next_step, total
from deploy.controller.status import conditions
from deploy.controller.status.cluster_events import ClusterEvents
from deploy.controller.status.cluster_status import Refusals
from deploy.controller.status.conditions import Verdict, timestamp
from deploy.controller.status.pool_status import num_serving
from deploy.controller.status.statuses import Statuses
from deploy.controller.supervision import Supervision
from deploy.controller.units import Unit, difference, unit_of
from deploy.controller.view import ClusterView, PoolView, UnitView, groups_in

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 5.0
_TOLD_EVERY_S = 1.0  # by a supervisor
_REFUSALS = (400, 403, 404, 422)
_GRPC_PROBES_SINCE = (1, 24)
_OF_ROUTERS = ("served_model_name", "log_level", "router")


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class ClusterReconciler:
    """`reconcile` is called for one key by one thread at a time."""

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        fleets: FleetWatch,
        events: ClusterEvents,
        release: Release,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        self._kube, self._caches, self._fleets = kube, caches, fleets
        self._events, self._release, self._now = events, release, now
        self._planning = Planning()
        self._applied = Applied(kube, caches.of_written)
        self._discovery = Discovery(kube)
        self._companions = Companions(self._applied, self._discovery, release)
        self._kuberay = KubeRay(kube, caches, self._applied)
        self._finalizers = Finalizers(kube)
        self._pools = Pools(kube, caches, self._applied, self._finalizers)
        self._statuses = Statuses(kube)

    def reconcile(self, key: Key) -> float | None:
        """In how many seconds to look again without being told; raises KubeError."""
        obj = self._caches.clusters.get(key)
        if obj is None:
            self._forget(key)
            self._pools.release_orphans(key)
            return None
        self._events.look_at(obj)
        owner = Owner(key.name, key.namespace, obj["metadata"]["uid"])
        try:
            spec = with_name(read_spec(ServingClusterSpec, obj), obj)
            if not self._kuberay.is_served:
                return self._tell_kuberay_missing(obj)
            self._finalizers.keep(SERVING_CLUSTERS, obj)
            pools, failed = self._pools.keep(obj, owner, spec)
            if "deletionTimestamp" in obj["metadata"] and not pools:
                return self._let_go(obj)
            specs = self._pool_specs(obj, pools)
            staying = {name: pool["spec"] for name, pool in pools.items() if not _is_going(pool)}
            wanted = unit_of(obj["spec"], staying)
            view = self._view(obj, owner, spec, pools, specs, wanted)
            contexts = self._contexts(view, wanted)
            groups = new_groups(view, contexts)
        except StatusError as error:
            self._tell_refused(obj, error)
            raise
        except (ConfigError, ValueError) as error:
            log.warning("%s: %s", key, error)
            return self._hindered(obj, conditions.invalid_spec(obj, str(error)))
        return self._bring_nearer(view, contexts, groups, failed)

    def tell_fault(self, key: Key, error: Exception) -> None:
        """Of a reconcile that has raised what it never should; raises KubeError."""
        obj = self._caches.clusters.get(key)
        if obj is not None:
            self._tell(obj, conditions.internal_error(error))

    def _tell(self, obj: Object, verdicts: list[Verdict]) -> None:
        self._statuses.tell(SERVING_CLUSTERS, obj, verdicts, timestamp(self._now()))

    def _tell_refused(self, obj: Object, error: StatusError) -> None:
        """Without what was refused nothing of it could be looked at. A bad moment of the server's,
        and what is known too late, are no faults to tell people of."""
        if error.code not in _REFUSALS:
            return
        with contextlib.suppress(KubeError):  # that, too: the log has it
            self._tell(obj, conditions.refused(error))

    def _let_go(self, obj: Object) -> float | None:
        """Nothing of its pools is waited for any more: what else belongs to it goes with it. Its
        RayCluster goes before: to empty the Redis of Ray's head KubeRay runs a pod of the head's
        template, whose account, token and configuration would be gone."""
        try:
            is_left = self._kuberay.end(obj)
        except StatusError as error:
            self._tell_refused(obj, error)
            raise
        if is_left:
            self._tell(obj, conditions.ray_ends())
            return _LOOK_AGAIN_S
        self._forget(key_of(obj))
        self._finalizers.drop(SERVING_CLUSTERS, obj)
        return None

    def _forget(self, key: Key) -> None:
        self._fleets.forget(key)
        self._planning.forget(key)
        self._applied.forget(key)
        self._events.forget(key)

    def _hindered(self, obj: Object, verdicts: list[Verdict]) -> float | None:
        """It can be brought no nearer: that is told, and one that is deleted is let go."""
        if "deletionTimestamp" in obj["metadata"]:
            self._pools.release_orphans(key_of(obj))  # each pod drains by itself when it goes
            return self._let_go(obj)
        self._tell(obj, verdicts)
        return None

    def _tell_kuberay_missing(self, obj: Object) -> float:
        verdicts, now = conditions.kuberay_missing(), timestamp(self._now())
        for pool in self._caches.of_cluster(self._caches.pools, key_of(obj)):
            self._statuses.tell(WORKER_POOLS, pool, verdicts, now)
        self._hindered(obj, verdicts)
        return _LOOK_AGAIN_S

    # --- what is seen -----------------------------------------------------------------------------

    def _view(
        self,
        obj: Object,
        owner: Owner,
        spec: ServingClusterSpec,
        pools: Mapping[str, Object],
        specs: Mapping[str, WorkerPoolSpec],
        wanted: Unit,
    ) -> ClusterView:
        key = key_of(obj)
        seen = self._caches.of_cluster(self._caches.pods, key)
        pods = [Pod.of(pod, self._now()) for pod in seen]
        found = {unit_in(ray).code: ray for ray in self._kuberay.find(obj)}
        self._fleets.follow(key, {code: owner.control_of(code) for code in found})
        heard = {code: self._fleets.heard(key, code) for code in found}
        made = {code: _views(pools, specs, pods, heard[code], ray) for code, ray in found.items()}
        totals = {name: 0 if _is_going(pool) else specs[name].replicas
                  for name, pool in pools.items()}  # fmt: skip
        step = next_step(
            None if _is_going(obj) else wanted,
            totals,
            strategy_of(spec, found.values()),
            [_unit_seen(ray, made[code], heard[code]) for code, ray in found.items()],
            sum(_counts(pod) and pod.unit not in found for pod in pods),
            spec.advanced.router.max_timeout_s,
            self._now().timestamp(),
        )
        units = []
        for plan in step.plans:
            ray = found.get(plan.code)
            views = made.get(plan.code) or _views(pools, specs, (), NOTHING_HEARD, None)
            planned = {
                name: replace(pool, planned_size=plan.sizes.get(name, 0), makes_way=plan.is_leaving)
                for name, pool in views.items()
            }
            is_wanted = ray is None or not difference(unit_in(ray), wanted)
            is_wanted = is_wanted and not plan.is_leaving
            told = heard.get(plan.code, NOTHING_HEARD)
            units.append(UnitView(plan, ray, told, planned, is_wanted))
        told = merged({unit.code: unit.heard for unit in units})
        over_all = {
            name: PoolView(
                pool,
                specs[name],
                [pod for pod in pods if pod.pool == name],
                None if told.fleet is None else told.fleet.pools.get(name),
                next((g for u in reversed(units) if (g := u.pools[name].group)), None),
                told,
                makes_way=bool(units) and all(unit.plan.is_leaving for unit in units),
            )
            for name, pool in pools.items()
        }
        poolless = [pod for pod in pods if not pod.pool]
        return ClusterView(key, obj, owner, spec, over_all, told, step, units, poolless)

    def _pool_specs(
        self, cluster: Object, pools: Mapping[str, Object]
    ) -> dict[str, WorkerPoolSpec]:
        """Each that cannot be read is told so, too. Raises ConfigError."""
        specs, problems = {}, []
        for name, pool in pools.items():
            try:
                specs[name] = read_spec(WorkerPoolSpec, with_accepted_size(name, pool, cluster))
            except ConfigError as error:
                problems.append(str(error))
                told = conditions.invalid_spec(pool, str(error))
                self._statuses.tell(WORKER_POOLS, pool, told, timestamp(self._now()))
        if problems:
            raise ConfigError("; ".join(problems))
        return specs

    def _contexts(self, view: ClusterView, wanted: Unit) -> dict[str, PodContext]:
        """By the units' codes. A unit that the spec asks for keeps its code, whichever pools have
        come since it was made. Another one stays as it was made."""
        return {unit.code: self._context(view, unit, wanted) for unit in view.units}

    def _context(self, view: ClusterView, unit: UnitView, wanted: Unit) -> PodContext:
        ray = unit.ray_cluster
        made = wanted if ray is None or unit.is_wanted else unit_in(ray)
        return PodContext(
            view.owner,
            view.spec,
            self._release,
            replace(made, code=unit.code),
            self._discovery.version >= _GRPC_PROBES_SINCE,
            "" if ray is None else image_in(ray),
        )

    # --- what is done -----------------------------------------------------------------------------

    def _bring_nearer(
        self,
        view: ClusterView,
        contexts: Mapping[str, PodContext],
        groups: NewGroups,
        failed: list[KubeError],
    ) -> float | None:
        refused: dict[str, str] = {}
        plans = self._plans(view)
        self._events.look(view, plans)
        parts: list[Callable[[], object]] = [
            lambda: self._kuberay.bring(view, contexts, groups),
            lambda: refused.update(self._tell_supervisors(view)),
            lambda: self._keep_routers(view),
            lambda: self._pools.release(view),
            lambda: self._pools.scale(view, plans),
        ]
        failed += each(parts)
        kept = self._companions.keep(view)
        failed += kept.refused
        now = timestamp(self._now())
        failed += self._statuses.tell_pools(view, plans, refused, now)
        refusals = Refusals([*map(str, failed)], refused, kept.unserved)
        routers = self._caches.deployments.get(Key(view.key.namespace, view.owner.router_name))
        failed += each([partial(self._statuses.tell_cluster, view, routers, refusals, now)])
        if failed:
            raise failed[0]
        if view.is_rolling:
            return _TOLD_EVERY_S
        return min(_LOOK_AGAIN_S, max(_TOLD_EVERY_S, view.spec.advanced.planner.panic_window_s))

    def _keep_routers(self, view: ClusterView) -> None:
        """They are of no unit: none comes or goes with their settings."""
        owner = view.owner
        config = cluster_config(owner, view.spec, {})
        self._apply(CONFIG_MAPS, router_config_map(owner, config))
        has_grpc_probes = self._discovery.version >= _GRPC_PROBES_SINCE
        routers = router_deployment(
            owner,
            view.spec,
            self._release,
            _routers_hash_of(config),
            has_grpc_probes=has_grpc_probes,
        )
        if self._caches.deployments.get(Key(owner.namespace, owner.router_name)) is None:
            self._applied.make(view.key, DEPLOYMENTS, first_routers(routers))
        self._apply(DEPLOYMENTS, routers)
        if view.step.unit:  # while there is none it leads where it did
            self._apply(SERVICES, control_service(owner, view.step.unit))
        self._apply(SERVICES, router_service(owner, view.spec.router))

    def _tell_supervisors(self, view: ClusterView) -> Mapping[str, str]:
        """What they refused, by pool."""
        refused: dict[str, str] = {}
        routes = [
            control_pb2.Unit(code=code, control_address=view.owner.control_of(code), share=share)
            for code, share in view.step.routes
        ]
        for unit in view.units:
            client = self._fleets.client(view.key, unit.code)
            if client is None:
                continue
            supervision = Supervision(client, self._kube.check_may_write)
            supervision.tell(unit, routes)
            refused |= supervision.refused
        for pool, problem in refused.items():
            log.warning("%s: pool %s: the supervisor: %s", view.key, pool, problem)
        return refused

    def _plans(self, view: ClusterView) -> Mapping[str, PoolPlan]:
        """What the planner would have of pools that stay. With two units it sees both as one fleet,
        and makes no pool smaller. Nothing while the only unit makes way."""
        told = view.heard.told
        if told is None or not any(unit.is_wanted for unit in view.units):
            return {}
        try:
            specs, config = view.staying_specs, view.spec.planner_config
            plans = self._planning.plan(view.key, told, specs, config)
        except ValueError as error:  # a figure that is none
            log.warning("%s: not planned: %s", view.key, error)
            return {}
        if len(view.units) == 1:
            return plans
        return {
            name: plan
            for name, plan in plans.items()
            if plan.desired_replicas >= specs[name].replicas
        }

    def _apply(self, resource: Resource, obj: Manifest) -> Object:
        (cluster,) = cluster_keys(obj)
        return self._applied.apply(cluster, resource, obj)


def strategy_of(spec: ServingClusterSpec, rays: Iterable[Object]) -> Strategy:
    """Routers know one name of the model: a unit that serves it under another is recreated."""
    rollout, name = spec.rollout, model_name(spec)
    return Strategy(
        rollout.strategy == "Recreate" or any(name_in(ray) != name for ray in rays),
        rollout.max_surge,
        rollout.max_unavailable,
        tuple(sorted({*(step / 100 for step in rollout.steps), 1.0})),
        seconds(rollout.interval),
        seconds(rollout.ready_timeout),
        rollout.pause,
        max_failures=rollout.max_failure_percent / 100,
        max_slowdown=rollout.max_slowdown,
    )


def _is_going(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def _views(
    pools: Mapping[str, Object],
    specs: Mapping[str, WorkerPoolSpec],
    pods: Sequence[Pod],
    heard: Heard,
    ray: Object | None,
) -> dict[str, PoolView]:
    """Each pool in one unit."""
    code, groups = "" if ray is None else unit_in(ray).code, groups_in(ray)
    return {
        name: PoolView(
            pool,
            specs[name],
            [pod for pod in pods if pod.pool == name and pod.unit == code],
            None if heard.fleet is None else heard.fleet.pools.get(name),
            groups.get(name),
            heard,
        )
        for name, pool in pools.items()
    }


def _unit_seen(ray: Object, pools: Mapping[str, PoolView], heard: Heard) -> UnitSeen:
    told = () if heard.told is None else heard.told[0].routers
    requests = [each.requests for each in told if each.HasField("requests")]
    return UnitSeen(
        unit_in(ray),
        ray["metadata"]["creationTimestamp"],
        record_in(ray),
        {name: _pool_seen(pool) for name, pool in pools.items() if pool.group is not None},
        total(
            Figures(
                each.num_requests + each.num_abandoned,
                each.num_failures + each.num_abandoned,
                each.itl_s if each.HasField("itl_s") else None,
                each.num_active,
            )
            for each in requests
        ),
        _is_going(ray),
    )


def _pool_seen(pool: PoolView) -> PoolSeen:
    assert pool.group is not None
    asked = pool.group["replicas"] if pool.fleet is None else pool.fleet.desired_replicas
    return PoolSeen(asked, len(pool.standing_pods), num_serving(pool))


def _counts(pod: Pod) -> bool:
    """Whether it keeps its unit from being over."""
    return bool(pod.unit) and not pod.is_lost


def _routers_hash_of(config: ClusterConfig) -> str:
    """Of all that a router must be restarted for."""
    said = {name: value for name, value in settings.dump(config).items() if name in _OF_ROUTERS}
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]
