"""What became of each cohort's requests in the last seconds: a rollout goes on, or back, by it.

A request counts once in each cohort that failed it, and where it ended; one that its client ended,
or gave no time in which anybody could have served it, says nothing of a cohort and counts nowhere.
Pure but for the times that come in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import control_pb2
from router.cohorts import Cohort
from router.recent import Recent, Spans

WINDOW_S = 10.0


@dataclass
class _Ended:
    """Requests, in one second."""

    num_all: int = 0
    num_failed: int = 0


class CohortMeter:
    """Own what was seen of one cohort in the last `WINDOW_S`."""

    def __init__(self, cohort: Cohort, clock: Callable[[], float]) -> None:
        self.cohort, self._clock = cohort, clock
        self._ended = Spans(WINDOW_S, _Ended)
        self._gaps_s = Recent(WINDOW_S)

    def ended(self, failed: bool) -> None:
        """A request ended here, or went elsewhere because it `failed` here."""
        ended = self._ended.at(self._clock())
        ended.num_all += 1
        ended.num_failed += failed

    def saw_gap(self, gap_s: float, now_s: float) -> None:
        """Between two tokens of a stream."""
        self._gaps_s.add(gap_s, now_s)

    def figures(self) -> control_pb2.CohortFigures | None:
        """None: nothing was seen."""
        now = self._clock()
        ended, itl_s = list(self._ended.within(now)), self._gaps_s.quantile(0.5, now)
        if not ended and itl_s is None:
            return None
        seconds = self._ended.seconds(now)
        return control_pb2.CohortFigures(
            cohort=self.cohort,
            requests_per_s=sum(each.num_all for each in ended) / seconds,
            failures_per_s=sum(each.num_failed for each in ended) / seconds,
            itl_s=itl_s,
        )


class CohortFigures:
    """Own a meter for each cohort that ever got requests: there are few."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meters: dict[Cohort, CohortMeter] = {}

    def meter(self, cohort: Cohort) -> CohortMeter:
        meter = self._meters.get(cohort)
        if meter is None:
            meter = self._meters[cohort] = CohortMeter(cohort, self._clock)
        return meter

    def report(self) -> list[control_pb2.CohortFigures]:
        told = [meter.figures() for meter in self._meters.values()]
        return [figures for figures in told if figures is not None]
