"""What became of each cohort's requests since a step of its rollout began, and for how long that
was watched. It dies with the process: a successor watches the step anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.v1 import control_pb2
from deploy.controller.cohort_judgement import MIN_REQUESTS, Figures, Watched
from deploy.controller.cohort_rollout import Progress
from deploy.controller.objects import Key

_LONGEST_S = 10.0
"""Routers tell of their last seconds: a longer gap between two answers is not filled in."""

Told = tuple[control_pb2.WatchFleetResponse, float]


@dataclass
class _Tally:
    """Sums over time; `itl_weight`: requests behind `itl_sum`."""

    num_requests: float = 0.0
    num_failures: float = 0.0
    num_abandoned: float = 0.0
    itl_sum: float = 0.0
    itl_weight: float = 0.0

    def add(self, told: control_pb2.CohortFigures, duration_s: float) -> None:
        num_requests = told.requests_per_s * duration_s
        self.num_requests += num_requests
        self.num_failures += told.failures_per_s * duration_s
        self.num_abandoned += told.abandoned_per_s * duration_s
        if told.HasField("itl_s"):
            self.itl_sum += told.itl_s * max(num_requests, 1e-9)
            self.itl_weight += max(num_requests, 1e-9)

    @property
    def figures(self) -> Figures:
        itl_s = self.itl_sum / self.itl_weight if self.itl_weight else None
        return Figures(self.num_requests, self.num_failures, itl_s, self.num_abandoned)


@dataclass
class _Step:
    progress: Progress
    heard_at_s: float
    served_before: Figures | None
    """Of the serving cohort, from the last step in which it had enough requests."""
    tallies: dict[str, _Tally] = field(default_factory=dict)
    watched_s: float = 0.0

    @property
    def serving(self) -> Figures:
        """Of the serving cohort. Once it has no requests any more, what failed is compared with
        what it did before; how fast it was does not count: it had another load, and so have its
        last streams. Where that is not known, the few requests that it had left say nothing: no
        others are to come. While it has a share, how fast it was is for doubts."""
        here = self.tallies.get(self.progress.serving, _Tally()).figures
        before, is_last = self.served_before, self.progress.weight == 100
        fast_before_s = None if before is None or is_last else before.itl_s or before.itl_before_s
        if here.with_abandoned.num_requests < MIN_REQUESTS and is_last:
            here = Figures() if before is None else replace(before, itl_s=None)
        elif here.with_abandoned.num_requests < MIN_REQUESTS and before is not None:
            here = replace(before, itl_s=here.itl_s)
        return replace(here, itl_before_s=fast_before_s)

    def next(self, progress: Progress, heard_at_s: float) -> _Step:
        if progress.serving != self.progress.serving:
            return _Step(progress, heard_at_s, None)
        found = self.serving
        is_enough = found.with_abandoned.num_requests >= MIN_REQUESTS
        return _Step(progress, heard_at_s, found if is_enough else None)


class CohortFigures:
    """Own the sums of each ServingCluster; one cluster's are used by one thread at a time."""

    def __init__(self) -> None:
        self._steps: dict[Key, _Step] = {}

    def take(self, cluster: Key, progress: Progress, told: Told) -> Watched | None:
        """With what the routers told since the last call; None at a step's first. `told`: the
        supervisor's answer and when it came, in seconds of any one clock."""
        answer, heard_at_s = told
        step = self._steps.get(cluster)
        if step is None:
            self._steps[cluster] = _Step(progress, heard_at_s, None)
            return None
        if step.progress != progress:
            self._steps[cluster] = step.next(progress, heard_at_s)
            return None
        duration_s = min(heard_at_s - step.heard_at_s, _LONGEST_S)
        step.heard_at_s = heard_at_s
        step.watched_s += duration_s
        for router in answer.routers:
            for each in router.cohorts:
                step.tallies.setdefault(each.cohort, _Tally()).add(each, duration_s)
        found = {cohort: tally.figures for cohort, tally in step.tallies.items()}
        return Watched(step.watched_s, found | {progress.serving: step.serving})

    def forget(self, cluster: Key) -> None:
        self._steps.pop(cluster, None)
