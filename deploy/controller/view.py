"""Everything that one reconcile of a ServingCluster looks at, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.kit.objects import Key, Object
from deploy.controller.manifests.common import Owner
from deploy.controller.observed import (
    NOTHING_HEARD,
    Fleet,
    FleetPool,
    Heard,
    Place,
    PlaceState,
    Pod,
)
from deploy.controller.rollout import State, Step


@dataclass(frozen=True)
class PoolView:
    """One pool: its WorkerPool, what it asks for, and what there is of it."""

    obj: Object
    spec: WorkerPoolSpec
    pods: Sequence[Pod]
    fleet: FleetPool | None
    """None: the supervisor is silent, or does not know it."""
    group: Object | None = None
    """Its worker group in the RayCluster; None: it has none yet."""
    heard: Heard = NOTHING_HEARD
    makes_way: bool = False
    """Its unit drains for another one."""

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
        return is_unheard or (bool(self.standing_pods) and not self.fleet.places)

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
    def size(self) -> int:
        """Workers that it is to have now."""
        return 0 if self.makes_way else self.replicas

    @property
    def role_plan(self) -> tuple[int, int]:
        """Workers that are to act as prefill alone and as decode alone."""
        plan = self.spec.role_plan
        return (0, 0) if plan is None else (plan.prefill, plan.decode)

    @property
    def standing_pods(self) -> Sequence[Pod]:
        """Without those that nobody ends."""
        return [pod for pod in self.pods if not pod.is_lost]

    @property
    def is_empty(self) -> bool:
        """No worker and no pod is left of it."""
        return not self.standing_pods and not (self.fleet is not None and self.fleet.places)

    @property
    def is_over(self) -> bool:
        """Nothing is left of it, and nothing is to come."""
        return self.is_going and self.is_empty


@dataclass(frozen=True)
class ClusterView:
    """One ServingCluster; pools by their names in it."""

    key: Key
    obj: Object
    owner: Owner
    spec: ServingClusterSpec
    pools: Mapping[str, PoolView]
    heard: Heard
    step: Step
    ray_cluster: Object | None = None
    """Of the unit that the step is about; None: there is none."""
    poolless_pods: Sequence[Pod] = ()
    """The head's and the routers'."""

    @property
    def fleet(self) -> Fleet | None:
        return self.heard.fleet

    @property
    def groups(self) -> dict[str, Object]:
        """The RayCluster's worker groups, by pool."""
        return groups_in(self.ray_cluster)

    @property
    def is_going(self) -> bool:
        return "deletionTimestamp" in self.obj["metadata"]

    @property
    def has_wanted_unit(self) -> bool:
        """Its unit is the one that the spec asks for, or is about to be."""
        return self.step.state in (State.AS_WANTED, State.MAKING)

    @property
    def staying_specs(self) -> dict[str, WorkerPoolSpec]:
        """By pool; one that is being deleted takes nothing new, and carries no load to come."""
        return {name: pool.spec for name, pool in self.pools.items() if not pool.is_going}


def _places(fleet: FleetPool | None, state: PlaceState) -> Sequence[Place]:
    """None while the supervisor is silent, or does not know the pool."""
    return () if fleet is None else fleet.of_state(state)


def groups_in(ray_cluster: Object | None) -> dict[str, Object]:
    if ray_cluster is None:
        return {}
    return {group["groupName"]: group for group in ray_cluster["spec"]["workerGroupSpecs"]}
