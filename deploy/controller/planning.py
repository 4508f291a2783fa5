"""The planner's word for each ServingCluster. What it remembers dies with the process: its
successor shrinks nothing until it has seen a stable window of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.fleet_signals import FleetSignals, PoolBounds
from baton.v1 import control_pb2
from cluster.planner.config import PlannerConfig
from cluster.planner.planner import PoolPlan, decide
from cluster.planner.state import PlannerState
from deploy.api.worker_pool import RolePlan, WorkerPoolSpec
from deploy.controller.objects import Key


@dataclass
class _Memory:
    signals: FleetSignals = field(default_factory=FleetSignals)
    state: PlannerState = field(default_factory=PlannerState)


class Planning:
    """Own what was seen of each cluster; one cluster's is used by one thread at a time."""

    def __init__(self) -> None:
        self._memories: dict[Key, _Memory] = {}

    def plan(
        self,
        cluster: Key,
        told: tuple[control_pb2.WatchFleetResponse, float],
        pools: Mapping[str, WorkerPoolSpec],
        config: PlannerConfig,
        pool_of: Mapping[str, str],
    ) -> Mapping[str, PoolPlan]:
        """By pool. `told`: the supervisor's answer, and when it came, in seconds of any one clock;
        `pool_of`: the pool of each revision. A pool that somebody else scales is planned for, too,
        and stays as it is."""
        memory = self._memories.setdefault(cluster, _Memory())
        bounds = {name: _bounds(pool) for name, pool in pools.items()}
        answer, heard_at_s = told
        signals = memory.signals.take(by_pool(answer, pool_of), bounds, heard_at_s)
        # The one truth about sizes and roles is the WorkerPool: the supervisor may lag behind it.
        signals = replace(
            signals,
            pools=tuple(
                replace(
                    pool,
                    desired_replicas=pools[pool.name].replicas,
                    role_plan=replace(pool.role_plan, **_roles(pools[pool.name])),
                )
                for pool in signals.pools
            ),
        )
        memory.state, plan = decide(memory.state, signals, config)
        return plan.pools

    def forget(self, cluster: Key) -> None:
        self._memories.pop(cluster, None)


def by_pool(
    answer: control_pb2.WatchFleetResponse, pool_of: Mapping[str, str]
) -> control_pb2.WatchFleetResponse:
    """With each pool's revisions as one: a load does not ask which of them it meets."""
    told = control_pb2.WatchFleetResponse()
    told.CopyFrom(answer)
    for worker in told.workers:
        worker.info.pool = pool_of.get(worker.info.pool, worker.info.pool)
    for seen in (figures for router in told.routers for figures in router.pools):
        seen.pool = pool_of.get(seen.pool, seen.pool)
    del told.pools[:]
    pools: dict[str, control_pb2.PoolStatus] = {}
    for revision in answer.pools:
        name = pool_of.get(revision.name, revision.name)
        pool = pools.setdefault(name, control_pb2.PoolStatus(name=name, role=revision.role))
        pool.desired_replicas += revision.desired_replicas
        pool.live_replicas += revision.live_replicas
        pool.pending_replicas += revision.pending_replicas
        pool.num_failed_starts = max(pool.num_failed_starts, revision.num_failed_starts)
        pool.last_error = pool.last_error or revision.last_error
        pool.role_plan.prefill += revision.role_plan.prefill
        pool.role_plan.decode += revision.role_plan.decode
    told.pools.extend(pools.values())
    return told


def _roles(pool: WorkerPoolSpec) -> dict[str, int]:
    plan = pool.role_plan or RolePlan()
    return {"prefill": plan.prefill, "decode": plan.decode}


def _bounds(pool: WorkerPoolSpec) -> PoolBounds:
    if pool.scaling.mode == "planner":
        return PoolBounds(pool.min_replicas, pool.max_replicas)
    return PoolBounds(pool.replicas, pool.replicas)
