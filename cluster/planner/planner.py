"""One decision: signals in, desired replicas with reasons out.

1. Sum up the signals (`measure`) and remember them (`state`).
2. Compute each pool's need per role (`needs`). Old or missing figures lead to no conclusion.
3. Stop all pools together after enough idle time; start them together when a request is held.
4. Otherwise set each pool's size by its need, then keep the ratio between the roles, then assign
   the roles inside mixed pools (all in `sizing`).

While workers may have yet to register, all pools stay as they are. Planning twice for the same
signals changes nothing the second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from baton.config.planner import PlannerConfig
from baton.fleet import Role
from cluster.planner.measure import Demand, PoolMeasure, measure_demand, measure_pool
from cluster.planner.needs import PlannerState, PoolLoad, PoolMemory, need_of
from cluster.planner.signals import PoolSignals, Signals
from cluster.planner.sizing import Pool, Size, keep_ratio, roles_of, size_of
from cluster.role_plan import RolePlan

_COMES_UP_WITHIN_S = 1800.0  # provisioning a machine with GPUs takes minutes


@dataclass(frozen=True)
class PoolPlan:
    """The target of one pool."""

    desired_replicas: int
    """The absolute size, even without a change, so that applying it needs no memory."""
    role_plan: RolePlan | None
    """Set for a mixed pool."""
    reason: str
    """The reason, with its numbers."""


Plan = Mapping[str, PoolPlan]
"""The targets of all pools, by name."""


def decide(
    state: PlannerState, signals: Signals, config: PlannerConfig
) -> tuple[PlannerState, Plan]:
    """Plan every pool. Returns the plan and the state for the next call."""
    if signals.settles:
        return replace(state, busy_at_s=signals.now_s), _as_they_are(signals)
    demand = measure_demand(signals, config)
    measures = {pool.name: measure_pool(pool, signals, config) for pool in signals.pools}
    is_new = state.at_s is None or signals.now_s > state.at_s
    memories = {
        pool.name: state.pools.get(pool.name, PoolMemory()).see(
            pool, measures[pool.name], signals.now_s, is_new, config
        )
        for pool in signals.pools
    }
    # A silent router may have requests, so pools neither stop nor start because of it.
    busy = demand is None or demand.unheard_factor > 1 or not demand.is_none
    busy = busy or not all(measure.is_idle for measure in measures.values())
    busy = busy or any(
        _comes_up(pool, memories[pool.name], signals.now_s) for pool in signals.pools
    )
    busy_at_s = signals.now_s if busy or state.busy_at_s is None else state.busy_at_s
    pools = _with_needs(signals, demand, measures, memories, config)
    new_state = PlannerState(
        at_s=signals.now_s,
        busy_at_s=busy_at_s,
        pools={pool.name: pool.memory for pool in pools},
    )
    sizes = _sizes(pools, demand, signals.now_s - busy_at_s, signals.now_s, config)
    plans = {pool.name: _plan(pool, sizes[pool.name], signals.now_s, config) for pool in pools}
    return new_state, plans


def _as_they_are(signals: Signals) -> Plan:
    """Keep every pool: workers that have yet to register are neither idle nor missing."""
    return {
        pool.name: PoolPlan(
            pool.desired_replicas,
            pool.role_plan if pool.role is Role.MIXED else None,
            f"{pool.name} stays at {pool.desired_replicas}: the registry has just started, and "
            f"workers may have yet to register",
        )
        for pool in signals.pools
    }


def _comes_up(pool: PoolSignals, memory: PoolMemory, now_s: float) -> bool:
    """Whether the pool's first workers still load, so that an idle pool means nothing. False once
    its workers fail to start or find no machine."""
    if memory.wanted_since_s is None or now_s - memory.wanted_since_s > _COMES_UP_WITHIN_S:
        return False
    return not memory.has_served and not pool.num_failed_starts


# --- what is needed ------------------------------------------------------------------------------


def _with_needs(
    signals: Signals,
    demand: Demand | None,
    measures: Mapping[str, PoolMeasure],
    memories: Mapping[str, PoolMemory],
    config: PlannerConfig,
) -> list[Pool]:
    """The pools in order of name, each with its newest need in its memory, or why it is unknown."""
    prefill_shares = _shares(signals.pools, Role.DECODE, memories)
    decode_shares = _shares(signals.pools, Role.PREFILL, memories)
    pools = []
    for pool in sorted(signals.pools, key=lambda pool: pool.name):
        measure, memory = measures[pool.name], memories[pool.name]
        words = _blindness(measure, demand, config)
        if demand is None or words is not None:
            pools.append(Pool(pool, measure, memory, False, words or ""))
            continue
        load = PoolLoad(
            role=pool.role,
            measure=measure,
            demand=demand,
            prefill_share=prefill_shares.get(pool.name, 0.0),
            decode_share=decode_shares.get(pool.name, 0.0),
            memory=memory,
        )
        need = need_of(load, config)
        if need is None:
            words = "prompts arrive, and no warm worker has reported its prefill rate yet"
            pools.append(Pool(pool, measure, memory, False, words))
        else:
            memory = memory.add(need[0], signals.now_s, config)
            pools.append(Pool(pool, measure, memory, True, need[1]))
    return pools


def _shares(
    pools: Sequence[PoolSignals], without: Role, memories: Mapping[str, PoolMemory]
) -> dict[str, float]:
    """How a role's load is divided among its pools: by their replicas, and for prompts also by
    their prefill rate if every pool's is known."""
    able = [pool for pool in pools if pool.role is not without]
    rates = {pool.name: memories[pool.name].prefill_tokens_per_s or 0.0 for pool in able}
    by_rate = without is Role.DECODE and all(rates.values())
    weights = {
        pool.name: max(1, pool.desired_replicas) * (rates[pool.name] if by_rate else 1.0)
        for pool in able
    }
    total = fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _blindness(measure: PoolMeasure, demand: Demand | None, config: PlannerConfig) -> str | None:
    """Say why the figures allow no conclusion; None: they allow one."""
    lately = f"within {config.stale_after_s:g} s"
    if demand is None:
        return f"no router has reported {lately}"
    if measure.is_blind:
        return f"none of {measure.num_live} live workers has reported {lately}"
    return None


