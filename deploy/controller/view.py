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
from deploy.controller.rollout import State, Step, UnitPlan


@dataclass(frozen=True)
class PoolView:
    """One pool, in one unit or over all: its WorkerPool, what it asks for, what there is of it."""

    obj: Object
    spec: WorkerPoolSpec
    pods: Sequence[Pod]
    fleet: FleetPool | None
    """None: the supervisor is silent, or does not know it."""
    group: Object | None = None
    """Its worker group in the unit's RayCluster; None: it has none yet."""
    heard: Heard = NOTHING_HEARD
    planned_size: int | None = None
    """Workers that the rollout gives it in this unit; None: all that it is to have."""
    makes_way: bool = False
    """Its unit goes for another one."""

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
        return self.replicas if self.planned_size is None else self.planned_size

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
class UnitView:
    """One unit: what the rollout has it be, and what there is of it."""

    plan: UnitPlan
    ray_cluster: Object | None
    """None: it is to be made."""
    heard: Heard
    pools: Mapping[str, PoolView]
    """Those that there are, in this unit; `pods` and `fleet` are the unit's own."""
    is_wanted: bool = True
    """It is what the spec asks for."""

    @property
    def code(self) -> str:
        return self.plan.code

    @property
    def fleet(self) -> Fleet | None:
        return self.heard.fleet

    @property
    def groups(self) -> dict[str, Object]:
        """The RayCluster's worker groups, by pool."""
        return groups_in(self.ray_cluster)


@dataclass(frozen=True)
class ClusterView:
    """One ServingCluster; pools, over all units, by their names in it."""

    key: Key
    obj: Object
    owner: Owner
    spec: ServingClusterSpec
    pools: Mapping[str, PoolView]
    heard: Heard
    step: Step
    units: Sequence[UnitView] = ()
    """The oldest first."""
    poolless_pods: Sequence[Pod] = ()
    """The heads' and the routers'."""

    @property
    def fleet(self) -> Fleet | None:
        return self.heard.fleet

    @property
    def ray_clusters(self) -> list[Object]:
        return [each.ray_cluster for each in self.units if each.ray_cluster is not None]

    @property
    def is_going(self) -> bool:
        return "deletionTimestamp" in self.obj["metadata"]

    @property
    def is_rolling(self) -> bool:
        """The units are not, or not only, what the spec asks for."""
        return self.step.state is not State.SERVING

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
