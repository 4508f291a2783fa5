"""Brings one ServingCluster one step nearer to what its spec wants. Of levels: an operator that was
cut off at any line goes on by looking again.

1. Read the spec. A condition says why one cannot be read, or asks for a change that is not allowed;
   nothing is touched then. Neither is anything while KubeRay's kind is not served.
2. WorkerPools (see `pools`), by what processes know each other (see `identities`), the unit that
   the pools ask for (see `units`), and what there is.
3. What becomes of the units that there are (see `rollout`).
4. Ray's token and account, then each unit's RayCluster and configuration (see `kuberay`).
5. Each unit's supervisor gets pools, sizes and shares; it drains what is too much.
6. Routers, and what stands beside all of it (see `companions`).
7. Statuses, and the events of their changes.

A deleted ServingCluster keeps its finalizer until its pools have drained and its RayCluster is
gone; a deleted WorkerPool until it has drained.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
from collections.abc import Callable, Mapping
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
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.errors import KubeError, StatusError, each
from deploy.controller.kit.finalizers import drop_finalizer, keep_finalizer
from deploy.controller.kit.kube import Discovery, Kube
from deploy.controller.kit.objects import Key, Object, key_of
from deploy.controller.manifests.cluster_yaml import cluster_config, router_config_map, with_name
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import image_in, unit_in
from deploy.controller.manifests.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    SERVICES,
    SERVING_CLUSTERS,
    WORKER_POOLS,
)
from deploy.controller.manifests.routers import (
    control_service,
    first_routers,
    router_deployment,
    router_service,
)
from deploy.controller.observed.pod import Pod
from deploy.controller.observed.view import ClusterView, Found, UnitView, is_going
from deploy.controller.reconcile.caches import Caches
from deploy.controller.reconcile.companions import Companions
from deploy.controller.reconcile.fleet_watch import FleetWatch
from deploy.controller.reconcile.identities import Identities
from deploy.controller.reconcile.kuberay import Groups, KubeRay, groups_of
from deploy.controller.reconcile.planning import Planning
from deploy.controller.reconcile.pools import Pools, with_accepted_size
from deploy.controller.reconcile.supervision import supervise
from deploy.controller.rollout.units import Unit, unit_of
from deploy.controller.status import conditions
from deploy.controller.status.cluster_status import Refusals
from deploy.controller.status.conditions import Verdict
from deploy.controller.status.events import Record
from deploy.controller.status.statuses import Statuses

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 5.0
_HINDERED_S = 30.0
_SOON_S = 1.0
"""A supervisor reports every second at most."""
_REFUSALS = (400, 403, 404, 422)
_GRPC_PROBES_SINCE = (1, 24)
_OF_ROUTERS = ("served_model_name", "router", "internal")


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class ClusterReconciler:
    """`reconcile` is called for one key by one thread at a time."""

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        fleets: FleetWatch,
        record: Record,
        release: Release,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        self._kube, self._caches, self._fleets = kube, caches, fleets
        self._release, self._now = release, now
        self._planning = Planning()
        self._applied = Applied(kube, caches.of_written)
        self._discovery = Discovery(kube)
        self._companions = Companions(self._applied, self._discovery, release)
        self._kuberay = KubeRay(kube, caches, self._applied)
        self._identities = Identities(kube, self._applied)
        self._pools = Pools(kube, caches, self._applied, record)
        self._statuses = Statuses(kube, record, now)

    def reconcile(self, key: Key) -> float | None:
        """Do what a ServingCluster lacks. Returns seconds to look again after. Raises KubeError."""
        obj = self._caches.clusters.get(key)
        if obj is None:
            self._forget(key)
            self._pools.release_orphans(key)
            return None
        owner = Owner(key.name, key.namespace, obj["metadata"]["uid"])
        try:
            spec = with_name(read_spec(ServingClusterSpec, obj), obj)
            if not self._kuberay.is_served:
                return self._without_kuberay(obj)
            keep_finalizer(self._kube, SERVING_CLUSTERS, obj)
            pools, failed = self._pools.keep(obj, owner, spec)
            if is_going(obj) and not pools:
                return self._let_go(obj)
            found = self._found(obj, owner, spec, pools)
            view = found.view(self._now())
            contexts = {unit.code: self._context(view, unit, found.wanted) for unit in view.units}
            groups = groups_of(view, contexts)
        except StatusError as error:
            self._report_refused(obj, error)
            raise
        except (ConfigError, ValueError) as error:
            log.warning("%s: %s", key, error)
            return self._hindered(obj, conditions.invalid_spec(obj, str(error)))
        return self._bring_nearer(view, contexts, groups, failed)

    def report_fault(self, key: Key, error: Exception) -> None:
        """Report a reconcile that has raised what it never should. Raises KubeError."""
        obj = self._caches.clusters.get(key)
        if obj is not None:
            self._report(obj, conditions.internal_error(error))

    def _report(self, obj: Object, verdicts: list[Verdict]) -> None:
        self._statuses.write(key_of(obj), SERVING_CLUSTERS, obj, verdicts)

    def _report_refused(self, obj: Object, error: StatusError) -> None:
        """Report that nothing of the cluster could be looked at. Conflicts and a server's own
        errors pass, and are not reported."""
        if error.code in _REFUSALS:
            with contextlib.suppress(KubeError):  # the log has it
                self._report(obj, conditions.refused(error))

    def _let_go(self, obj: Object) -> float | None:
        """Let a cluster without pools go, its RayCluster before the rest: to empty the Redis of
        Ray's head KubeRay runs a pod that needs the head's account, token and configuration."""
        try:
            is_left = self._kuberay.end(obj)
        except StatusError as error:
            self._report_refused(obj, error)
            raise
        if is_left:
            self._report(obj, conditions.ray_ends())
            return _LOOK_AGAIN_S
        self._forget(key_of(obj))
        drop_finalizer(self._kube, SERVING_CLUSTERS, obj)
        return None

    def _forget(self, key: Key) -> None:
        self._fleets.follow(key, None, ())
        self._identities.forget(key)
        self._planning.forget(key)
        self._applied.forget(key)
        self._statuses.forget(key)

    def _hindered(self, obj: Object, verdicts: list[Verdict]) -> float | None:
        """Report that a cluster can be brought no nearer. A deleted one may go."""
        if is_going(obj):
            self._pools.release_orphans(key_of(obj))  # each pod drains by itself when it goes
            return self._let_go(obj)
        self._report(obj, verdicts)
        return _HINDERED_S

    def _without_kuberay(self, obj: Object) -> float:
        verdicts, key = conditions.kuberay_missing(), key_of(obj)
        for pool in self._caches.of_cluster(self._caches.pools, key):
            self._statuses.write(key, WORKER_POOLS, pool, verdicts)
        self._hindered(obj, verdicts)
        return _LOOK_AGAIN_S

    # --- what is seen -----------------------------------------------------------------------------

    def _found(
        self, obj: Object, owner: Owner, spec: ServingClusterSpec, pools: Mapping[str, Object]
    ) -> Found:
        key, specs = key_of(obj), self._pool_specs(obj, pools)
        staying = {name: pool["spec"] for name, pool in pools.items() if not is_going(pool)}
        wanted = unit_of(obj["spec"], staying)
        pods = [Pod.of(pod, self._now()) for pod in self._caches.of_cluster(self._caches.pods, key)]
        rays = {unit_in(ray).code: ray for ray in self._kuberay.find(obj)}
        identity = self._identities.keep(obj, owner, spec)
        self._fleets.follow(key, identity, [owner.control_of(code) for code in rays])
        heard = {code: self._fleets.heard(owner.control_of(code)) for code in rays}
        return Found(obj, owner, spec, pools, specs, wanted, pods, rays, heard)

    def _pool_specs(
        self, cluster: Object, pools: Mapping[str, Object]
    ) -> dict[str, WorkerPoolSpec]:
        """Read the pools' specs. A condition says where one cannot be. Raises ConfigError."""
        specs, problems = {}, []
        for name, pool in pools.items():
            try:
                specs[name] = read_spec(WorkerPoolSpec, with_accepted_size(name, pool, cluster))
            except ConfigError as error:
                problems.append(str(error))
                verdicts = conditions.invalid_spec(pool, str(error))
                self._statuses.write(key_of(cluster), WORKER_POOLS, pool, verdicts)
        if problems:
            raise ConfigError("; ".join(problems))
        return specs

    def _context(self, view: ClusterView, unit: UnitView, wanted: Unit) -> PodContext:
        """Return what a unit's pods are made from. A unit that the spec asks for keeps its code,
        whichever pools have come since it was made. Another one stays as it was made."""
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
        groups: Groups,
        failed: list[KubeError],
    ) -> float | None:
        refused: dict[str, str] = {}
        plans = self._plans(view)
        parts: list[Callable[[], object]] = [
            lambda: self._keep_routers_config(view),  # which all pods follow
            lambda: self._kuberay.bring(view, contexts, groups),
            lambda: refused.update(self._supervise(view)),
            lambda: self._keep_routers(view),
            lambda: self._pools.release(view),
            lambda: self._pools.scale(view, plans),
        ]
        failed += each(parts)
        unkept, unserved = self._companions.keep(view)
        failed += unkept
        failed += self._statuses.write_pools(view, plans, refused)
        refusals = Refusals([*map(str, failed)], refused, unserved)
        routers = self._caches.deployments.get(Key(view.key.namespace, view.owner.router_name))
        failed += each([partial(self._statuses.write_cluster, view, routers, refusals)])
        if failed:
            raise failed[0]
        if view.is_rolling:
            return _SOON_S
        return min(_LOOK_AGAIN_S, max(_SOON_S, view.spec.advanced.planner.panic_window_s))

    def _keep_routers_config(self, view: ClusterView) -> None:
        config = cluster_config(view.owner, view.spec, {})
        self._applied.apply(view.key, CONFIG_MAPS, router_config_map(view.owner, config))

    def _keep_routers(self, view: ClusterView) -> None:
        """Apply the routers, which are of no unit: none comes or goes with their settings."""
        owner, key = view.owner, view.key
        has_grpc_probes = self._discovery.version >= _GRPC_PROBES_SINCE
        routers = router_deployment(
            owner,
            view.spec,
            self._release,
            _routers_hash_of(cluster_config(owner, view.spec, {})),
            has_grpc_probes=has_grpc_probes,
        )
        if self._caches.deployments.get(Key(owner.namespace, owner.router_name)) is None:
            self._applied.make(key, DEPLOYMENTS, first_routers(routers))
        self._applied.apply(key, DEPLOYMENTS, routers)
        if view.step.unit:  # while there is none it leads where it did
            self._applied.apply(key, SERVICES, control_service(owner, view.step.unit))
        self._applied.apply(key, SERVICES, router_service(owner, view.spec.router))

    def _supervise(self, view: ClusterView) -> Mapping[str, str]:
        """Ask the supervisors for what is wanted. Returns what they refused, by pool."""
        refused: dict[str, str] = {}
        address_of = view.owner.control_of
        routes = [
            control_pb2.Unit(code=code, control_address=address_of(code), share=share)
            for code, share in view.step.routes
        ]
        for unit in view.units:
            client = self._fleets.client(address_of(unit.code))
            if client is not None:
                refused |= supervise(client, unit, routes, self._kube.check_may_write)
        for pool, problem in refused.items():
            log.warning("%s: pool %s: the supervisor: %s", view.key, pool, problem)
        return refused

    def _plans(self, view: ClusterView) -> Mapping[str, PoolPlan]:
        """Plan the pools that stay. With two units the planner sees both as one fleet, and makes no
        pool smaller. It plans nothing while the only unit makes way."""
        answer = view.heard.answer
        if answer is None or not any(unit.is_wanted for unit in view.units):
            return {}
        try:
            specs, config = view.staying_specs, view.spec.planner_config
            plans = self._planning.plan(view.key, answer, specs, config)
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


def _routers_hash_of(config: ClusterConfig) -> str:
    """Hash the settings whose change restarts routers."""
    said = {name: value for name, value in settings.dump(config).items() if name in _OF_ROUTERS}
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]
