"""The planner's settings. Standard library only: a section of cluster.yaml and of ServingCluster.

All times are in seconds. The planner must be called at least once in `panic_window_s`, or once a
second: fleets report no oftener.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerTargets:
    """Latency targets, and bounds for the means to meet them."""

    ttft_target_s: float = 1.0
    """Time to first token that prefill is planned for: the wait for a worker and the prefill."""
    itl_target_s: float = 0.05
    """Gap between a stream's tokens that decode is planned for."""
    min_prefill_per_decode: float | None = None
    """Fewest prefill replicas for each decode replica; None: no bound."""
    max_prefill_per_decode: float | None = None
    """Most prefill replicas for each decode replica; None: no bound."""
    scale_to_zero_after_s: float | None = None
    """All pools stop together when nothing was asked for during this time, if each may have no
    replica. `stable_window_s` at least. None: never."""

    def __post_init__(self) -> None:
        _check_positive(self, "ttft_target_s", "itl_target_s")
        low, high = self.min_prefill_per_decode, self.max_prefill_per_decode
        for name, bound in (("min_prefill_per_decode", low), ("max_prefill_per_decode", high)):
            if bound is not None and not 0 < bound < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {bound}")
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_prefill_per_decode must not be above max_prefill_per_decode ({high:g}), "
                f"not {low:g}"
            )


@dataclass(frozen=True)
class PlannerTuning:
    """How fast pools follow the load."""

    max_utilisation: float = 0.8
    """Largest share of a worker's measured prefill rate that is planned with."""
    max_kv_use: float = 0.8
    """Share of a worker's KV memory, and of its most streams, that is planned with."""
    catch_up_s: float = 60.0
    """A queue that misses the TTFT target is to be worked off within this time. It asks for at most
    twice what the arrivals ask for, and one worker."""
    panic_window_s: float = 15.0
    """Scale-out follows the mean need within this time."""
    stable_window_s: float = 300.0
    """Scale-in follows the greatest need within this time, all of which must be known."""
    scale_in_hold_s: float = 60.0
    """After a scale-in a pool shrinks again after this long at the earliest."""
    role_hold_s: float = 30.0
    """A mixed pool keeps its roles for at least this long after a switch."""
    stale_after_s: float = 15.0
    """Figures older than this are ignored."""
    warm_up_s: float = 30.0
    """A worker's speed does not count until it has been live for this long."""
    tolerance: float = 0.1
    """A pool grows when the need exceeds its replicas by more than this share of them."""
    consolidation_margin: float = 0.2
    """A pool shrinks when the remaining replicas would hold the load and this share more."""
    max_step_out: int = 4
    """Replicas that a pool may have beyond those that have started; also for a pool at zero."""
    max_step_in: int = 1
    """Replicas that leave a pool at once; those that never started come on top."""

    def __post_init__(self) -> None:
        _check_positive(self, "catch_up_s", "panic_window_s", "stable_window_s", "stale_after_s")
        for name in ("scale_in_hold_s", "role_hold_s", "warm_up_s"):
            self._check_between(name, 0, math.inf)
        for name in ("max_utilisation", "max_kv_use"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        for name in ("tolerance", "consolidation_margin"):
            self._check_between(name, 0, 1)
        for name in ("max_step_out", "max_step_in"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.stable_window_s < self.panic_window_s:
            raise ValueError(
                f"stable_window_s must be at least panic_window_s ({self.panic_window_s:g}), "
                f"not {self.stable_window_s:g}"
            )

    def _check_between(self, name: str, low: float, below: float) -> None:
        if not low <= getattr(self, name) < below:
            limits = f"at least {low:g} and "
            limits += f"below {below:g}" if below < math.inf else "finite"
            raise ValueError(f"{name} must be {limits}, not {getattr(self, name)}")


@dataclass(frozen=True)
class PlannerConfig(PlannerTuning, PlannerTargets):
    """All settings of the planner."""

    def __post_init__(self) -> None:
        PlannerTargets.__post_init__(self)
        PlannerTuning.__post_init__(self)
        zero_after_s = self.scale_to_zero_after_s
        if zero_after_s is not None and not self.stable_window_s <= zero_after_s < math.inf:
            raise ValueError(
                f"scale_to_zero_after_s must be at least stable_window_s "
                f"({self.stable_window_s:g}) and finite, not {zero_after_s:g}"
            )


def _check_positive(settings: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, not {getattr(settings, name)}")