# --- how many ------------------------------------------------------------------------------------


def _sizes(
    pools: Sequence[Pool],
    demand: Demand | None,
    idle_s: float,
    now_s: float,
    config: PlannerConfig,
) -> dict[str, Size]:
    may_stop = all(pool.signals.min_replicas == 0 for pool in pools)
    is_stopped = may_stop and all(pool.signals.desired_replicas == 0 for pool in pools)
    nothing = "no router was heard of late" if demand is None else "no request is held"
    if is_stopped and (demand is None or demand.is_none):
        return _all_stopped(pools, f"all pools are stopped, {nothing}")
    zero_after_s = config.scale_to_zero_after_s
    if may_stop and zero_after_s is not None and idle_s >= zero_after_s:
        return _all_stopped(
            pools, f"nothing was asked for during {idle_s:.0f} s: all pools stop together"
        )
    sizes = {pool.name: size_of(pool, now_s, config) for pool in pools}
    if is_stopped and demand is not None:
        words = f"all pools start together, requests held: {demand.num_held}"
        sizes = {name: size.to(size.replicas, words) for name, size in sizes.items()}
    return keep_ratio(pools, sizes, config)


def _all_stopped(pools: Sequence[Pool], words: str) -> dict[str, Size]:
    return {pool.name: Size(0, 0, words) for pool in pools}


def _plan(pool: Pool, size: Size, now_s: float, config: PlannerConfig) -> PoolPlan:
    desired = pool.signals.desired_replicas
    verb = f"{desired} -> {size.replicas}" if size.replicas != desired else f"stays at {desired}"
    reason = f"{pool.name} {verb}: {size.words}"
    if pool.signals.role is not Role.MIXED:
        return PoolPlan(size.replicas, None, reason)
    plan, words = roles_of(pool, size.replicas, now_s, config)
    return PoolPlan(size.replicas, plan, f"{reason}; {words}" if words else reason)
