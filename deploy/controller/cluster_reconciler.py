"""Brings one ServingCluster one step nearer to what its spec wants. Of levels: it may be cut off at
any line, by another one goes on.

1. Read the spec; one that cannot be read, or has a pool become what it cannot, is told in a
   condition, and nothing of it is touched. Neither is anything while KubeRay's kind is not served.
2. WorkerPools (see `pools`), the unit that they ask for (see `units`), and what there is.
3. What becomes of the unit that there is (see `rollout`).
4. Ray's token and account, then the unit's RayCluster and configuration (see `kuberay`).
5. The supervisor is told of pools and sizes; it drains what is too much.
6. Routers, and what stands beside all of it (see `companions`).
7. Statuses.

A deleted ServingCluster keeps its finalizer until its pools have drained and its RayCluster is
gone; a deleted WorkerPool until it has drained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from baton.config import settings
from baton.config.cluster import ClusterConfig
from baton.errors import ConfigError
from cluster.planner.planner import PoolPlan
from deploy.api.read import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.caches import Caches, cluster_keys
from deploy.controller.companions import Companions
from deploy.controller.fleet_watch import FleetWatch
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.discovery import Discovery
from deploy.controller.kit.each import each
from deploy.controller.kit.errors import (
    KubeError,
    StatusError,
)
from deploy.controller.kit.finalizers import Finalizers
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Resource, key_of
from deploy.controller.kuberay import KubeRay, new_groups
from deploy.controller.manifests.cluster_yaml import (
    cluster_config,
    router_config_map,
    with_name,
)
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import unit_in
from deploy.controller.manifests.routers import (
    control_service,
    first_routers,
    router_deployment,
    router_service,
)
from deploy.controller.observed import Pod
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
from deploy.controller.rollout import State, UnitSeen, next_step
from deploy.controller.status import hindrances
from deploy.controller.status.cluster_events import ClusterEvents
from deploy.controller.status.cluster_status import Refusals
from deploy.controller.status.conditions import Verdict, timestamp
from deploy.controller.status.statuses import Statuses
from deploy.controller.supervision import Supervision
from deploy.controller.units import Unit, unit_of
from deploy.controller.view import ClusterView, PoolView, groups_in

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 5.0
_TOLD_EVERY_S = 1.0  # by a supervisor
_REFUSALS = (400, 403, 404, 422)
_GRPC_PROBES_SINCE = (1, 24)
_OF_ROUTERS = ("model", "model_revision", "tokenizer", "served_model_name", "log_level", "router")


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
            self._fleets.follow(key, owner.control_address)
            pools, failed = self._pools.keep(obj, owner, spec)
            if "deletionTimestamp" in obj["metadata"] and not pools:
                return self._let_go(obj)
            specs = self._pool_specs(obj, pools)
            wanted = unit_of(obj["spec"], _staying(pools, specs))
            view = self._view(obj, owner, spec, pools, specs, wanted)
            context = self._context(view, wanted)
            groups = new_groups(view, context)
        except StatusError as error:
            self._tell_refused(obj, error)
            raise
        except (ConfigError, ValueError) as error:
            log.warning("%s: %s", key, error)
            return self._hindered(obj, hindrances.invalid_spec(obj, str(error)))
        return self._bring_nearer(view, context, groups, failed)

    def tell_fault(self, key: Key, error: Exception) -> None:
        """Of a reconcile that has raised what it never should; raises KubeError."""
        obj = self._caches.clusters.get(key)
        if obj is not None:
            self._tell(obj, hindrances.internal_error(error))

    def _tell(self, obj: Object, verdicts: list[Verdict]) -> None:
        self._statuses.tell(SERVING_CLUSTERS, obj, verdicts, timestamp(self._now()))

    def _tell_refused(self, obj: Object, error: StatusError) -> None:
        """Without what was refused nothing of it could be looked at. A bad moment of the server's,
        and what is known too late, are no faults to tell people of."""
        if error.code not in _REFUSALS:
            return
        with contextlib.suppress(KubeError):  # that, too: the log has it
            self._tell(obj, hindrances.refused(error))

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
            self._tell(obj, hindrances.ray_ends())
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
        verdicts, now = hindrances.kuberay_missing(), timestamp(self._now())
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
        units = [_unit_seen(ray, pods) for ray in found.values()]
        num_left = sum(_counts(pod) and pod.unit not in found for pod in pods)
        is_going = "deletionTimestamp" in obj["metadata"]
        step = next_step(None if is_going else wanted, units, num_left)
        ray, heard = found.get(step.unit), self._fleets.heard(key)
        groups, makes_way = groups_in(ray), step.state in (State.DRAINING, State.ENDING)
        views = {
            name: PoolView(
                pool,
                specs[name],
                [pod for pod in pods if pod.pool == name],
                None if heard.fleet is None else heard.fleet.pools.get(name),
                groups.get(name),
                heard,
                makes_way,
            )
            for name, pool in pools.items()
        }
        poolless = [pod for pod in pods if not pod.pool]
        return ClusterView(key, obj, owner, spec, views, heard, step, ray, poolless)

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
                told = hindrances.invalid_spec(pool, str(error))
                self._statuses.tell(WORKER_POOLS, pool, told, timestamp(self._now()))
        if problems:
            raise ConfigError("; ".join(problems))
        return specs

    def _context(self, view: ClusterView, wanted: Unit) -> PodContext:
        """A unit that stays keeps its code, whichever pools have come since it was made."""
        stays = view.step.state is State.AS_WANTED
        return PodContext(
            view.owner,
            view.spec,
            self._release,
            dataclasses.replace(wanted, code=view.step.unit) if stays else wanted,
            _routers_hash_of(cluster_config(view.owner, view.spec, {})),
            self._discovery.version >= _GRPC_PROBES_SINCE,
        )

    # --- what is done -----------------------------------------------------------------------------

    def _bring_nearer(
        self,
        view: ClusterView,
        context: PodContext,
        groups: Mapping[str, Manifest],
        failed: list[KubeError],
    ) -> float | None:
        refused: dict[str, str] = {}
        plans = self._plans(view)
        self._events.look(view, plans)
        parts: list[Callable[[], object]] = [
            lambda: self._kuberay.bring(view, context, groups),
            lambda: refused.update(self._tell_supervisor(view)),
            lambda: self._keep_routers(view, context),
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
        if view.step.state is not State.AS_WANTED:
            return _TOLD_EVERY_S
        return min(_LOOK_AGAIN_S, max(_TOLD_EVERY_S, view.spec.advanced.planner.panic_window_s))

    def _keep_routers(self, view: ClusterView, context: PodContext) -> None:
        """They read the text of the model that serves: so they are left as they are until the unit
        that they were made for is gone."""
        owner = view.owner
        key = Key(owner.namespace, owner.router_name)
        if view.has_wanted_unit or self._caches.deployments.get(key) is None:
            config = cluster_config(owner, view.spec, {})
            self._apply(CONFIG_MAPS, router_config_map(owner, config))
            routers = router_deployment(context)
            if self._caches.deployments.get(key) is None:
                self._applied.make(view.key, DEPLOYMENTS, first_routers(routers))
            self._apply(DEPLOYMENTS, routers)
        self._apply(SERVICES, control_service(owner, view.step.unit or context.unit.code))
        self._apply(SERVICES, router_service(owner, view.spec.router))

    def _tell_supervisor(self, view: ClusterView) -> Mapping[str, str]:
        """What it refused, by pool."""
        client = self._fleets.client(view.key)
        if client is None:
            return {}
        supervision = Supervision(client, self._kube.check_may_write)
        supervision.tell(view)
        for pool, problem in supervision.refused.items():
            log.warning("%s: pool %s: the supervisor: %s", view.key, pool, problem)
        return supervision.refused

    def _plans(self, view: ClusterView) -> Mapping[str, PoolPlan]:
        """What the planner would have of pools that stay; nothing while none are told of, or their
        unit makes way for another one."""
        told = view.heard.told
        if told is None or not view.has_wanted_unit:
            return {}
        try:
            specs, config = view.staying_specs, view.spec.planner_config
            return self._planning.plan(view.key, told, specs, config)
        except ValueError as error:  # a figure that is none
            log.warning("%s: not planned: %s", view.key, error)
            return {}

    def _apply(self, resource: Resource, obj: Manifest) -> Object:
        (cluster,) = cluster_keys(obj)
        return self._applied.apply(cluster, resource, obj)


def _staying(
    pools: Mapping[str, Object], specs: Mapping[str, WorkerPoolSpec]
) -> dict[str, WorkerPoolSpec]:
    """Without pools that are being deleted."""
    return {
        name: specs[name]
        for name, pool in pools.items()
        if "deletionTimestamp" not in pool["metadata"]
    }


def _unit_seen(ray: Object, pods: Sequence[Pod]) -> UnitSeen:
    unit = unit_in(ray)
    own = [pod for pod in pods if _counts(pod) and pod.unit == unit.code]
    num_workers = sum(bool(pod.pool) for pod in own)
    return UnitSeen(unit, num_workers, "deletionTimestamp" in ray["metadata"])


def _counts(pod: Pod) -> bool:
    """Whether it keeps its unit from being over."""
    return bool(pod.unit) and not pod.is_lost


def _routers_hash_of(config: ClusterConfig) -> str:
    """Of all that a router must be restarted for."""
    said = {name: value for name, value in settings.dump(config).items() if name in _OF_ROUTERS}
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]
