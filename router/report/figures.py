"""What a router reports to its registry once a second. Pure but for the clock.

`Figures`, for planning: arrivals of the last seconds, and who waits for what. `PoolFigures`: how
long clients waited for tokens of each pool. `RequestFigures`: what became of requests in the last
minute; rollouts go by it.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from baton.clock import NowS
from baton.v1 import control_pb2

SPAN_S = 1.0
_MAX_SAMPLES = 64  # of one span: quantiles over many spans take a millisecond
T = TypeVar("T")


class Spans(Generic[T]):
    """Own one `T` for each second, about, in which there was anything, of the last `window_s`."""

    def __init__(self, window_s: float, make: Callable[[], T]) -> None:
        self._window_s, self._make = window_s, make
        self._spans: deque[tuple[float, T]] = deque()

    def at(self, now_s: float) -> T:
        """Return this second's."""
        spans = self._spans
        if not spans or now_s - spans[-1][0] >= SPAN_S:
            self._forget(now_s)
            spans.append((now_s, self._make()))
        return spans[-1][1]

    def within(self, now_s: float, last_s: float = math.inf) -> Iterator[T]:
        """Return those of the whole window, or of its `last_s`; oldest first."""
        self._forget(now_s)
        return (each for at_s, each in self._spans if now_s - at_s < last_s)

    def _forget(self, now_s: float) -> None:
        while self._spans and self._spans[0][0] <= now_s - self._window_s:
            self._spans.popleft()


