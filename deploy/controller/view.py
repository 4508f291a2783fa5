"""Everything that one reconcile of a ServingCluster looks at, read once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.seen_by_clients import SeenByClients
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.common import Owner
from deploy.controller.manifests.ray_cluster import revision_in
from deploy.controller.objects import Key, Object
from deploy.controller.observed import (
    NOTHING_HEARD,
    Fleet,
    FleetPool,
    Heard,
    Place,
    PlaceState,
    Pod,
)
from deploy.controller.revisions import Revision, revision_of
from deploy.controller.rollout import RevisionState


@dataclass(frozen=True)
class RevisionView:
    """One version of a pool, as far as there is anything of it."""

    revision: Revision
    group: Object | None = None
    """Its worker group in the RayCluster; None: it has none yet."""
    pods: Sequence[Pod] = ()
    fleet: FleetPool | None = None
    """None: the supervisor is silent, or does not know it."""

    @property
    def size(self) -> int:
        """Workers that it is to have so far. A supervisor that has lost everything is told what
        the group says."""
        if self.fleet is not None:
            return self.fleet.desired_replicas
        return 0 if self.group is None else int(self.group["replicas"])

    @property
    def live(self) -> frozenset[int]:
        """Standings of the places whose workers serve."""
        return frozenset(place.standing for place in _places(self.fleet, PlaceState.LIVE))

    @property
    def num_live(self) -> int:
        return len(self.live)

    @property
    def standing_pods(self) -> Sequence[Pod]:
        """Without those that nobody ends: where others may go they take no room."""
        return [pod for pod in self.pods if not pod.is_lost]

    @property
    def is_empty(self) -> bool:
        """No worker and no pod is left of it."""
        return not self.standing_pods and not (self.fleet is not None and self.fleet.places)

    @property
    def state(self) -> RevisionState:
        places = () if self.fleet is None else self.fleet.places
        num_there = sum(place.state is not PlaceState.PENDING for place in places)
        return RevisionState(
            self.revision.name, self.size, self.live, max(len(self.standing_pods), num_there)
        )


@dataclass(frozen=True)
class PoolView:
    """One pool: its WorkerPool, what it asks for, and what there is of all its revisions."""

    obj: Object
    spec: WorkerPoolSpec
    pods: Sequence[Pod]
    fleet: FleetPool | None
    """All revisions together."""
    revisions: Mapping[str, RevisionView] = field(default_factory=dict)
    """By name; that of the spec always among them."""
    target: str = ""
    """The revision that the spec asks for."""
    heard: Heard = NOTHING_HEARD

    @property
    def is_silent(self) -> bool:
        """The supervisor is, not only of this pool."""
        return self.fleet is None and self.heard.fleet is None

    @property
    def is_untold(self) -> bool:
        """Nobody tells what runs of it: the supervisor is silent, or may have yet to hear of what a
        former one left."""
        if self.fleet is None:
            return not self.heard.is_settled
        if not self.heard.settles:
            return False
        is_unheard = any(
            place.state in (PlaceState.PENDING, PlaceState.STARTING) for place in self.fleet.places
        )
        return is_unheard or any(
            each.standing_pods and not (each.fleet is not None and each.fleet.places)
            for each in self.revisions.values()
        )

    @property
    def live(self) -> Sequence[Place]:
        """Those whose workers serve."""
        return _places(self.fleet, PlaceState.LIVE)

    @property
    def draining(self) -> Sequence[Place]:
        """One that hangs since is SUSPECT, and drains as the pool's status said of it."""
        told = self.obj.get("status", {}).get("draining", ())
        drained = {each["worker"] for each in told}
        hanging = [
            place for place in _places(self.fleet, PlaceState.SUSPECT) if place.worker_id in drained
        ]
        return (*_places(self.fleet, PlaceState.DRAINING), *hanging)

    @property
    def is_going(self) -> bool:
        return "deletionTimestamp" in self.obj["metadata"]

    @property
    def replicas(self) -> int:
        """None is wanted of a pool that is being deleted: its workers drain first."""
        return 0 if self.is_going else self.spec.replicas

    @property
    def role_plan(self) -> tuple[int, int]:
        """Workers that are to act as prefill alone and as decode alone."""
        plan = self.spec.role_plan
        return (0, 0) if plan is None else (plan.prefill, plan.decode)

    @property
    def is_empty(self) -> bool:
        return all(revision.is_empty for revision in self.revisions.values())

    @property
    def updated(self) -> RevisionView:
        return self.revisions[self.target]

    @property
    def others(self) -> list[RevisionView]:
        """Older revisions that are to have workers still."""
        return [r for name, r in self.revisions.items() if name != self.target and r.size]


