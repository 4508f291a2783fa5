"""What became of each cohort's requests in the last seconds: a rollout goes on, or back, by it.

A request counts once in each cohort that failed it, and where it ended; one that its client ended,
or gave no time in which anybody could have served it, says nothing of a cohort and counts nowhere.
But where it had stood still for far too long it is told apart: clients give up on what hangs. What
is too long is the same for all cohorts at any time, so that of equal ones nobody looks worse.
Pure but for the times that come in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import control_pb2
from router.cohorts import Cohort
from router.recent import Recent, Spans

WINDOW_S = 10.0
_STILL_FACTOR = 10.0
_LEAST_STILL_S = 5.0


@dataclass
class _Ended:
    """Requests, in one second."""

    num_all: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    """None of the above."""


class CohortMeter:
    """Own what was seen of one cohort in the last `WINDOW_S`."""

    def __init__(self, cohort: Cohort, clock: Callable[[], float]) -> None:
        self.cohort, self._clock = cohort, clock
        self._ended = Spans(WINDOW_S, _Ended)
        self._gaps_s = Recent(WINDOW_S)
        self._first_waits_s = Recent(WINDOW_S)

    def ended(self, failed: bool) -> None:
        """A request ended here, or went elsewhere because it `failed` here."""
        ended = self._ended.at(self._clock())
        ended.num_all += 1
        ended.num_failed += failed

    def abandoned(self) -> None:
        """A request's client ended it, after it had stood still here for too long."""
        self._ended.at(self._clock()).num_abandoned += 1

    def saw_first_token(self, wait_s: float) -> None:
        """So long after its attempt began."""
        self._first_waits_s.add(wait_s, self._clock())

    @property
    def first_wait_s(self) -> float | None:
        """The median; None: none was seen."""
        return self._first_waits_s.quantile(0.5, self._clock())

    def saw_gap(self, gap_s: float, now_s: float) -> None:
        """Between two tokens of a stream."""
        self._gaps_s.add(gap_s, now_s)

    def figures(self) -> control_pb2.CohortFigures | None:
        """None: nothing was seen. Rates are of the whole window, also of one that has only begun:
        summed over time, as whoever judges does, each request then counts as one."""
        now = self._clock()
        ended, itl_s = list(self._ended.within(now)), self._gaps_s.quantile(0.5, now)
        if not ended and itl_s is None:
            return None
        return control_pb2.CohortFigures(
            cohort=self.cohort,
            requests_per_s=sum(each.num_all for each in ended) / WINDOW_S,
            failures_per_s=sum(each.num_failed for each in ended) / WINDOW_S,
            itl_s=itl_s,
            abandoned_per_s=sum(each.num_abandoned for each in ended) / WINDOW_S,
        )


class CohortFigures:
    """Own a meter for each cohort that ever got requests: there are few."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meters: dict[Cohort, CohortMeter] = {}
        self._usual_s = 0.0  # until a first token, in the fastest cohort when some came last

    def meter(self, cohort: Cohort) -> CohortMeter:
        meter = self._meters.get(cohort)
        if meter is None:
            meter = self._meters[cohort] = CohortMeter(cohort, self._clock)
        return meter

    def too_long_s(self, least_s: float) -> float:
        """For a request to stand still that the fastest worker could prefill in `least_s`."""
        return max(_LEAST_STILL_S, _STILL_FACTOR * max(self._usual_s, least_s))

    def report(self) -> list[control_pb2.CohortFigures]:
        waits_s = [meter.first_wait_s for meter in self._meters.values()]
        self._usual_s = min((s for s in waits_s if s is not None), default=self._usual_s)
        told = [meter.figures() for meter in self._meters.values()]
        return [figures for figures in told if figures is not None]
