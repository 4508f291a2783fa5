"""The pools' sizes and roles, from their needs.

1. `size_of`: one pool's size. It grows by the panic window and shrinks by the stable window.
2. `keep_ratio`: bounds on prefill replicas per decode replica, over all pools of both roles. Mixed
   pools do not count: they are both. If the pools' own bounds allow no such sizes, those win.
3. `roles_of`: the roles inside a mixed pool, which change within seconds and without a new pod. A
   role that fills whole workers gets them for itself, so that prompts do not delay streams. The
   rest of both roles shares the other workers. The roles stay while the need is within the
   tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.config.planner import PlannerConfig
from baton.fleet import Role
from cluster.planner.measure import PoolMeasure
from cluster.planner.needs import Need, PoolMemory
from cluster.planner.signals import PoolSignals
from cluster.role_plan import RolePlan

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Size:
    """A pool's target size."""

    replicas: int
    goal: int
    """The final size: `replicas` is a step towards it."""
    words: str

    def to(self, replicas: int, words: str) -> Size:
        """The size with other replicas and a further reason."""
        return Size(replicas, self.goal, f"{self.words}; {words}")


@dataclass(frozen=True)
class Pool:
    """One pool as a decision sees it."""

    signals: PoolSignals
    measure: PoolMeasure
    memory: PoolMemory
    is_known: bool
    """Whether its need is known; then the memory's newest sample is of this moment."""
    words: str
    """What explains the need, or why it is unknown."""

    @property
    def name(self) -> str:
        return self.signals.name

    @property
    def floor(self) -> int:
        """A pool that is not stopped has at least one worker."""
        return min(max(1, self.signals.min_replicas), self.signals.max_replicas)

    def bounded(self, replicas: int) -> int:
        return max(self.floor, min(replicas, self.signals.max_replicas))


def size_of(pool: Pool, now_s: float, config: PlannerConfig) -> Size:
    """The pool's size by its own load, within its bounds."""
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
    """Grow. `current` includes workers that still start; they limit how many more are requested. If
    they have no machine, more would get none either."""
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
    """Shrink, but keep enough for the peak need of the stable window, with a margin."""
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


def keep_ratio(
    pools: Sequence[Pool], sizes: Mapping[str, Size], config: PlannerConfig
) -> dict[str, Size]:
    """Change sizes to keep the ratio, with more replicas rather than fewer. A scale-in that would
    break it continues to the next size that keeps it."""
    prefill = [pool for pool in pools if pool.signals.role is Role.PREFILL]
    decode = [pool for pool in pools if pool.signals.role is Role.DECODE]
    low, high = config.min_prefill_per_decode, config.max_prefill_per_decode
    if not prefill or not decode or (low is None and high is None):
        return dict(sizes)
    num_prefill, num_decode = _fit(_Side.of(prefill, sizes), _Side.of(decode, sizes), config)
    limits = " and ".join(
        f"{word} {bound:g}" for word, bound in (("at least", low), ("at most", high)) if bound
    )
    words = f"{limits} prefill for each decode replica"
    return {
        **sizes,
        **_dealt(prefill, sizes, num_prefill, words),
        **_dealt(decode, sizes, num_decode, words),
    }


@dataclass(frozen=True)
class _Side:
    """All pools of one role together."""

    replicas: int
    goal: int
    allowed: range

    @classmethod
    def of(cls, pools: Sequence[Pool], sizes: Mapping[str, Size]) -> _Side:
        floor, most = (sum(p.floor for p in pools), sum(p.signals.max_replicas for p in pools))
        return cls(
            replicas=sum(sizes[pool.name].replicas for pool in pools),
            goal=sum(min(sizes[pool.name].goal, sizes[pool.name].replicas) for pool in pools),
            allowed=range(floor, most + 1),
        )


