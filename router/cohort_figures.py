"""What became of each cohort's requests in the last seconds: a rollout goes on, or back, by it.

A request counts once in each cohort that failed it, and where it ended; one that its client ended,
or gave no time in which anybody could have served it, says nothing of a cohort and counts nowhere.
Pure but for the times that come in.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.v1 import control_pb2
from router.cohorts import Cohort

WINDOW_S = 10.0
_SPAN_S = 1.0
_MAX_GAPS = 1000  # of one span: enough for a median


@dataclass
class _Span:
    """One second, about."""

    began_s: float
    num_ended: int = 0
    num_failed: int = 0
    gaps_s: list[float] = field(default_factory=list)


class CohortMeter:
    """Own what was seen of one cohort in the last `WINDOW_S`."""

    def __init__(self, cohort: Cohort, clock: Callable[[], float]) -> None:
        self.cohort, self._clock = cohort, clock
        self._spans: deque[_Span] = deque()

    def ended(self, failed: bool) -> None:
        """A request ended here, or went elsewhere because it `failed` here."""
        span = self._span(self._clock())
        span.num_ended += 1
        span.num_failed += failed

    def saw_gap(self, gap_s: float, now_s: float) -> None:
        """Between two tokens of a stream."""
        gaps = self._span(now_s).gaps_s
        if len(gaps) < _MAX_GAPS:
            gaps.append(gap_s)

    def figures(self) -> control_pb2.CohortFigures | None:
        """None: nothing was seen."""
        now = self._clock()
        self._forget(now)
        if not self._spans:
            return None
        seconds = max(now - self._spans[0].began_s, _SPAN_S)
        gaps = [gap_s for span in self._spans for gap_s in span.gaps_s]
        return control_pb2.CohortFigures(
            cohort=self.cohort,
            requests_per_s=sum(span.num_ended for span in self._spans) / seconds,
            failures_per_s=sum(span.num_failed for span in self._spans) / seconds,
            itl_s=statistics.median(gaps) if gaps else None,
        )

    def _span(self, now: float) -> _Span:
        spans = self._spans
        if not spans or now - spans[-1].began_s >= _SPAN_S:
            self._forget(now)
            spans.append(_Span(now))
        return spans[-1]

    def _forget(self, now: float) -> None:
        while self._spans and self._spans[0].began_s <= now - WINDOW_S:
            self._spans.popleft()


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