class _Samples:
    """Own some of the samples of a span, each as likely as any other (Vitter 1985, algorithm R)."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.num_seen = 0

    def add(self, sample: float, rng: random.Random) -> None:
        self.num_seen += 1
        if len(self.kept) < _MAX_SAMPLES:
            self.kept.append(sample)
        elif (index := int(rng.random() * self.num_seen)) < _MAX_SAMPLES:
            self.kept[index] = sample


class RecentSamples(Spans[_Samples]):
    """Own samples of the last `window_s`. Each second keeps a few, and each kept sample is weighted
    by how many that second had."""

    def __init__(self, window_s: float) -> None:
        super().__init__(window_s, _Samples)
        self._rng = random.Random(0)

    def add(self, now_s: float, *samples: float) -> None:
        span = self.at(now_s)
        for sample in samples:
            span.add(sample, self._rng)

    def count(self, now_s: float, last_s: float = math.inf) -> int:
        return sum(span.num_seen for span in self.within(now_s, last_s))

    def quantile(self, share: float, now_s: float, last_s: float = math.inf) -> float | None:
        """Return `quantile` over the window, or over its `last_s`."""
        return quantile(share, self.within(now_s, last_s))


def quantile(share: float, of: Iterable[_Samples]) -> float | None:
    """Return the least sample that `share` (0 to 1) of all are not above; None: there is none."""
    spans = list(of)
    if not spans:
        return None
    samples = np.concatenate([span.kept for span in spans])
    num_kept = [len(span.kept) for span in spans]
    stands_for = [span.num_seen / len(span.kept) for span in spans]
    order = np.argsort(samples)
    num_up_to = np.cumsum(np.repeat(stands_for, num_kept)[order])
    at = np.searchsorted(num_up_to, share * num_up_to[-1], side="right")
    return float(samples[order[min(at, len(samples) - 1)]])


WINDOW_S = 60.0
RECENT_S = 10.0
_SHARE = 0.95


@dataclass
class _Pool:
    ttft_s: RecentSamples = field(default_factory=lambda: RecentSamples(WINDOW_S))
    gaps_s: RecentSamples = field(default_factory=lambda: RecentSamples(WINDOW_S))


class PoolFigures:
    """Own what clients saw of each pool in the last `WINDOW_S`. An unused pool is forgotten."""

    def __init__(self, clock: NowS) -> None:
        self._clock = clock
        self._pools: defaultdict[str, _Pool] = defaultdict(_Pool)

    def saw_first_token(self, pool: str, ttft_s: float) -> None:
        """Note the time from arrival to first token of a request that the pool prefilled."""
        self._pools[pool].ttft_s.add(self._clock(), ttft_s)

    def saw_gaps(self, pool: str, gaps_s: Sequence[float]) -> None:
        """Note gaps between tokens of a stream that a worker of the pool decodes."""
        self._pools[pool].gaps_s.add(self._clock(), *gaps_s)

    def median_gap_s(self) -> float | None:
        """Return the median gap over all pools; None: there was none."""
        now_s = self._clock()
        within = (pool.gaps_s.within(now_s) for pool in self._pools.values())
        return quantile(0.5, itertools.chain.from_iterable(within))

    def report(self) -> list[control_pb2.PoolFigures]:
        now_s = self._clock()
        reported = []
        for name, pool in sorted(self._pools.items()):
            ttft_s = pool.ttft_s.quantile(_SHARE, now_s)
            gap_s = pool.gaps_s.quantile(_SHARE, now_s)
            if ttft_s is None and gap_s is None:
                del self._pools[name]
            else:
                reported.append(
                    control_pb2.PoolFigures(
                        pool=name,
                        ttft_p95_s=ttft_s,
                        itl_p95_s=gap_s,
                        recent_itl_p95_s=pool.gaps_s.quantile(_SHARE, now_s, RECENT_S),
                        num_recent_gaps=pool.gaps_s.count(now_s, RECENT_S),
                    )
                )
        return reported


_STILL_FACTOR = 10.0
_LEAST_STILL_S = 5.0


@dataclass
class _Ended:
    """How many requests ended in one second."""

    num_all: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    """Not counted above."""


class RequestFigures:
    """Own what became of requests in the last `WINDOW_S`.

    A request counts once, when it ends after at least one attempt. Requests that their clients
    ended do not count, nor do those with a deadline that nobody could have met: they show nothing
    of the workers. A request that stood still for far too long before its client ended it counts
    apart: clients give up on what hangs.
    """

    def __init__(self, clock: NowS) -> None:
        self._clock = clock
        self._ended = Spans(WINDOW_S, _Ended)
        self._first_waits_s = RecentSamples(WINDOW_S)
        self._usual_s = 0.0  # median wait for a first token, when some came last

    def ended(self, failed: bool) -> None:
        ended = self._ended.at(self._clock())
        ended.num_all += 1
        ended.num_failed += failed

    def abandoned(self) -> None:
        """A request's client ended it, after it had stood still for too long."""
        self._ended.at(self._clock()).num_abandoned += 1

    def saw_first_token(self, wait_s: float) -> None:
        """Note how long after its attempt's beginning a first token came."""
        self._first_waits_s.add(self._clock(), wait_s)

    def too_long_s(self, least_s: float) -> float:
        """Return how long a request may stand still. `least_s`: its prefill at the fastest."""
        return max(_LEAST_STILL_S, _STILL_FACTOR * max(self._usual_s, least_s))

    def report(self, num_active: int, gap_s: float | None) -> control_pb2.RequestFigures:
        """Report them. `num_active`: requests that run now. `gap_s`: the median between tokens."""
        now = self._clock()
        if (wait_s := self._first_waits_s.quantile(0.5, now)) is not None:
            self._usual_s = wait_s
        ended = list(self._ended.within(now))
        return control_pb2.RequestFigures(
            num_requests=sum(each.num_all for each in ended),
            num_failures=sum(each.num_failed for each in ended),
            itl_s=gap_s,
            num_abandoned=sum(each.num_abandoned for each in ended),
            num_active=num_active,
        )


RATES_WINDOW_S = 10.0
_LEAST_S = 1.0  # one prompt in the first moment is no rate


@dataclass
class Counts:
    """One unit's requests since its router's start."""

    num_arrivals: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens of requests that have been prefilled, those that were cached included."""
    cached_tokens: int = 0
    num_ended: int = 0
    """Requests that ended with all their output: `output_tokens`."""
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
    """Own the counts of the last `RATES_WINDOW_S`."""

    def __init__(self, router_id: str, clock: NowS) -> None:
        self._router_id, self._clock = router_id, clock
        self._seen: deque[tuple[float, Counts]] = deque([(clock(), Counts())])

    def report(self, counts: Counts, waiting: Sequence[Waiting]) -> control_pb2.ReportRouterRequest:
        """Report rates since about `RATES_WINDOW_S` ago, or since the start."""
        now = self._clock()
        while len(self._seen) > 1 and self._seen[1][0] <= now - RATES_WINDOW_S:
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
    """Estimate how many of the tokens that arrived are not cached, by what prefills found."""
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