@dataclass(frozen=True)
class ClusterView:
    """One ServingCluster; pools by their names in it."""

    key: Key
    obj: Object
    owner: Owner
    spec: ServingClusterSpec
    pools: Mapping[str, PoolView]
    heard: Heard
    ray_cluster: Object | None = None
    poolless_pods: Sequence[Pod] = ()
    """The head's and the routers'."""

    @property
    def fleet(self) -> Fleet | None:
        return self.heard.fleet

    @property
    def groups(self) -> dict[str, Object]:
        """The RayCluster's worker groups, by name."""
        return groups_in(self.ray_cluster)

    @property
    def is_going(self) -> bool:
        return "deletionTimestamp" in self.obj["metadata"]

    @property
    def staying_specs(self) -> dict[str, WorkerPoolSpec]:
        """By pool; one that is being deleted takes nothing new, and carries no load to come."""
        return {name: pool.spec for name, pool in self.pools.items() if not pool.is_going}

    @property
    def revisions(self) -> dict[str, RevisionView]:
        """Of all pools, by name."""
        return {name: each for pool in self.pools.values() for name, each in pool.revisions.items()}


def _places(fleet: FleetPool | None, state: PlaceState) -> Sequence[Place]:
    """None while the supervisor is silent, or does not know the pool."""
    return () if fleet is None else fleet.of_state(state)


def groups_in(ray_cluster: Object | None) -> dict[str, Object]:
    if ray_cluster is None:
        return {}
    return {group["groupName"]: group for group in ray_cluster["spec"]["workerGroupSpecs"]}


def pool_view(
    cluster: Object,
    pool: Object,
    spec: WorkerPoolSpec,
    groups: Mapping[str, Object],
    pods: Sequence[Pod],
    heard: Heard,
) -> PoolView:
    """`cluster`: the ServingCluster's object; `groups`: the RayCluster's, by name; `pods`: of all
    pools."""
    fleet = heard.fleet
    target = revision_of(cluster["spec"], spec.pool, spec)
    found = [revision_in(group) for group in groups.values()]
    known = {each.name: each for each in found if each.pool == spec.pool} | {target.name: target}
    revisions = {
        name: RevisionView(
            revision,
            groups.get(name),
            [pod for pod in pods if pod.revision == name],
            None if fleet is None else fleet.pools.get(name),
        )
        for name, revision in sorted(known.items())
    }
    own_pods = [pod for pod in pods if pod.pool == spec.pool]
    together = _together(revisions.values())
    return PoolView(pool, spec, own_pods, together, revisions, target.name, heard)


def _together(revisions: Iterable[RevisionView]) -> FleetPool | None:
    """None where the supervisor knows none of them."""
    known = [each.fleet for each in revisions if each.fleet is not None]
    if not known:
        return None
    return FleetPool(
        sum(pool.desired_replicas for pool in known),
        [place for pool in known for place in pool.places],
        "; ".join(pool.last_error for pool in known if pool.last_error),
        seen=functools.reduce(SeenByClients.worse, (pool.seen for pool in known)),
    )
