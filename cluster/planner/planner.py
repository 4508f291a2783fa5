"""One decision: signals in, desired replicas with reasons out.

1. What the signals show is summed up (`measure`) and remembered (`state`).
2. Each pool's need, role by role (`needs`); nothing is concluded from old or missing figures.
3. All pools stop together when nothing was asked for long enough, and start together when a
   request is held.
4. Else each pool's size by its own need (`sizing`), then the ratio between the roles (`ratio`),
   then the roles inside mixed pools (`roles`).

While workers may have yet to register all pools stay as they are. The same signals, planned for
twice, change nothing the second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from baton.config.planner import PlannerConfig
from cluster.planner.measure import Demand, PoolMeasure, measure_demand, measure_pool
from cluster.planner.needs import PoolLoad, need_of
from cluster.planner.ratio import keep_ratio
from cluster.planner.roles import roles_of
from cluster.planner.signals import PoolSignals, Signals
from cluster.planner.sizing import Pool, Size, size_of
from cluster.planner.state import PlannerState, PoolMemory
from cluster.pools.role_plan import Role, RolePlan

_COMES_UP_WITHIN_S = 1800.0  # a machine with GPUs that has to be ordered first takes minutes


@dataclass(frozen=True)
class PoolPlan:
    """What one pool should be."""

    desired_replicas: int
    """Absolute, also where nothing changes: whoever applies it needs no memory of its own."""
    role_plan: RolePlan | None
    """Of a mixed pool; None: of another."""
    reason: str
    """In words, with the numbers that it comes from."""


@dataclass(frozen=True)
class Plan:
    """What all pools should be, by name."""

    pools: Mapping[str, PoolPlan]


def decide(
    state: PlannerState, signals: Signals, config: PlannerConfig
) -> tuple[PlannerState, Plan]:
    """Plan every pool, and what to remember for the next call."""
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
    # One that was not heard may have requests: that stops no pool, and starts none.
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
    return new_state, Plan(plans)


def _as_they_are(signals: Signals) -> Plan:
    """A worker that has yet to register is neither idle nor missing."""
    return Plan(
        {
            pool.name: PoolPlan(
                pool.desired_replicas,
                pool.role_plan if pool.role is Role.MIXED else None,
                f"{pool.name} stays at {pool.desired_replicas}: the registry has just started, and "
                f"workers may have yet to register",
            )
            for pool in signals.pools
        }
    )


def _comes_up(pool: PoolSignals, memory: PoolMemory, now_s: float) -> bool:
    """Its first workers load: that nothing runs until then says nothing. One whose workers do not
    start, or find no machine, comes up no more."""
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
    """The pools in order of name, each with its newest need in its memory, or why there is none."""
    prefill_shares = _shares(signals.pools, Role.DECODE, memories)
    decode_shares = _shares(signals.pools, Role.PREFILL, memories)
    pools = []
    for pool in sorted(signals.pools, key=lambda pool: pool.name):
        measure, memory = measures[pool.name], memories[pool.name]
        words = _blindness(measure, demand, signals)
        if demand is None or words is not None:
            pools.append(Pool(pool, measure, memory, False, words or ""))
            continue
        load = PoolLoad(
            role=pool.role,
            measure=measure,
            demand=demand,
            prefill_share=prefill_shares.get(pool.name, 0.0),
            decode_share=decode_shares.get(pool.name, 0.0),
            prefill_tokens_per_s=memory.prefill_tokens_per_s,
            itl_curve=memory.itl_curve,
            extra_s=memory.extra.of_gap_s if memory.extra else 0.0,
        )
        need = need_of(load, config)
        if need is None:
            words = "prompts arrive, and no warm worker has told its prefill rate yet"
            pools.append(Pool(pool, measure, memory, False, words))
        else:
            memory = memory.add(need[0], signals.now_s, config)
            pools.append(Pool(pool, measure, memory, True, need[1]))
    return pools


def _shares(
    pools: Sequence[PoolSignals], without: Role, memories: Mapping[str, PoolMemory]
) -> dict[str, float]:
    """How a role's load is divided among the pools that can do it: by their replicas, and by their
    prefill rate where prompts are divided and every pool's is known."""
    able = [pool for pool in pools if pool.role is not without]
    rates = {pool.name: memories[pool.name].prefill_tokens_per_s or 0.0 for pool in able}
    by_rate = without is Role.DECODE and all(rates.values())
    weights = {
        pool.name: max(1, pool.desired_replicas) * (rates[pool.name] if by_rate else 1.0)
        for pool in able
    }
    total = fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _blindness(measure: PoolMeasure, demand: Demand | None, signals: Signals) -> str | None:
    """Why nothing can be concluded; None: something can."""
    if demand is None:
        return "no router was heard of" + _for(signals.routers_silent_s)
    if measure.is_blind:
        newest_s = measure.newest_at_s
        silent = _for(None if newest_s is None else signals.now_s - newest_s)
        return f"none of {measure.num_live} live workers was heard of{silent}"
    return None


def _for(silent_s: float | None) -> str:
    return " yet" if silent_s is None else f" for {silent_s:.0f} s"


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
    roles = roles_of(pool, size.replicas, now_s, config)
    return PoolPlan(
        size.replicas, roles.plan, f"{reason}; {roles.words}" if roles.words else reason
    )
