"""What a router reports for planning: arrivals of the last seconds, and who waits for what.

Pure but for the clock: counters go in, a message comes out.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.clock import NowS
from baton.v1 import control_pb2

WINDOW_S = 10.0
_LEAST_S = 1.0  # one prompt in the first moment is no rate


@dataclass
class Counts:
    """Of one unit's requests, since its router's start."""

    num_arrivals: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens of requests that have been prefilled; of these were cached:"""
    cached_tokens: int = 0
    num_ended: int = 0
    """Requests that ended with all their output, of which:"""
    output_tokens: int = 0


@dataclass(frozen=True)
class Waiting:
    """One request in line."""

    num_uncached_tokens: int
    wait_s: float
    for_decode: bool
    """No decode worker has room for it; else it waits for a prefill worker."""
    is_held: bool = False
    """A role that it needs has no worker at all."""


class Figures:
    """Own the counts of the last `WINDOW_S`."""

    def __init__(self, router_id: str, clock: NowS) -> None:
        self._router_id, self._clock = router_id, clock
        self._seen: deque[tuple[float, Counts]] = deque([(clock(), Counts())])

    def report(self, counts: Counts, waiting: Sequence[Waiting]) -> control_pb2.ReportRouterRequest:
        """Rates since about `WINDOW_S` ago, or since the start."""
        now = self._clock()
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        began_at, before = self._seen[0]
        self._seen.append((now, replace(counts)))
        seconds = max(now - began_at, _LEAST_S)
        ended = counts.num_ended - before.num_ended
        report = control_pb2.ReportRouterRequest(
            router_id=self._router_id,
            requests_per_s=(counts.num_arrivals - before.num_arrivals) / seconds,
            uncached_tokens_per_s=_uncached(counts, before) / seconds,
            num_held=sum(each.is_held for each in waiting),
            waiting_for_prefill=_queue([each for each in waiting if not each.for_decode]),
            waiting_for_decode=_queue([each for each in waiting if each.for_decode]),
        )
        if ended:
            report.output_tokens = (counts.output_tokens - before.output_tokens) / ended
        return report


def _uncached(now: Counts, before: Counts) -> float:
    """Of the tokens that arrived, the share that recent prefills did not find cached."""
    arrived = now.prompt_tokens - before.prompt_tokens
    prefilled = now.prefilled_tokens - before.prefilled_tokens
    cached = now.cached_tokens - before.cached_tokens
    return arrived * (1 - cached / prefilled) if prefilled else float(arrived)


def _queue(waiting: Sequence[Waiting]) -> control_pb2.QueueFigures:
    if not waiting:
        return control_pb2.QueueFigures()
    waits = [each.wait_s for each in waiting]
    return control_pb2.QueueFigures(
        num_requests=len(waiting),
        num_tokens=sum(each.num_uncached_tokens for each in waiting),
        oldest_wait_s=max(waits),
        median_wait_s=statistics.median(waits),
    )
