"""Brings one ServingCluster one step nearer to what its spec wants. Of levels: it may be cut off at
any line, by another one goes on.

1. Read the spec; one that cannot be read, or has a pool become what it cannot, is told in a
   condition, and nothing of it is touched. Neither is anything while KubeRay's kind is not served.
2. WorkerPools (see `pools`), and what there is of their revisions (see `view`).
3. How many workers each revision is to have, and which share of requests each cohort (see
   `rolling`).
4. Configuration, Ray's token and account, then the RayCluster, whose groups have those sizes.
5. The supervisor is told of revisions, sizes and shares; it drains what is too much.
6. Routers, and what stands beside all of it (see `companions`).
7. Statuses, in which also stands how far rollouts are.

A deleted ServingCluster keeps its finalizer until its pools have drained and its RayCluster is
gone; a deleted WorkerPool until it has drained.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial

from baton import settings
from baton.config import ClusterConfig
from baton.errors import ConfigError
from cluster.planner.planner import PoolPlan
from deploy.api.read import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller import hindrances
from deploy.controller.applied import Applied
from deploy.controller.caches import Caches, cluster_keys
from deploy.controller.cluster_events import ClusterEvents
from deploy.controller.cluster_status import Refusals
from deploy.controller.cohort_figures import CohortFigures
from deploy.controller.companions import Companions
from deploy.controller.conditions import Verdict
from deploy.controller.discovery import Discovery
from deploy.controller.each import each
from deploy.controller.errors import (
    KubeError,
    StatusError,
)
from deploy.controller.finalizers import Finalizers
from deploy.controller.fleet_watch import FleetWatch
from deploy.controller.kube import Kube
from deploy.controller.kuberay import KubeRay, new_groups
from deploy.controller.manifests.cluster_yaml import cluster_config, config_map, with_name
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.routers import router_deployment, router_service
from deploy.controller.objects import Key, Object, Resource, key_of
from deploy.controller.observed import Pod
from deploy.controller.planning import Planning
from deploy.controller.pool_size import within_bounds
from deploy.controller.pools import Pools
from deploy.controller.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    SERVICES,
    SERVING_CLUSTERS,
    WORKER_POOLS,
)
from deploy.controller.revisions import head_code
from deploy.controller.rolling import Rolling, decide
from deploy.controller.rolling_status import progress_in, timestamp, watches_in
from deploy.controller.statuses import Statuses
from deploy.controller.supervision import Supervision
from deploy.controller.view import ClusterView, groups_in, pool_view

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
        self._figures = CohortFigures()
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
            view = self._view(obj, owner, spec, pools)
            if view.is_going and not pools:
                return self._let_go(obj)
            context = self._context(view)
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
        self._figures.forget(key)
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
        self, obj: Object, owner: Owner, spec: ServingClusterSpec, pools: Mapping[str, Object]
    ) -> ClusterView:
        """Raises ConfigError or ValueError for a pool that cannot be read."""
        key = key_of(obj)
        specs = self._pool_specs(pools)
        ray = self._kuberay.find(key)
        groups = groups_in(ray)
        seen = self._caches.of_cluster(self._caches.pods, key)
        pods = [Pod.of(pod, self._now()) for pod in seen]
        heard = self._fleets.heard(key)
        views = {
            name: pool_view(obj, pool, specs[name], groups, pods, heard)
            for name, pool in pools.items()
        }
        poolless = [pod for pod in pods if not pod.pool]
        return ClusterView(key, obj, owner, spec, views, heard, ray, poolless)

    def _pool_specs(self, pools: Mapping[str, Object]) -> dict[str, WorkerPoolSpec]:
        """Each that cannot be read is told so, too. Raises ConfigError."""
        specs, problems = {}, []
        for name, pool in pools.items():
            try:
                specs[name] = read_spec(WorkerPoolSpec, within_bounds(pool))
            except ConfigError as error:
                problems.append(str(error))
                told = hindrances.invalid_spec(pool, str(error))
                self._statuses.tell(WORKER_POOLS, pool, told, timestamp(self._now()))
        if problems:
            raise ConfigError("; ".join(problems))
        return specs

    def _context(self, view: ClusterView) -> PodContext:
        return PodContext(
            view.owner,
            view.spec,
            self._release,
            head_code(view.obj["spec"]),
            _routers_hash_of(cluster_config(view.owner, view.spec, {})),
            self._discovery.version >= _GRPC_PROBES_SINCE,
        )

    def _decide(self, view: ClusterView) -> Rolling:
        progress, told = progress_in(view.obj), view.heard.told
        figures = (
            self._figures.take(view.key, progress, told)
            if progress is not None and told is not None
            else None
        )
        watches = watches_in({name: pool.obj for name, pool in view.pools.items()})
        return decide(view, progress, watches, figures, self._now())

    # --- what is done -----------------------------------------------------------------------------

    def _bring_nearer(
        self,
        view: ClusterView,
        context: PodContext,
        groups: Mapping[str, Manifest],
        failed: list[KubeError],
    ) -> float | None:
        rolling = self._decide(view)
        self._statuses.keep(view, rolling.progress)
        refused: dict[str, str] = {}
        plans = self._plans(view)
        self._events.look(view, plans)
        parts: list[Callable[[], object]] = [
            lambda: self._apply(
                CONFIG_MAPS, config_map(view.owner, cluster_config(view.owner, view.spec, {}))
            ),
            lambda: self._kuberay.apply(view, context, rolling.pools, groups),
            lambda: refused.update(self._tell_supervisor(view, rolling)),
            lambda: self._apply(DEPLOYMENTS, router_deployment(context, view.groups.values())),
            lambda: self._apply(SERVICES, router_service(view.owner, view.spec.router)),
            lambda: self._pools.release(view),
            lambda: self._pools.scale(view, plans),
        ]
        failed += each(parts)
        kept = self._companions.keep(view)
        failed += kept.refused
        now = timestamp(self._now())
        failed += self._statuses.tell_pools(view, rolling, plans, refused, now)
        refusals = Refusals([*map(str, failed)], refused, kept.unserved)
        routers = self._caches.deployments.get(Key(view.key.namespace, view.owner.router_name))
        failed += each(
            [partial(self._statuses.tell_cluster, view, rolling, routers, refusals, now)]
        )
        if failed:
            raise failed[0]
        return min(_LOOK_AGAIN_S, max(_TOLD_EVERY_S, view.spec.planner.panic_window_s))

    def _tell_supervisor(self, view: ClusterView, rolling: Rolling) -> Mapping[str, str]:
        """What it refused, by pool."""
        client = self._fleets.client(view.key)
        if client is None:
            return {}
        supervision = Supervision(client, self._kube.check_may_write)
        supervision.tell(view, rolling)
        for pool, problem in supervision.refused.items():
            log.warning("%s: pool %s: the supervisor: %s", view.key, pool, problem)
        return supervision.refused

    def _plans(self, view: ClusterView) -> Mapping[str, PoolPlan]:
        """What the planner would have of pools that stay; nothing while none are told of."""
        told = view.heard.told
        if told is None or view.is_going:
            return {}
        pool_of = {name: each.revision.pool for name, each in view.revisions.items()}
        try:
            specs, config = view.staying_specs, view.spec.planner
            return self._planning.plan(view.key, told, specs, config, pool_of)
        except ValueError as error:  # a figure that is none
            log.warning("%s: not planned: %s", view.key, error)
            return {}

    def _apply(self, resource: Resource, obj: Manifest) -> Object:
        (cluster,) = cluster_keys(obj)
        return self._applied.apply(cluster, resource, obj)


def _routers_hash_of(config: ClusterConfig) -> str:
    """Of all that a router must be restarted for."""
    said = {name: value for name, value in settings.dump(config).items() if name in _OF_ROUTERS}
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]
