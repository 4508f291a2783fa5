"""The planner, run for each ServingCluster. What it remembers dies with the process: a successor
shrinks nothing until it has seen a stable window of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.config.planner import PlannerConfig
from baton.v1 import control_pb2
from cluster.planner.fleet_signals import FleetSignals, PoolBounds
from cluster.planner.needs import PlannerState
from cluster.planner.planner import PoolPlan, decide
from cluster.planner.signals import PoolSignals
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
        answer: tuple[control_pb2.WatchFleetResponse, float],
        pools: Mapping[str, WorkerPoolSpec],
        config: PlannerConfig,
    ) -> Mapping[str, PoolPlan]:
        """Plan each pool, by name. `answer`: the supervisor's, and when it came, in seconds of any
        one clock. A pool that somebody else scales is planned for, too, and stays as it is."""
        memory = self._memories.setdefault(cluster, _Memory())
        bounds = {name: _bounds(pool) for name, pool in pools.items()}
        fleet, answered_at_s = answer
        signals = memory.signals.take(fleet, bounds, answered_at_s)
        # Sizes and roles are the WorkerPool's: the supervisor may lag behind it.
        as_asked = tuple(_as_asked(pool, pools[pool.name]) for pool in signals.pools)
        memory.state, plan = decide(memory.state, replace(signals, pools=as_asked), config)
        return plan

    def forget(self, cluster: Key) -> None:
        self._memories.pop(cluster, None)


def _as_asked(signals: PoolSignals, pool: WorkerPoolSpec) -> PoolSignals:
    roles = pool.role_plan or RolePlan()
    split = replace(signals.role_plan, prefill=roles.prefill, decode=roles.decode)
    return replace(signals, desired_replicas=pool.replicas, role_plan=split)


def _bounds(pool: WorkerPoolSpec) -> PoolBounds:
    if pool.scaling.mode == "planner":
        return PoolBounds(pool.min_replicas, pool.max_replicas)
    return PoolBounds(pool.replicas, pool.replicas)
