"""Everything that one reconcile of a ServingCluster looks at, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.group_size import group_size
from deploy.controller.manifests.common import Owner
from deploy.controller.manifests.ray_cluster import GroupSize
from deploy.controller.objects import Key, Object
from deploy.controller.observed import Fleet, FleetPool, Pod


@dataclass(frozen=True)
class PoolView:
    """One pool: its WorkerPool, what it asks for, and what there is."""

    obj: Object
    spec: WorkerPoolSpec
    pods: Sequence[Pod]
    fleet: FleetPool | None

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


@dataclass(frozen=True)
class ClusterView:
    """One ServingCluster; pools by their names in it."""

    key: Key
    obj: Object
    owner: Owner
    spec: ServingClusterSpec
    pools: Mapping[str, PoolView]
    fleet: Fleet | None
    is_settled: bool
    """Whether the supervisor has spoken for long enough that all of its workers have registered."""

    @property
    def is_going(self) -> bool:
        return "deletionTimestamp" in self.obj["metadata"]

    def group_size(self, pool: PoolView) -> GroupSize:
        """A pool that is being deleted waits for no supervisor: its pods drain by themselves."""
        if pool.is_going and pool.fleet is None:
            return GroupSize(0, tuple(sorted(pod.name for pod in pool.pods)))
        return group_size(pool.replicas, pool.pods, pool.fleet if self.is_settled else None)

    @property
    def pool_specs(self) -> dict[str, WorkerPoolSpec]:
        return {name: pool.spec for name, pool in self.pools.items()}
