"""Brings one ServingCluster one step nearer to what its spec wants. Of levels: it may be cut off at
any line, by another one goes on.

1. Read the spec; one that cannot be read is told in a condition, and nothing of it is touched.
2. WorkerPools: made with `initialReplicas`; what the spec says is applied, but never a size.
3. Configuration, Ray's token and account, then the RayCluster, whose groups have the pools' sizes.
4. The supervisor is told sizes and role plans; it drains what is too much (see `group_size`).
5. Routers, and what stands beside all of it (see `companions`).
6. Status.

A deleted ServingCluster keeps its finalizer until its pools have drained; a deleted WorkerPool too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from baton import settings
from baton.config import ClusterConfig
from baton.errors import BatonError, ConfigError
from cluster.planner.planner import PoolPlan
from deploy.api.naming import GROUP
from deploy.api.read import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.applied import Applied
from deploy.controller.caches import Caches, cluster_keys
from deploy.controller.cluster_status import cluster_status, cluster_verdicts
from deploy.controller.companions import Companions
from deploy.controller.conditions import DEGRADED, PROGRESSING, Verdict, conditions
from deploy.controller.discovery import Discovery
from deploy.controller.errors import AlreadyExistsError, KubeError, NotFoundError
from deploy.controller.fleet_watch import FleetWatch
from deploy.controller.kube import Kube
from deploy.controller.manifests.cluster_yaml import cluster_config, config_map
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import ray_cluster
from deploy.controller.manifests.routers import router_deployment, router_service
from deploy.controller.manifests.shared import pods_account, ray_token
from deploy.controller.manifests.worker_pool import worker_pool
from deploy.controller.objects import Key, Object, Resource, key_of
from deploy.controller.observed import Pod
from deploy.controller.planning import Planning
from deploy.controller.pool_status import pool_status, pool_verdicts
from deploy.controller.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    RAY_CLUSTERS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    SERVING_CLUSTERS,
    WORKER_POOLS,
)
from deploy.controller.view import ClusterView, PoolView

log = logging.getLogger(__name__)

FINALIZER = f"{GROUP}/drain"
_LOOK_AGAIN_S = 5.0
_GRPC_PROBES_SINCE = (1, 24)


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ClusterReconciler:
    """`reconcile` is called for one key by one thread at a time."""

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        fleets: FleetWatch,
        release: Release,
        now: Callable[[], str] = utc_now,
    ) -> None:
        self._kube, self._caches, self._fleets = kube, caches, fleets
        self._release, self._now = release, now
        self._planning = Planning()
        self._applied = Applied(kube, caches.of_written)
        self._discovery = Discovery(kube)
        self._companions = Companions(self._applied, self._discovery, release)

    def reconcile(self, key: Key) -> float | None:
        """In how many seconds to look again without being told; raises KubeError."""
        obj = self._caches.clusters.get(key)
        if obj is None:
            self._forget(key)
            self._release_orphans(key)
            return None
        owner = Owner(key.name, key.namespace, obj["metadata"]["uid"])
        try:
            spec = read_spec(ServingClusterSpec, obj)
            self._keep_finalizer(SERVING_CLUSTERS, obj)
            self._fleets.follow(key, owner.control_address)
            pools, failed = self._pools(obj, owner, spec)
            fleet, is_settled = self._fleets.fleet(key), self._fleets.is_settled(key)
            view = ClusterView(key, obj, owner, spec, pools, fleet, is_settled)
            if view.is_going and not pools:
                self._let_go(view)
                return None
            config = cluster_config(owner, spec, view.pool_specs)
        except (ConfigError, ValueError) as error:
            self._tell_invalid(obj, str(error))
            return None
        return self._bring_nearer(view, config, failed)

    def _release_orphans(self, key: Key) -> None:
        """Pools whose ServingCluster is gone: what serves them goes with it, and so may they."""
        for pool in self._caches.of_cluster(self._caches.pools, key):
            self._drop_finalizer(WORKER_POOLS, pool)

    def _let_go(self, view: ClusterView) -> None:
        """Its pools have drained: what else belongs to it goes with it."""
        self._forget(view.key)
        self._drop_finalizer(SERVING_CLUSTERS, view.obj)

    def _forget(self, key: Key) -> None:
        self._fleets.forget(key)
        self._planning.forget(key)
        self._applied.forget(key)

    def _bring_nearer(
        self, view: ClusterView, config: ClusterConfig, failed: list[KubeError]
    ) -> float | None:
        context = PodContext(
            view.owner,
            view.spec,
            self._release,
            _hash_of(config),
            _routers_hash_of(config),
            self._discovery.version >= _GRPC_PROBES_SINCE,
        )
        failed += self._each(
            lambda: self._apply(CONFIG_MAPS, config_map(view.owner, config)),
            lambda: self._apply_ray(view, context),
            lambda: self._tell_sizes(view),
            lambda: self._apply(DEPLOYMENTS, router_deployment(context)),
            lambda: self._apply(SERVICES, router_service(view.owner, view.spec.router)),
            lambda: self._release_pools(view),
        )
        kept = self._companions.keep(view)
        failed += kept.refused
        plans = self._plans(view)
        failed += self._each(lambda: self._scale(view, plans))
        refused = [*map(str, failed), *kept.unserved]
        failed += self._tell_status(view, context.config_hash, plans, refused)
        if failed:
            raise failed[0]
        return _LOOK_AGAIN_S

    @staticmethod
    def _each(*parts: Callable[[], object]) -> list[KubeError]:
        """What failed: a part that the API server refuses keeps no other from being done."""
        failed = []
        for part in parts:
            try:
                part()
            except KubeError as error:
                failed.append(error)
        return failed

    # --- pools ------------------------------------------------------------------------------------

    def _pools(
        self, obj: Object, owner: Owner, spec: ServingClusterSpec
    ) -> tuple[dict[str, PoolView], list[KubeError]]:
        """Have a WorkerPool for each pool of the spec; others are deleted: all of them, where the
        cluster itself is."""
        key = key_of(obj)
        seen = {
            pool["spec"].get("pool"): pool
            for pool in self._caches.of_cluster(self._caches.pools, key)
        }
        wanted_pools = {} if "deletionTimestamp" in obj["metadata"] else obj["spec"]["pools"]
        failed: list[KubeError] = []
        for name, template in wanted_pools.items():
            wanted = worker_pool(owner, name, template, FINALIZER)
            try:
                seen[name] = self._keep_pool(wanted, spec.pools[name].initial_replicas)
            except KubeError as error:  # as it was, if it was: the others go on
                failed.append(error)
        for name in seen.keys() - wanted_pools.keys():
            if "deletionTimestamp" not in seen[name]["metadata"]:
                self._kube.delete(WORKER_POOLS, key_of(seen[name]))
        fleet = self._fleets.fleet(key)
        pods = [Pod.of(pod) for pod in self._caches.of_cluster(self._caches.pods, key)]
        views = {
            name: PoolView(
                pool,
                read_spec(WorkerPoolSpec, pool),
                [pod for pod in pods if pod.pool == name],
                None if fleet is None else fleet.pools.get(name),
            )
            for name, pool in seen.items()
        }
        return views, failed

    def _keep_pool(self, wanted: Manifest, initial_replicas: int) -> Object:
        """Made with its first size; afterwards whoever scales it says what it is."""
        first = wanted | {"spec": wanted["spec"] | {"replicas": initial_replicas}}
        seen = self._caches.pools.get(key_of(wanted))
        if seen is not None and "deletionTimestamp" in seen["metadata"]:
            return seen
        if seen is None:
            with contextlib.suppress(AlreadyExistsError):  # the cache has yet to hear of it
                self._kube.create(WORKER_POOLS, first)
        return self._apply(WORKER_POOLS, wanted)

    def _release_pools(self, view: ClusterView) -> None:
        """Deleted pools go when their last worker and pod have: those of a cluster that is deleted
        all together, for what is left of it needs a whole configuration while streams run."""
        over = [pool for pool in view.pools.values() if pool.is_going and _is_empty(pool)]
        if not view.is_going or len(over) == len(view.pools):
            for pool in over:
                self._drop_finalizer(WORKER_POOLS, pool.obj)

    # --- what serves ------------------------------------------------------------------------------

    def _apply_ray(self, view: ClusterView, context: PodContext) -> None:
        """One apply tells KubeRay each group's size and which pods go."""
        self._apply(SERVICE_ACCOUNTS, pods_account(view.owner))
        if view.spec.ray.token_secret_name is None:
            self._make_token(view.owner)
        sizes = {name: view.group_size(pool) for name, pool in view.pools.items()}
        self._apply(RAY_CLUSTERS, ray_cluster(context, view.pool_specs, sizes))

    def _make_token(self, owner: Owner) -> None:
        """Once: another token would lock out the pods that run."""
        secret = ray_token(owner, secrets.token_hex(32))
        self._applied.make(Key(owner.namespace, owner.name), SECRETS, secret)

    def _tell_sizes(self, view: ClusterView) -> None:
        """The supervisor drains what is too much, and fills what is missing."""
        client = self._fleets.client(view.key)
        for name, pool in view.pools.items():
            if client is None or pool.fleet is None:
                continue
            try:
                if pool.fleet.desired_replicas != pool.replicas:
                    client.set_replicas(name, pool.replicas)
                if pool.fleet.role_plan != pool.role_plan:
                    client.set_role_plan(name, *pool.role_plan)
            except BatonError as error:
                log.warning("%s: pool %s: %s", view.key, name, error)

    def _plans(self, view: ClusterView) -> Mapping[str, PoolPlan]:
        """What the planner would have; nothing while the supervisor is silent."""
        told = self._fleets.told(view.key)
        if told is None or view.is_going:
            return {}
        try:
            return self._planning.plan(view.key, told, view.pool_specs, view.spec.planner)
        except ValueError as error:  # a figure that is none
            log.warning("%s: not planned: %s", view.key, error)
            return {}

    def _scale(self, view: ClusterView, plans: Mapping[str, PoolPlan]) -> None:
        """The sizes and roles of pools whose `scaling.mode` is planner: nobody else writes them."""
        for name, plan in plans.items():
            pool = view.pools[name]
            if pool.spec.scaling.mode != "planner" or pool.is_going:
                continue
            spec: Manifest = {}
            if plan.desired_replicas != pool.spec.replicas:
                spec["replicas"] = plan.desired_replicas
            roles = plan.role_plan
            if roles is not None and (roles.prefill, roles.decode) != pool.role_plan:
                spec["rolePlan"] = {"prefill": roles.prefill, "decode": roles.decode}
            if spec:
                log.info("%s: %s", view.key, plan.reason)
                self._kube.merge_patch(WORKER_POOLS, key_of(pool.obj), {"spec": spec})

    # --- status -----------------------------------------------------------------------------------

    def _tell_status(
        self,
        view: ClusterView,
        config_hash: str,
        plans: Mapping[str, PoolPlan],
        refused: Sequence[str],
    ) -> list[KubeError]:
        """What failed of it."""
        tells: list[Callable[[], None]] = []
        for name, pool in view.pools.items():
            plan = plans.get(name)
            status = pool_status(pool.spec, pool.pods, pool.fleet, config_hash) | {
                "desiredReplicas": None if plan is None else plan.desired_replicas,
                "desiredReason": None if plan is None else plan.reason,
            }
            verdicts = pool_verdicts(pool.spec, pool.fleet)
            tells.append(partial(self._tell, WORKER_POOLS, pool.obj, status, verdicts))
        deployment = self._caches.deployments.get(Key(view.key.namespace, view.owner.router_name))
        verdicts = cluster_verdicts(view, deployment, refused)
        status = cluster_status(view, config_hash)
        tells.append(partial(self._tell, SERVING_CLUSTERS, view.obj, status, verdicts))
        return self._each(*tells)

    def _tell_invalid(self, obj: Object, problem: str) -> None:
        log.warning("%s: %s", key_of(obj), problem)
        if "deletionTimestamp" in obj["metadata"]:
            self._release_orphans(key_of(obj))  # each pod drains by itself when it goes
            self._drop_finalizer(SERVING_CLUSTERS, obj)
            return
        verdicts = [
            Verdict(DEGRADED, True, "InvalidSpec", problem),
            Verdict(PROGRESSING, False, "InvalidSpec", "waits for a spec that can be read"),
        ]
        self._tell(SERVING_CLUSTERS, obj, {}, verdicts)

    def _tell(
        self, resource: Resource, obj: Object, status: Manifest, verdicts: list[Verdict]
    ) -> None:
        """Unless it says so already; None takes a field away. Nobody else writes a status."""
        told = status | {
            "observedGeneration": obj["metadata"].get("generation", 0),
            "conditions": conditions(verdicts, obj, self._now()),
        }
        before = obj.get("status", {})
        if all(before.get(name) == value for name, value in told.items()):
            return
        with contextlib.suppress(NotFoundError):  # it was deleted just now
            self._kube.merge_patch(resource, key_of(obj), {"status": told}, "status")

    # --- objects ----------------------------------------------------------------------------------

    def _apply(self, resource: Resource, obj: Manifest) -> Object:
        (cluster,) = cluster_keys(obj)
        return self._applied.apply(cluster, resource, obj)

    def _keep_finalizer(self, resource: Resource, obj: Object) -> None:
        metadata = obj["metadata"]
        if "deletionTimestamp" not in metadata and FINALIZER not in metadata.get("finalizers", ()):
            finalizers = [*metadata.get("finalizers", ()), FINALIZER]
            self._patch_finalizers(resource, obj, finalizers)

    def _drop_finalizer(self, resource: Resource, obj: Object) -> None:
        finalizers = obj["metadata"].get("finalizers", ())
        if FINALIZER in finalizers:
            left = [name for name in finalizers if name != FINALIZER]
            with contextlib.suppress(NotFoundError):
                self._patch_finalizers(resource, obj, left)

    def _patch_finalizers(self, resource: Resource, obj: Object, finalizers: list[str]) -> None:
        """Of this version alone: others keep finalizers here, too."""
        version = obj["metadata"]["resourceVersion"]
        patch = {"metadata": {"finalizers": finalizers, "resourceVersion": version}}
        self._kube.merge_patch(resource, key_of(obj), patch)


def _is_empty(pool: PoolView) -> bool:
    """No worker and no pod is left of it."""
    return not pool.pods and not (pool.fleet is not None and pool.fleet.places)


def _routers_hash_of(config: ClusterConfig) -> str:
    """Of all that a router must be restarted for: pools are none of it."""
    said = {name: value for name, value in settings.dump(config).items() if name != "pools"}
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def _hash_of(config: ClusterConfig) -> str:
    """Of all that a pod must be restarted for: sizes of pools are none of it."""
    pools = {name: dataclasses.replace(pool, replicas=0) for name, pool in config.pools.items()}
    text = dataclasses.replace(config, pools=pools).to_yaml()
    return hashlib.sha256(text.encode()).hexdigest()[:16]
