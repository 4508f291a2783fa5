"""The planner's settings. Standard library only: a section of cluster.yaml and of ServingCluster.

All times are in seconds. The planner must be called at least once in `panic_window_s`, or once a
second: fleets report no oftener.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.config.ranges import Count, NotNegative, Positive, Ranged, Share, between

_Margin = Annotated[float, between(0, 0.99)]


@dataclass(frozen=True)
class PlannerTargets(Ranged):
    """Latency targets, and bounds for the means to meet them."""

    ttft_target_s: Positive = 1.0
    """Time to first token that prefill is planned for: the wait for a worker and the prefill."""
    itl_target_s: Positive = 0.05
    """Gap between a stream's tokens that decode is planned for."""
    min_prefill_per_decode: Positive | None = None
    """Fewest prefill replicas for each decode replica; None: no bound."""
    max_prefill_per_decode: Positive | None = None
    """Most prefill replicas for each decode replica; None: no bound."""
    scale_to_zero_after_s: Positive | None = None
    """All pools stop together when nothing was asked for during this time, if each may have no
    replica. `stable_window_s` at least. None: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_prefill_per_decode, self.max_prefill_per_decode
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_prefill_per_decode must not be above max_prefill_per_decode ({high:g}), "
                f"not {low:g}"
            )


@dataclass(frozen=True)
class PlannerTuning(Ranged):
    """How fast pools follow the load."""

    max_utilisation: Share = 0.8
    """Largest share of a worker's measured prefill rate that is planned with."""
    max_kv_use: Share = 0.8
    """Share of a worker's KV memory, and of its most streams, that is planned with."""
    catch_up_s: Positive = 60.0
    """Time within which a queue that misses the TTFT target is to be worked off. It asks for at
    most one worker more than twice what the arrivals ask for."""
    panic_window_s: Positive = 15.0
    """Scale-out follows the mean need within this time."""
    stable_window_s: Positive = 300.0
    """Scale-in follows the greatest need within this time, all of which must be known."""
    scale_in_hold_s: NotNegative = 60.0
    """Least time between two scale-ins of a pool."""
    role_hold_s: NotNegative = 30.0
    """A mixed pool keeps its roles for at least this long after a switch."""
    stale_after_s: Positive = 15.0
    """Figures older than this are ignored."""
    warm_up_s: NotNegative = 30.0
    """A worker's speed does not count until it has been live for this long."""
    tolerance: _Margin = 0.1
    """A pool grows when the need exceeds its replicas by more than this share of them."""
    consolidation_margin: _Margin = 0.2
    """A pool shrinks when the remaining replicas would hold the load and this share more."""
    max_step_out: Count = 4
    """Most replicas that a pool may have beyond those that have started, a pool at zero
    included."""
    max_step_in: Count = 1
    """Replicas that leave a pool at once; those that never started come on top."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stable_window_s < self.panic_window_s:
            raise ValueError(
                f"stable_window_s must be at least panic_window_s ({self.panic_window_s:g}), "
                f"not {self.stable_window_s:g}"
            )


@dataclass(frozen=True)
class PlannerConfig(PlannerTuning, PlannerTargets):
    """All settings of the planner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        zero_after_s = self.scale_to_zero_after_s
        if zero_after_s is not None and zero_after_s < self.stable_window_s:
            raise ValueError(
                f"scale_to_zero_after_s must be at least stable_window_s "
                f"({self.stable_window_s:g}), not {zero_after_s:g}"
            )
