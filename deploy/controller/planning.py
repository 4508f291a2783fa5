"""The planner's word for each ServingCluster. What it remembers dies with the process: its
successor shrinks nothing until it has seen a stable window of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.config.planner import PlannerConfig
from baton.v1 import control_pb2
from cluster.planner.fleet_signals import FleetSignals, PoolBounds
from cluster.planner.needs import PlannerState
from cluster.planner.planner import PoolPlan, decide
from deploy.api.worker_pool import RolePlan, WorkerPoolSpec
from deploy.controller.kit.objects import Key


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
    ) -> Mapping[str, PoolPlan]:
        """By pool. `told`: the supervisor's answer, and when it came, in seconds of any one clock.
        A pool that somebody else scales is planned for, too, and stays as it is."""
        memory = self._memories.setdefault(cluster, _Memory())
        bounds = {name: _bounds(pool) for name, pool in pools.items()}
        answer, heard_at_s = told
        signals = memory.signals.take(answer, bounds, heard_at_s)
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


def _roles(pool: WorkerPoolSpec) -> dict[str, int]:
    plan = pool.role_plan or RolePlan()
    return {"prefill": plan.prefill, "decode": plan.decode}


def _bounds(pool: WorkerPoolSpec) -> PoolBounds:
    if pool.scaling.mode == "planner":
        return PoolBounds(pool.min_replicas, pool.max_replicas)
    return PoolBounds(pool.replicas, pool.replicas)
