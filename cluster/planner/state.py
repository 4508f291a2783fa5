"""What the planner remembers between calls. The caller keeps it. If it is lost, nothing shrinks
until a stable window has passed again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.config.planner import PlannerConfig
from cluster.planner.measure import ItlCurve, PoolMeasure
from cluster.planner.needs import Need, NeedRange
from cluster.planner.signals import PoolSignals
from cluster.pools.role_plan import Role, RolePlan

_EXTRA_OVER_S = 60.0  # time constant for the excess over decode steps, which varies a lot
_HELD_UP_S = 6.0  # longest pause between calls without a gap in the samples
_SEEN_S = 10.0  # routers report on the last 10 s


@dataclass(frozen=True)
class Sample:
    """The need at one moment, and its mean over the panic window before it."""

    at_s: float
    need: NeedRange
    mean: NeedRange


@dataclass(frozen=True)
class Extra:
    """Seconds by which clients' gaps exceed the workers' decode steps, smoothed."""

    of_gap_s: float
    at_s: float
    """When it was last known."""

    def then(self, newest: Extra) -> Extra:
        """Blend in a newer value, weighted by the time that it covers."""
        seen_s = min(newest.at_s - self.at_s, _SEEN_S)
        weight = 1 - math.exp(-seen_s / _EXTRA_OVER_S)
        return Extra(self.of_gap_s + weight * (newest.of_gap_s - self.of_gap_s), newest.at_s)


@dataclass(frozen=True)
class PoolMemory:
    """What the planner remembers about one pool."""

    samples: tuple[Sample, ...] = ()
    """Samples of the stable window, oldest first."""
    known_since_s: float | None = None
    """Since when the samples have no gap; None: there are none."""
    prefill_tokens_per_s: float | None = None
    """Newest known rate of a worker."""
    itl_curve: ItlCurve = field(default_factory=ItlCurve)
    extra: Extra | None = None
    """None: unknown within the stable window."""
    desired_seen: int | None = None
    """The pool's size in the newest signals."""
    shrunk_at_s: float | None = None
    """When the size last became smaller."""
    has_served: bool = False
    """Whether a worker has been live since its size was last 0."""
    wanted_since_s: float | None = None
    """Since when its size has not been 0; None: it is."""
    roles_seen: RolePlan | None = None
    switched_at_s: float | None = None
    """When the role plan last changed."""

    def see(
        self,
        pool: PoolSignals,
        measure: PoolMeasure,
        now_s: float,
        is_new: bool,
        config: PlannerConfig,
    ) -> PoolMemory:
        """Remember the signals. Without `is_new` they were remembered before."""
        shrunk = self.desired_seen is not None and pool.desired_replicas < self.desired_seen
        switched = self.roles_seen is not None and pool.role_plan != self.roles_seen
        is_wanted, since_s = pool.desired_replicas > 0, self.wanted_since_s
        curve = self.itl_curve
        if is_new and measure.itl is not None:
            curve = curve.with_point(measure.itl)
        extra = self.extra
        if extra is not None and now_s - extra.at_s > config.stable_window_s:
            extra = None
        if is_new and measure.extra_s is not None:
            newest = Extra(measure.extra_s, now_s)
            extra = newest if extra is None else extra.then(newest)
        return replace(
            self,
            prefill_tokens_per_s=measure.prefill_tokens_per_s or self.prefill_tokens_per_s,
            itl_curve=curve,
            extra=extra,
            desired_seen=pool.desired_replicas,
            shrunk_at_s=now_s if shrunk else self.shrunk_at_s,
            has_served=is_wanted and (self.has_served or measure.num_live > 0),
            wanted_since_s=(now_s if since_s is None else since_s) if is_wanted else None,
            roles_seen=pool.role_plan,
            switched_at_s=now_s if switched else self.switched_at_s,
        )

    def add(self, need: NeedRange, now_s: float, config: PlannerConfig) -> PoolMemory:
        """Remember a need; it replaces one of the same moment."""
        earlier = [sample for sample in self.samples if sample.at_s < now_s]
        recent = [s.need for s in earlier if now_s - s.at_s < config.panic_window_s]
        sample = Sample(now_s, need, _mean([*recent, need]))
        kept = [s for s in earlier if now_s - s.at_s <= config.stable_window_s]
        gap_s = now_s - earlier[-1].at_s if earlier else 0.0
        is_broken = not earlier or gap_s > 2 * config.panic_window_s + _HELD_UP_S
        return replace(
            self,
            samples=(*kept, sample),
            known_since_s=now_s if is_broken else self.known_since_s,
        )

    def wanted(self, role: Role) -> float:
        """Need for scale-out: the mean of the panic window, in workers."""
        return self.samples[-1].mean.least.workers(role)

    def peak(self, role: Role) -> float:
        """Need for scale-in: the maximum of the stable window and of this moment, in workers."""
        means = max(sample.mean.most.workers(role) for sample in self.samples)
        return max(means, self.samples[-1].need.most.workers(role))


def _mean(needs: list[NeedRange]) -> NeedRange:
    return NeedRange(
        _mean_need([need.least for need in needs]),
        _mean_need([need.most for need in needs]),
    )


def _mean_need(needs: list[Need]) -> Need:
    return Need(
        sum(need.prefill for need in needs) / len(needs),
        sum(need.decode for need in needs) / len(needs),
    )


@dataclass(frozen=True)
class PlannerState:
    """The state of all pools. A new planner begins with `PlannerState()`."""

    at_s: float | None = None
    """Time of the newest signals."""
    busy_at_s: float | None = None
    """When there last was a request anywhere, or it was unknown."""
    pools: Mapping[str, PoolMemory] = field(default_factory=dict)
