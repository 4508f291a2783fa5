"""What became of this router's requests in the last minute: rollouts go by it.

A request counts once, when it ends after at least one attempt. Requests that their clients ended do
not count, nor do those with a deadline that nobody could have met: they say nothing of the workers.
A request that stood still for far too long before its client ended it counts apart: clients give up
on what hangs. Pure but for the times that come in.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.clock import NowS
from baton.v1 import control_pb2
from router.recent import Recent, Spans

WINDOW_S = 60.0
_STILL_FACTOR = 10.0
_LEAST_STILL_S = 5.0


@dataclass
class _Ended:
    """Requests, in one second."""

    num_all: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    """None of the above."""


class RequestFigures:
    """Own what was seen of requests in the last `WINDOW_S`."""

    def __init__(self, clock: NowS) -> None:
        self._clock = clock
        self._ended = Spans(WINDOW_S, _Ended)
        self._gaps_s = Recent(WINDOW_S)
        self._first_waits_s = Recent(WINDOW_S)
        self._usual_s = 0.0  # median wait for a first token, when some came last

    def ended(self, failed: bool) -> None:
        ended = self._ended.at(self._clock())
        ended.num_all += 1
        ended.num_failed += failed

    def abandoned(self) -> None:
        """A request's client ended it, after it had stood still for too long."""
        self._ended.at(self._clock()).num_abandoned += 1

    def saw_first_token(self, wait_s: float) -> None:
        """So long after its attempt began."""
        self._first_waits_s.add(wait_s, self._clock())

    def saw_gap(self, gap_s: float, now_s: float) -> None:
        """Between two tokens of a stream."""
        self._gaps_s.add(gap_s, now_s)

    def too_long_s(self, least_s: float) -> float:
        """How long a request may stand still that the fastest worker could prefill in `least_s`."""
        return max(_LEAST_STILL_S, _STILL_FACTOR * max(self._usual_s, least_s))

    def report(self, num_active: int) -> control_pb2.RequestFigures:
        """`num_active`: requests that run now."""
        now = self._clock()
        if (wait_s := self._first_waits_s.quantile(0.5, now)) is not None:
            self._usual_s = wait_s
        ended = list(self._ended.within(now))
        return control_pb2.RequestFigures(
            num_requests=sum(each.num_all for each in ended),
            num_failures=sum(each.num_failed for each in ended),
            itl_s=self._gaps_s.quantile(0.5, now),
            num_abandoned=sum(each.num_abandoned for each in ended),
            num_active=num_active,
        )
