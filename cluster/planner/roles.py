"""Which role the workers of a mixed pool act in: switched within seconds, without a new pod.

A role that fills whole workers gets these for itself, so that prompts hold up no streams; what is
left of both shares the others. The roles in force stay while the need is within the tolerance of
what they are for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.config.planner import PlannerConfig
from cluster.planner.needs import Need
from cluster.planner.sizing import Pool
from cluster.pools.role_plan import RolePlan

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Roles:
    plan: RolePlan
    words: str


def roles_of(pool: Pool, replicas: int, now_s: float, config: PlannerConfig) -> Roles:
    """The roles of a mixed pool that will have `replicas`. Those that have yet to go live act in
    both until then."""
    present = pool.signals.role_plan
    num_workers = min(pool.measure.num_live, replicas)
    if num_workers == 0:
        return Roles(RolePlan(), "")
    fits = present.leaves_both_roles(num_workers)
    if not pool.is_known:
        return Roles(present if fits else RolePlan(), "")
    need = pool.memory.samples[-1].mean.least
    streams_need = _ceil(pool.measure.fill)
    wanted, less, more = (
        _wanted(Need(f * need.prefill, f * need.decode), num_workers, streams_need, config)
        for f in (1.0, 1 - config.tolerance, 1 + config.tolerance)
    )
    if wanted == present:
        return Roles(present, _words(present, num_workers))
    if fits and (_is_between(present, less, more) or _waits(pool, now_s, config)):
        return Roles(present, _words(present, num_workers))
    words = (
        f"{_words(wanted, num_workers)}, from {present.prefill} and {present.decode}: prefill "
        f"needs {need.prefill:.1f} workers, decode {need.decode:.1f}"
    )
    return Roles(wanted, words)


def _wanted(need: Need, num_workers: int, streams_need: int, config: PlannerConfig) -> RolePlan:
    """Whole workers to each role, what is whole but for the tolerance too; in proportion where
    there are too few. Workers that can decode are no fewer than the streams that run need, and
    each role keeps one that can act in it."""
    total = need.prefill + need.decode
    scale = min(1.0, num_workers / total) if total > 0 else 0.0
    scale *= 1 + config.tolerance
    most_prefill = num_workers - max(1, streams_need)
    prefill = max(0, min(math.floor(need.prefill * scale + _ROUNDING), most_prefill))
    decode = math.floor(need.decode * scale + _ROUNDING)
    decode = max(0, min(decode, num_workers - 1, num_workers - prefill))
    return _within_ratio(prefill, decode, config)


def _within_ratio(prefill: int, decode: int, config: PlannerConfig) -> RolePlan:
    """The bounds hold between workers that act in one role alone; others act in both."""
    low, high = config.min_prefill_per_decode, config.max_prefill_per_decode
    if prefill and decode and high is not None:
        prefill = min(prefill, math.floor(high * decode + _ROUNDING))
    if prefill and decode and low is not None:
        decode = min(decode, math.floor(prefill / low + _ROUNDING))
    return RolePlan(prefill, decode)


def _is_between(plan: RolePlan, one: RolePlan, other: RolePlan) -> bool:
    prefill, decode = sorted((one.prefill, other.prefill)), sorted((one.decode, other.decode))
    return prefill[0] <= plan.prefill <= prefill[1] and decode[0] <= plan.decode <= decode[1]


def _waits(pool: Pool, now_s: float, config: PlannerConfig) -> bool:
    switched_at_s = pool.memory.switched_at_s
    return switched_at_s is not None and now_s - switched_at_s < config.role_hold_s


def _ceil(workers: float) -> int:
    return math.ceil(workers - _ROUNDING)


def _words(plan: RolePlan, num_workers: int) -> str:
    both = num_workers - plan.prefill - plan.decode
    return f"roles: {plan.prefill} prefill alone, {plan.decode} decode alone, {both} both"
