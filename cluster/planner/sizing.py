"""One pool's size, from what was needed of it: out by the panic window, in by the stable window."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.config.planner import PlannerConfig
from cluster.planner.measure import PoolMeasure
from cluster.planner.signals import PoolSignals
from cluster.planner.state import PoolMemory

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Size:
    """What a pool should have."""

    replicas: int
    goal: int
    """Where it is going: `replicas` is on the way there."""
    words: str

    def to(self, replicas: int, words: str) -> Size:
        """The same, but for a further reason."""
        return Size(replicas, self.goal, f"{self.words}; {words}")


@dataclass(frozen=True)
class Pool:
    """One pool as a decision sees it."""

    signals: PoolSignals
    measure: PoolMeasure
    memory: PoolMemory
    is_known: bool
    """Whether its need is: then the memory's newest sample is of this moment."""
    words: str
    """What the need comes from, or why it is not known."""

    @property
    def name(self) -> str:
        return self.signals.name

    @property
    def floor(self) -> int:
        """A pool that is not stopped has one worker at least."""
        return min(max(1, self.signals.min_replicas), self.signals.max_replicas)

    def bounded(self, replicas: int) -> int:
        return max(self.floor, min(replicas, self.signals.max_replicas))


def size_of(pool: Pool, now_s: float, config: PlannerConfig) -> Size:
    """The pool's size by its own load; within its bounds."""
    desired = pool.signals.desired_replicas
    current = pool.bounded(desired)
    words = pool.words
    if 0 < desired != current:
        words += f"; {pool.floor} to {pool.signals.max_replicas} replicas are allowed"
    if not pool.is_known:
        return Size(current, current, words)
    role, memory = pool.signals.role, pool.memory
    mean = memory.wanted(role)
    if abs(mean - memory.samples[-1].need.least.workers(role)) >= 0.1:
        words += f", {mean:.1f} on average over {config.panic_window_s:g} s"
    wanted = _rounded_up(mean / (1 + config.tolerance))
    needed = _rounded_up(memory.peak(role) * (1 + config.consolidation_margin))
    if wanted > current:
        return _grown(pool, current, wanted, config, words)
    if needed < current and current > pool.floor:
        return _shrunk(pool, current, needed, now_s, config, words)
    return Size(current, current, words)


def _grown(pool: Pool, current: int, wanted: int, config: PlannerConfig, words: str) -> Size:
    """Workers to come count: `current` has them in it, and they bound how many more are asked for,
    unless they have got no machine: then more would not get one either."""
    goal = pool.bounded(wanted)
    if goal < wanted:
        words += f"; {wanted} wanted, max_replicas {pool.signals.max_replicas}"
    reach = max(current, pool.measure.num_started + config.max_step_out)
    replicas = min(goal, reach)
    if replicas < goal:
        words += f"; {goal} wanted, {config.max_step_out} more than have started at a time"
    if pool.measure.num_pending:
        words += f"; {pool.measure.num_pending} pending"
    return Size(replicas, goal, words)


def _shrunk(
    pool: Pool, current: int, needed: int, now_s: float, config: PlannerConfig, words: str
) -> Size:
    """Remaining workers must hold what was needed at any time of the stable window, with margin."""
    waits = _waits_to_shrink(pool.memory, now_s, config)
    if waits is not None:
        return Size(current, current, f"{words}; {needed} would do, {waits}")
    goal = pool.bounded(needed)
    there_are = min(current, pool.measure.num_started)
    replicas = max(goal, pool.floor, there_are - config.max_step_in)
    peak = pool.memory.peak(pool.signals.role)
    words += f"; {peak:.1f} workers needed at most within {config.stable_window_s:g} s"
    if pool.measure.num_pending:
        words += f", {pool.measure.num_pending} pending go first"
    return Size(min(current, replicas), goal, words)


def _waits_to_shrink(memory: PoolMemory, now_s: float, config: PlannerConfig) -> str | None:
    """What a scale-in still waits for; None: nothing."""
    assert memory.known_since_s is not None, memory
    known_s = now_s - memory.known_since_s
    if known_s < config.stable_window_s:
        return f"known for {known_s:.0f} s of {config.stable_window_s:g} s"
    if memory.shrunk_at_s is not None:
        left_s = memory.shrunk_at_s + config.scale_in_hold_s - now_s
        if left_s >= 0:
            return f"{left_s:.0f} s after the last scale-in to go"
    return None


def _rounded_up(workers: float) -> int:
    return math.ceil(workers - _ROUNDING)