def _fit(prefill: _Side, decode: _Side, config: PlannerConfig) -> tuple[int, int]:
    """(prefill, decode) replicas that keep the ratio and fit best: the largest between goals and
    present sizes; else the smallest that take the least from the present sizes."""
    low, high = config.min_prefill_per_decode, config.max_prefill_per_decode

    def keeps(p: int, d: int) -> bool:
        is_enough = low is None or p >= low * d - _ROUNDING
        return is_enough and (high is None or p <= high * d + _ROUNDING)

    def cost(sizes: tuple[int, int]) -> tuple[int, ...]:
        p, d = sizes
        if prefill.goal <= p <= prefill.replicas and decode.goal <= d <= decode.replicas:
            return 0, -d, -p
        return 1, -min(p, prefill.replicas), -min(d, decode.replicas), p, d

    present = prefill.replicas, decode.replicas
    if keeps(*present):
        return present
    fits = ((_nearest(prefill, d, config), d) for d in decode.allowed)
    return min((sizes for sizes in fits if keeps(*sizes)), key=cost, default=present)


def _nearest(prefill: _Side, num_decode: int, config: PlannerConfig) -> int:
    """Return the prefill replicas nearest to the present that keep the ratio beside `num_decode`;
    if no number keeps it, any allowed one."""
    low, high = config.min_prefill_per_decode, config.max_prefill_per_decode
    floor, most = prefill.allowed[0], prefill.allowed[-1]
    nearest = prefill.replicas
    if low is not None:
        nearest = max(nearest, math.ceil(min(low * num_decode - _ROUNDING, most)))
    if high is not None:
        nearest = min(nearest, math.floor(min(high * num_decode + _ROUNDING, most)))
    return max(floor, min(nearest, most))


def _dealt(
    pools: Sequence[Pool], sizes: Mapping[str, Size], replicas: int, words: str
) -> dict[str, Size]:
    """Divide `replicas` among a role's pools, changing them in order of name."""
    left = replicas - sum(sizes[pool.name].replicas for pool in pools)
    dealt = {}
    for pool in sorted(pools, key=lambda pool: pool.name):
        size = sizes[pool.name]
        moved = pool.bounded(size.replicas + left)
        left -= moved - size.replicas
        dealt[pool.name] = size if moved == size.replicas else size.to(moved, words)
    return dealt


def roles_of(
    pool: Pool, replicas: int, now_s: float, config: PlannerConfig
) -> tuple[RolePlan, str]:
    """The roles of a mixed pool of `replicas`, and a text about them. Workers act in both roles
    until they are live."""
    present = pool.signals.role_plan
    num_workers = min(pool.measure.num_live, replicas)
    if num_workers == 0:
        return RolePlan(), ""
    fits = present.leaves_both_roles(num_workers)
    if not pool.is_known:
        return present if fits else RolePlan(), ""
    need = pool.memory.samples[-1].mean.least
    streams_need = _rounded_up(pool.measure.fill)
    wanted, less, more = (
        _wanted(Need(f * need.prefill, f * need.decode), num_workers, streams_need, config)
        for f in (1.0, 1 - config.tolerance, 1 + config.tolerance)
    )
    if wanted == present:
        return present, _words(present, num_workers)
    if fits and (_is_between(present, less, more) or _waits(pool, now_s, config)):
        return present, _words(present, num_workers)
    words = (
        f"{_words(wanted, num_workers)}, from {present.prefill} and {present.decode}: prefill "
        f"needs {need.prefill:.1f} workers, decode {need.decode:.1f}"
    )
    return wanted, words


def _wanted(need: Need, num_workers: int, streams_need: int, config: PlannerConfig) -> RolePlan:
    """Assign whole workers to each role, rounding up within the tolerance, or in proportion if
    there are too few. Enough workers keep decoding for the running streams, and each role keeps at
    least one worker."""
    total = need.prefill + need.decode
    scale = min(1.0, num_workers / total) if total > 0 else 0.0
    scale *= 1 + config.tolerance
    most_prefill = num_workers - max(1, streams_need)
    prefill = max(0, min(math.floor(need.prefill * scale + _ROUNDING), most_prefill))
    decode = math.floor(need.decode * scale + _ROUNDING)
    decode = max(0, min(decode, num_workers - 1, num_workers - prefill))
    return _within_ratio(prefill, decode, config)


def _within_ratio(prefill: int, decode: int, config: PlannerConfig) -> RolePlan:
    """Apply the ratio's bounds to workers that act in one role only; the others act in both."""
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


def _words(plan: RolePlan, num_workers: int) -> str:
    both = num_workers - plan.prefill - plan.decode
    return f"roles: {plan.prefill} prefill alone, {plan.decode} decode alone, {both} both"
