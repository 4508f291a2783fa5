"""What stands beside RayClusters and routers: budgets for evictions, who may connect, the way
in from outside and its certificate, what is scraped. What is not wanted any more goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from deploy.controller.kit.applied import Applied
from deploy.controller.kit.errors import KubeError, each
from deploy.controller.kit.kube import Discovery
from deploy.controller.kit.objects import Key, Resource, key_of
from deploy.controller.manifests.common import Object as Manifest
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.companions import (
    BudgetKind,
    ingress,
    network_policies,
    pod_monitor,
    pool_budget,
    route,
    router_budget,
    router_certificate,
    unit_policy,
    ways_in,
)
from deploy.controller.manifests.identity import role_certificates
from deploy.controller.manifests.resources import (
    BUDGETS,
    CERTIFICATES,
    GRPC_ROUTES,
    HTTP_ROUTES,
    INGRESSES,
    NETWORK_POLICIES,
    POD_MONITORS,
)
from deploy.controller.observed.view import ClusterView, PoolView

_NAMED_NAMESPACES_SINCE = (1, 21)
_UNREADY_PODS_GO_SINCE = (1, 27)


@dataclass(frozen=True)
class Companion:
    """An object beside a cluster. `manifest`: None where the cluster is to have no such one."""

    resource: Resource
    key: Key
    manifest: Manifest | None


def companions(
    view: ClusterView, release: Release, budgets: BudgetKind, operator_namespace: str | None
) -> list[Companion]:
    """List companions. `operator_namespace`: None where no label has a namespace's name."""
    owner, router = view.owner, view.spec.router
    key = Key(owner.namespace, owner.router_name)
    pools = [_pool_budget(owner, name, pool, budgets) for name, pool in view.pools.items()]
    ways = [(way, Key(owner.namespace, way.name)) for way in ways_in(owner, router)]
    routes = zip((GRPC_ROUTES, HTTP_ROUTES), ways, strict=True)
    monitors = release.pod_monitors
    monitor = None if monitors is None else pod_monitor(owner, monitors, router.auth)
    policies = network_policies(owner, operator_namespace)
    policies += [unit_policy(owner, ray) for ray in view.ray_clusters]
    return [
        *(_wanted(NETWORK_POLICIES, each) for each in policies),
        *(_wanted(budgets.resource, budget) for budget in (router_budget(owner, budgets), *pools)),
        *(Companion(kind, named, route(owner, router, way)) for kind, (way, named) in routes),
        *(Companion(INGRESSES, named, ingress(owner, view.spec, way)) for way, named in ways),
        Companion(CERTIFICATES, key, router_certificate(owner, router)),
        *(_wanted(CERTIFICATES, each) for each in role_certificates(owner, view.spec)),
        Companion(POD_MONITORS, Key(owner.namespace, owner.name), monitor),
    ]


def _wanted(resource: Resource, manifest: Manifest) -> Companion:
    return Companion(resource, key_of(manifest), manifest)


def _pool_budget(owner: Owner, name: str, pool: PoolView, budgets: BudgetKind) -> Manifest:
    """Make a budget. Pods beyond the pool's size stay until they have drained."""
    num_ready = sum(pod.is_ready and not pod.is_going for pod in pool.pods)
    num_expected = max(pool.replicas, num_ready)
    return pool_budget(owner, name, pool.obj["metadata"]["uid"], budgets, num_expected)


class Companions:
    """Keeps companions as they are wanted, as far as the API server serves their kinds."""

    def __init__(self, applied: Applied, discovery: Discovery, release: Release) -> None:
        self._applied, self._discovery, self._release = applied, discovery, release

    def keep(self, view: ClusterView) -> tuple[list[KubeError], list[str]]:
        """Keep the companions. Returns what was refused, and which kinds are not served."""
        try:
            wanted = companions(view, self._release, self._budgets(), self._operator_namespace())
        except KubeError as error:  # nobody says what is served
            return [error], []
        unserved: dict[str, None] = {}
        refused = each(partial(self._keep, view, companion, unserved) for companion in wanted)
        return refused, list(unserved)

    def _keep(self, view: ClusterView, one: Companion, unserved: dict[str, None]) -> None:
        if not self._discovery.serves(one.resource):
            if one.manifest is not None:
                unserved[f"{one.resource} ({one.resource.version}) are not served"] = None
        elif one.manifest is not None:
            self._applied.apply(view.key, one.resource, one.manifest)
        else:
            self._applied.remove(view.key, one.resource, one.key, view.owner.uid)

    def _budgets(self) -> BudgetKind:
        newest = next(filter(self._discovery.serves, BUDGETS), BUDGETS[0])
        return BudgetKind(newest, self._discovery.version >= _UNREADY_PODS_GO_SINCE)

    def _operator_namespace(self) -> str | None:
        if self._discovery.version < _NAMED_NAMESPACES_SINCE:
            return None
        return self._release.namespace
