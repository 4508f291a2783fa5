"""Everything that one reconcile of a ServingCluster looks at: what there is (`Found`), and what the
rollout has each unit be (`ClusterView`). Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.fleet import WorkerState
from deploy.api.serving_cluster import ServingClusterSpec, UnitRollout
from deploy.api.status import State
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.kit.objects import Key, Object, key_of
from deploy.controller.manifests.cluster_yaml import model_name
from deploy.controller.manifests.common import Owner
from deploy.controller.manifests.ray_cluster import name_in, record_in, unit_in
from deploy.controller.observed.fleet import (
    NOTHING_HEARD,
    Fleet,
    FleetPool,
    Heard,
    Slot,
    merged,
)
from deploy.controller.observed.pod import Pod
from deploy.controller.rollout.rollout import (
    Figures,
    PoolSeen,
    Situation,
    Step,
    UnitPlan,
    UnitSeen,
    next_step,
    total,
)
from deploy.controller.rollout.units import Unit, difference


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
    """Whether its unit makes way for another one."""

    @property
    def is_silent(self) -> bool:
        """Tell whether the supervisor is silent, and not only of this pool."""
        return self.fleet is None and self.heard.fleet is None

    @property
    def is_unknown(self) -> bool:
        """Tell whether nobody reports what runs of the pool: the supervisor is silent, or its
        workers have yet to register."""
        if self.fleet is None:
            return not self.heard.is_settled
        if not self.heard.settles:
            return False
        coming = (None, WorkerState.STARTING)
        if any(slot.state in coming for slot in self.fleet.slots):
            return True
        return bool(self.counted_pods) and not self.fleet.slots

    @property
    def live(self) -> Sequence[Slot]:
        """Return the slots whose workers serve."""
        return self._slots(WorkerState.LIVE)

    @property
    def num_serving(self) -> int:
        """Count the workers that take requests, as the supervisor reports; while it reports
        nothing, as their pods' probes say."""
        if self.is_unknown:
            return sum(pod.is_ready and not pod.is_going for pod in self.pods)
        return len(self.live)

    @property
    def draining(self) -> Sequence[Slot]:
        """List slots that drain, and those that did at the last look and have hung since."""
        before = {each["worker"] for each in self.obj.get("status", {}).get("draining", ())}
        hanging = [slot for slot in self._slots(WorkerState.SUSPECT) if slot.worker_id in before]
        return (*self._slots(WorkerState.DRAINING), *hanging)

    def _slots(self, state: WorkerState) -> Sequence[Slot]:
        """Return the slots of a state: none while the supervisor is silent or does not know the
        pool."""
        return [slot for slot in (self.fleet.slots if self.fleet else ()) if slot.state is state]

    @property
    def is_going(self) -> bool:
        return is_going(self.obj)

    @property
    def replicas(self) -> int:
        """Return the pool's size: 0 while it is being deleted, since its workers drain first."""
        return 0 if self.is_going else self.spec.replicas

    @property
    def size(self) -> int:
        """Return how many workers the pool is to have now."""
        return self.replicas if self.planned_size is None else self.planned_size

    @property
    def role_plan(self) -> tuple[int, int]:
        """Return how many workers are to act as prefill alone and as decode alone."""
        plan = self.spec.role_plan
        return (0, 0) if plan is None else (plan.prefill, plan.decode)

    @property
    def counted_pods(self) -> Sequence[Pod]:
        """Return the pods without those that should have ended and that nobody ends."""
        return [pod for pod in self.pods if not pod.is_lost]

    @property
    def is_over(self) -> bool:
        """Tell whether the pool is deleted, and no worker and no pod is left of it."""
        has_slots = self.fleet is not None and bool(self.fleet.slots)
        return self.is_going and not self.counted_pods and not has_slots


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
    """Whether it is what the spec asks for."""

    @property
    def code(self) -> str:
        return self.plan.code

    @property
    def fleet(self) -> Fleet | None:
        return self.heard.fleet

    @property
    def groups(self) -> dict[str, Object]:
        """Return the RayCluster's worker groups, by pool."""
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
        return is_going(self.obj)

    @property
    def is_rolling(self) -> bool:
        """Tell whether the units are not, or not only, what the spec asks for."""
        return self.step.state is not State.SERVING

    @property
    def staying_specs(self) -> dict[str, WorkerPoolSpec]:
        """Return specs of pools that are not being deleted: those take nothing new."""
        return {name: pool.spec for name, pool in self.pools.items() if not pool.is_going}


def is_going(obj: Object) -> bool:
    """Tell whether an object's deletion has begun."""
    return "deletionTimestamp" in obj["metadata"]


