"""What stands beside a cluster's RayCluster, routers and Service: budgets for evictions, who may
connect, the way in from outside and its certificate, what is scraped. Of levels: what is not wanted
any more goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.serving_cluster import RouterSpec, ServingClusterSpec
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.errors import KubeError
from deploy.controller.kit.kube import Discovery
from deploy.controller.kit.objects import Key, Resource, key_of
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.companions import (
    BudgetKind,
    grpc_route,
    ingress,
    network_policies,
    pod_monitor,
    pool_budget,
    router_budget,
    router_certificate,
)
from deploy.controller.resources import (
    BUDGETS,
    CERTIFICATES,
    GRPC_ROUTES,
    INGRESSES,
    NETWORK_POLICIES,
    POD_MONITORS,
)
from deploy.controller.view import ClusterView, PoolView

_NAMED_NAMESPACES_SINCE = (1, 21)
_UNREADY_PODS_GO_SINCE = (1, 27)


@dataclass(frozen=True)
class Companion:
    """`manifest`: None where the cluster is to have no such object."""

    resource: Resource
    key: Key
    manifest: Manifest | None


@dataclass(frozen=True)
class Kept:
    """`refused`: what the API server did not take; `unserved`: kinds it does not know, in words."""

    refused: Sequence[KubeError]
    unserved: Sequence[str]


def companions(
    view: ClusterView, release: Release, budgets: BudgetKind, operator_namespace: str | None
) -> list[Companion]:
    """`operator_namespace`: None where namespaces do not carry their names as a label."""
    owner = view.owner
    pools = [_pool_budget(owner, name, pool, budgets) for name, pool in view.pools.items()]
    return [
        *(
            _wanted(NETWORK_POLICIES, policy)
            for policy in network_policies(owner, operator_namespace)
        ),
        *(_wanted(budgets.resource, budget) for budget in (router_budget(owner, budgets), *pools)),
        *_ways_in(owner, view.spec),
        _certificate(owner, view.spec.router),
        _monitor(owner, release),
    ]


def _wanted(resource: Resource, manifest: Manifest) -> Companion:
    return Companion(resource, key_of(manifest), manifest)


def _pool_budget(owner: Owner, name: str, pool: PoolView, budgets: BudgetKind) -> Manifest:
    """Pods that are more than the pool's size stay until they have drained."""
    num_ready = sum(pod.is_ready and not pod.is_going for pod in pool.pods)
    num_expected = max(pool.replicas, num_ready)
    return pool_budget(owner, name, pool.obj["metadata"]["uid"], budgets, num_expected)


def _ways_in(owner: Owner, spec: ServingClusterSpec) -> list[Companion]:
    router = spec.router
    key = Key(owner.namespace, owner.router_name)
    route = None if router.gateway is None else grpc_route(owner, router)
    return [
        Companion(GRPC_ROUTES, key, route),
        Companion(INGRESSES, key, ingress(owner, spec) if router.has_ingress else None),
    ]


def _certificate(owner: Owner, router: RouterSpec) -> Companion:
    key = Key(owner.namespace, owner.router_name)
    return Companion(CERTIFICATES, key, router_certificate(owner, router))


def _monitor(owner: Owner, release: Release) -> Companion:
    monitors = release.pod_monitors
    manifest = None if monitors is None else pod_monitor(owner, monitors)
    return Companion(POD_MONITORS, Key(owner.namespace, owner.name), manifest)


class Companions:
    """Keep them as they are wanted, as far as the API server knows their kinds."""

    def __init__(self, applied: Applied, discovery: Discovery, release: Release) -> None:
        self._applied, self._discovery, self._release = applied, discovery, release

    def keep(self, view: ClusterView) -> Kept:
        try:
            wanted = companions(view, self._release, self._budgets(), self._operator_namespace())
        except KubeError as error:  # nobody says what is served
            return Kept([error], [])
        refused: list[KubeError] = []
        unserved: list[str] = []
        for each in wanted:
            try:
                if self._discovery.serves(each.resource):
                    self._keep(view, each)
                elif each.manifest is not None:
                    unserved.append(f"{each.resource} ({each.resource.version}) are not served")
            except KubeError as error:  # the others are kept all the same
                refused.append(error)
        return Kept(refused, list(dict.fromkeys(unserved)))

    def _keep(self, view: ClusterView, wanted: Companion) -> None:
        if wanted.manifest is not None:
            self._applied.apply(view.key, wanted.resource, wanted.manifest)
        else:
            self._applied.remove(view.key, wanted.resource, wanted.key, view.owner.uid)

    def _budgets(self) -> BudgetKind:
        newest = next((each for each in BUDGETS if self._discovery.serves(each)), BUDGETS[0])
        return BudgetKind(newest, self._discovery.version >= _UNREADY_PODS_GO_SINCE)

    def _operator_namespace(self) -> str | None:
        if self._discovery.version < _NAMED_NAMESPACES_SINCE:
            return None
        return self._release.namespace
