"""Bounds on prefill replicas for each decode replica, kept over the pools of both roles together.

Mixed pools are not counted: they are both. Where the pools' own bounds leave no size that keeps the
ratio, those win.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.config.planner import PlannerConfig
from cluster.planner.sizing import Pool, Size
from cluster.pools.role_plan import Role

_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Side:
    """The pools of one role, as one."""

    replicas: int
    goal: int
    floor: int
    max_replicas: int

    @classmethod
    def of(cls, pools: Sequence[Pool], sizes: Mapping[str, Size]) -> _Side:
        return cls(
            replicas=sum(sizes[pool.name].replicas for pool in pools),
            goal=sum(min(sizes[pool.name].goal, sizes[pool.name].replicas) for pool in pools),
            floor=sum(pool.floor for pool in pools),
            max_replicas=sum(pool.signals.max_replicas for pool in pools),
        )


@dataclass(frozen=True)
class _Bounds:
    low: float
    high: float

    def fewest(self, decode: int) -> int:
        return math.ceil(self.low * decode - _ROUNDING)

    def most(self, decode: int, limit: int) -> int:
        if math.isinf(self.high):
            return limit
        return min(limit, math.floor(self.high * decode + _ROUNDING))

    def keep(self, prefill: int, decode: int) -> bool:
        return self.fewest(decode) <= prefill <= self.most(decode, prefill)


def keep_ratio(
    pools: Sequence[Pool], sizes: Mapping[str, Size], config: PlannerConfig
) -> dict[str, Size]:
    """Sizes that keep the ratio: rather more replicas than fewer. A scale-in that would break it
    goes on to the next size towards its goal that keeps it."""
    prefill = [pool for pool in pools if pool.signals.role is Role.PREFILL]
    decode = [pool for pool in pools if pool.signals.role is Role.DECODE]
    low, high = config.min_prefill_per_decode, config.max_prefill_per_decode
    if not prefill or not decode or (low is None and high is None):
        return dict(sizes)
    bounds = _Bounds(low or 0.0, math.inf if high is None else high)
    num_prefill, num_decode = _fit(_Side.of(prefill, sizes), _Side.of(decode, sizes), bounds)
    limits = " and ".join(
        f"{word} {bound:g}" for word, bound in (("at least", low), ("at most", high)) if bound
    )
    words = f"{limits} prefill for each decode replica"
    return {
        **sizes,
        **_dealt(prefill, sizes, num_prefill, words),
        **_dealt(decode, sizes, num_decode, words),
    }


def _fit(prefill: _Side, decode: _Side, bounds: _Bounds) -> tuple[int, int]:
    """Replicas of both roles."""
    if bounds.keep(prefill.replicas, decode.replicas):
        return prefill.replicas, decode.replicas
    return (
        _shrunk(prefill, decode, bounds)
        or _grown(prefill, decode, bounds)
        or _cut(prefill, decode, bounds)
        or (prefill.replicas, decode.replicas)
    )


def _shrunk(prefill: _Side, decode: _Side, bounds: _Bounds) -> tuple[int, int] | None:
    """The largest sizes between goals and replicas that keep the ratio."""
    for num_decode in range(decode.replicas, decode.goal - 1, -1):
        num_prefill = bounds.most(num_decode, prefill.replicas)
        if num_prefill >= max(prefill.goal, bounds.fewest(num_decode)):
            return num_prefill, num_decode
    return None


def _grown(prefill: _Side, decode: _Side, bounds: _Bounds) -> tuple[int, int] | None:
    """The smallest larger sizes that keep the ratio."""
    for num_decode in range(decode.replicas, decode.max_replicas + 1):
        num_prefill = max(prefill.replicas, bounds.fewest(num_decode))
        if num_prefill <= bounds.most(num_decode, prefill.max_replicas):
            return num_prefill, num_decode
    return None


def _cut(prefill: _Side, decode: _Side, bounds: _Bounds) -> tuple[int, int] | None:
    """The most prefill within the pools' bounds that keeps the ratio, with the fewest decode that
    does; None: nothing keeps it."""
    for most_decode in range(decode.max_replicas, max(0, decode.floor - 1), -1):
        fewest = max(prefill.floor, bounds.fewest(most_decode))
        most = bounds.most(most_decode, prefill.max_replicas)
        if fewest <= most:
            num_prefill = min(max(prefill.replicas, fewest), most)
            able = range(min(decode.replicas, most_decode), most_decode + 1)
            return num_prefill, next(n for n in able if bounds.keep(num_prefill, n))
    return None


def _dealt(
    pools: Sequence[Pool], sizes: Mapping[str, Size], replicas: int, words: str
) -> dict[str, Size]:
    """The sizes of a role's pools when they have `replicas` together, changed in order of name."""
    left = replicas - sum(sizes[pool.name].replicas for pool in pools)
    dealt = {}
    for pool in sorted(pools, key=lambda pool: pool.name):
        size = sizes[pool.name]
        moved = pool.bounded(size.replicas + left)
        left -= moved - size.replicas
        dealt[pool.name] = size if moved == size.replicas else size.to(moved, words)
    return dealt