def groups_in(ray_cluster: Object | None) -> dict[str, Object]:
    if ray_cluster is None:
        return {}
    return {group["groupName"]: group for group in ray_cluster["spec"]["workerGroupSpecs"]}


@dataclass(frozen=True)
class Found:
    """What one look finds of a ServingCluster."""

    obj: Object
    owner: Owner
    spec: ServingClusterSpec
    pools: Mapping[str, Object]
    """WorkerPools, by their pools' names; `specs` likewise."""
    specs: Mapping[str, WorkerPoolSpec]
    wanted: Unit
    pods: Sequence[Pod]
    ray_clusters: Mapping[str, Object]
    """RayClusters, by their units' codes; `heard` likewise."""
    heard: Mapping[str, Heard]

    def view(self, now: datetime.datetime) -> ClusterView:
        step = next_step(self._situation(now))
        units = [self._unit_view(plan) for plan in step.plans]
        heard = merged({unit.code: unit.heard for unit in units})
        makes_way = bool(units) and all(unit.plan.is_leaving for unit in units)
        pools = self._pools(heard, self.pods, {}, makes_way=makes_way)
        poolless = [pod for pod in self.pods if not pod.pool]
        key, obj = key_of(self.obj), self.obj
        return ClusterView(key, obj, self.owner, self.spec, pools, heard, step, units, poolless)

    def _situation(self, now: datetime.datetime) -> Situation:
        left = [pod for pod in self.pods if pod.unit and not pod.is_lost]
        return Situation(
            None if is_going(self.obj) else self.wanted,
            {
                name: 0 if is_going(pool) else self.specs[name].replicas
                for name, pool in self.pools.items()
            },
            self._rollout(),
            [self._unit_seen(code) for code in self.ray_clusters],
            sum(pod.unit not in self.ray_clusters for pod in left),
            now.timestamp(),
            self.spec.advanced.router.timeouts.max_s,
        )

    def _rollout(self) -> UnitRollout:
        """Return the rollout's settings. A unit that calls the model otherwise is recreated."""
        rollout, name = self.spec.rollout, model_name(self.spec)
        is_renamed = any(name_in(ray) != name for ray in self.ray_clusters.values())
        return replace(rollout, strategy="Recreate") if is_renamed else rollout

    def _unit_seen(self, code: str) -> UnitSeen:
        ray, answer, pools = self.ray_clusters[code], self.heard[code].answer, self._pools_in(code)
        routers = () if answer is None else answer[0].routers
        requests = [each.requests for each in routers if each.HasField("requests")]
        figures = total(
            Figures(
                each.num_requests + each.num_abandoned,
                each.num_failures + each.num_abandoned,
                each.itl_s if each.HasField("itl_s") else None,
                each.num_active,
            )
            for each in requests
        )
        return UnitSeen(
            unit_in(ray),
            ray["metadata"]["creationTimestamp"],
            record_in(ray),
            {
                name: PoolSeen(
                    pool.group["replicas"] if pool.fleet is None else pool.fleet.desired_replicas,
                    len(pool.counted_pods),
                    pool.num_serving,
                    pool.spec.role,
                )
                for name, pool in pools.items()
                if pool.group is not None
            },
            figures,
            is_going(ray),
        )

    def _unit_view(self, plan: UnitPlan) -> UnitView:
        ray = self.ray_clusters.get(plan.code)
        is_wanted = ray is None or not difference(unit_in(ray), self.wanted)
        pools = {
            name: replace(pool, planned_size=plan.sizes.get(name, 0), makes_way=plan.is_leaving)
            for name, pool in self._pools_in(plan.code).items()
        }
        heard = self.heard.get(plan.code, NOTHING_HEARD)
        return UnitView(plan, ray, heard, pools, is_wanted and not plan.is_leaving)

    def _pools_in(self, code: str) -> dict[str, PoolView]:
        pods = [pod for pod in self.pods if pod.unit == code]
        groups = groups_in(self.ray_clusters.get(code))
        return self._pools(self.heard.get(code, NOTHING_HEARD), pods, groups)

    def _pools(
        self,
        heard: Heard,
        pods: Sequence[Pod],
        groups: Mapping[str, Object],
        *,
        makes_way: bool = False,
    ) -> dict[str, PoolView]:
        return {
            name: PoolView(
                pool,
                self.specs[name],
                [pod for pod in pods if pod.pool == name],
                heard.pool(name),
                groups.get(name),
                heard,
                makes_way=makes_way,
            )
            for name, pool in self.pools.items()
        }
