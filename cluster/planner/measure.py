"""Sums of the signals: what arrives at the routers, what each pool holds, and its ITL curve.

Old figures are left out, and so are the rates of workers that have just started. Sums do not depend
on the order of their parts.

The ITL curve gives the gap between tokens (ITL) by the number of streams that a worker runs. A
decode step takes a base time and some time per stream. A stream lasts as long as its tokens take,
so fewer workers run more streams in all; what stays the same is the demand in tokens/s. Each point
of the curve covers a range of stream counts (a factor of 1.25) and keeps its newest value,
smoothed. So a value stays known while the workers run other numbers of streams.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from math import fsum

from baton.config.planner import PlannerConfig
from baton.fleet import Role, WorkerState
from cluster.planner.signals import (
    PoolSignals,
    QueueSignals,
    RouterSignals,
    Signals,
    WorkerSignals,
)

_FEWEST_GAPS = 100  # so that five are above the 95th percentile


@dataclass(frozen=True)
class Demand:
    """What all routers report together."""

    requests_per_s: float
    tokens_per_s: float
    """Uncached prompt tokens that arrive per second."""
    output_tokens: float | None
    """Mean per request, weighted by the routers' arrivals; None: unknown."""
    num_held: int
    for_prefill: QueueSignals
    for_decode: QueueSignals
    unheard_factor: float
    """Number of routers per router that reported: arrivals at the others are unknown."""

    @property
    def is_none(self) -> bool:
        """Whether nothing arrives or waits at the routers that reported."""
        waiting = self.num_held + self.for_prefill.num_requests + self.for_decode.num_requests
        return not waiting and self.requests_per_s <= 0


@dataclass(frozen=True)
class ItlPoint:
    """The gap between tokens of a worker with this many streams."""

    streams: float
    itl_s: float


@dataclass(frozen=True)
class PoolMeasure:
    """What a pool's workers report together. Draining workers do not count: what they run ends with
    them and takes nothing from the others."""

    num_live: int
    num_unheard: int
    """Live workers without fresh figures."""
    num_started: int
    """Workers that are live or load."""
    num_pending: int
    num_streams: int
    fill: float
    """Taken KV memory, or taken streams if they are scarcer, in units of one worker."""
    kv_fill: float
    """Taken KV memory alone, in units of one worker."""
    num_queued_tokens: int
    prefill_tokens_per_s: float | None
    """Median of the warm workers that reported; None: none has a rate."""
    itl: ItlPoint | None
    """From the same workers' decode steps; None: none decodes."""
    extra_s: float | None
    """Seconds by which clients' gaps exceed the decode steps, for example while prompts are
    computed beside streams. None: unknown now."""

    @property
    def is_blind(self) -> bool:
        """Whether there are live workers but none reported lately."""
        return 0 < self.num_live == self.num_unheard

    @property
    def is_idle(self) -> bool:
        return not (self.num_unheard or self.num_streams or self.num_queued_tokens)


def measure_demand(signals: Signals, config: PlannerConfig) -> Demand | None:
    """The routers' demand; None: no router reported lately."""
    heard = [
        router for router in signals.routers if _is_fresh(router.measured_at_s, signals, config)
    ]
    if not heard:
        return None
    return Demand(
        requests_per_s=fsum(router.requests_per_s for router in heard),
        tokens_per_s=fsum(router.uncached_tokens_per_s for router in heard),
        output_tokens=_output_tokens(heard),
        num_held=sum(router.num_held for router in heard),
        for_prefill=_together([router.waiting_for_prefill for router in heard]),
        for_decode=_together([router.waiting_for_decode for router in heard]),
        unheard_factor=len(signals.routers) / len(heard),
    )


def measure_pool(pool: PoolSignals, signals: Signals, config: PlannerConfig) -> PoolMeasure:
    live = [worker for worker in pool.workers if worker.state is WorkerState.LIVE]
    heard = [worker for worker in live if _is_fresh(worker.measured_at_s, signals, config)]
    warm = [worker for worker in heard if _is_warm(worker, signals, config)]
    num_starting = sum(worker.state is WorkerState.STARTING for worker in pool.workers)
    num_young = sum(not _is_warm(worker, signals, config) for worker in live)
    rates = [worker.prefill_tokens_per_s for worker in warm if worker.prefill_tokens_per_s]
    itl, num_draining = _itl(warm), sum(w.state is WorkerState.DRAINING for w in pool.workers)
    return PoolMeasure(
        num_live=len(live),
        num_unheard=len(live) - len(heard),
        num_started=num_starting + len(live),
        num_pending=pool.num_pending,
        num_streams=sum(worker.num_streams for worker in heard),
        fill=fsum(_fill(worker, pool.role) for worker in heard),
        kv_fill=fsum(worker.kv_use for worker in heard),
        num_queued_tokens=sum(worker.num_queued_tokens for worker in heard),
        prefill_tokens_per_s=statistics.median(sorted(rates)) if rates else None,
        itl=itl,
        # Clients' gaps mix in those of cold and draining workers.
        extra_s=None if num_young or num_draining else _extra_s(pool.name, itl, signals, config),
    )


def _is_fresh(measured_at_s: float | None, signals: Signals, config: PlannerConfig) -> bool:
    return measured_at_s is not None and signals.now_s - measured_at_s <= config.stale_after_s


def _is_warm(worker: WorkerSignals, signals: Signals, config: PlannerConfig) -> bool:
    since_s = worker.live_since_s
    return since_s is not None and signals.now_s - since_s >= config.warm_up_s


def _fill(worker: WorkerSignals, role: Role) -> float:
    """The larger share taken, of KV or of streams. A prefill worker's streams are prompts, which
    its rate counts already."""
    if role is Role.PREFILL:
        return worker.kv_use
    return max(worker.kv_use, worker.num_streams / max(1, worker.max_streams))


def _itl(warm: list[WorkerSignals]) -> ItlPoint | None:
    decoding = [worker for worker in warm if worker.itl_s and worker.num_streams]
    if not decoding:
        return None
    return ItlPoint(
        streams=statistics.fmean(worker.num_streams for worker in decoding),
        itl_s=statistics.median(worker.itl_s for worker in decoding if worker.itl_s),
    )


def _extra_s(
    pool: str, itl: ItlPoint | None, signals: Signals, config: PlannerConfig
) -> float | None:
    seen = [
        gaps
        for router in signals.routers
        if _is_fresh(router.measured_at_s, signals, config)
        for gaps in router.gaps
        if gaps.pool == pool
    ]
    num_gaps = sum(gaps.num_gaps for gaps in seen)
    if itl is None or num_gaps < _FEWEST_GAPS:
        return None
    return max(0.0, fsum(gaps.num_gaps * gaps.p95_s for gaps in seen) / num_gaps - itl.itl_s)


def _output_tokens(routers: list[RouterSignals]) -> float | None:
    telling = [router for router in routers if router.output_tokens is not None]
    if not telling:
        return None
    weights = [router.requests_per_s for router in telling]
    means = [router.output_tokens or 0.0 for router in telling]
    return statistics.fmean(means, weights if any(weights) else None)


def _together(queues: list[QueueSignals]) -> QueueSignals:
    num_requests = sum(queue.num_requests for queue in queues)
    waits_s = fsum(queue.num_requests * queue.median_wait_s for queue in queues)
    return QueueSignals(
        num_requests=num_requests,
        num_tokens=sum(queue.num_tokens for queue in queues),
        oldest_wait_s=max((queue.oldest_wait_s for queue in queues), default=0.0),
        median_wait_s=waits_s / num_requests if num_requests else 0.0,
    )


_STEP = 1.25  # factor between two points
_NEWEST = 0.1  # weight of a new value
_REACH = 4.0  # times the most streams ever seen: the line is not extrapolated further


@dataclass(frozen=True)
class ItlCurve:
    """Points by their rounded number of streams, ascending."""

    points: tuple[tuple[int, ItlPoint], ...] = ()

    def with_point(self, seen: ItlPoint) -> ItlCurve:
        """The curve with this value added."""
        key = math.floor(math.log(seen.streams, _STEP))
        known = dict(self.points)
        known[key] = _blend(known[key], seen) if key in known else seen
        return ItlCurve(tuple(sorted(known.items(), key=lambda item: item[0])))

    @property
    def least_s(self) -> float:
        """The gap of a single stream, which more workers cannot shorten; 0 if unknown."""
        return sum(self._line()) if self.points else 0.0

    def reaches(self, itl_s: float) -> bool:
        """Whether enough workers can bring the gap down to `itl_s`."""
        return self.least_s <= itl_s

    def workers_for_itl(self, tokens_per_s: float, now_s: float, target_s: float) -> float:
        """Workers needed for a gap of `target_s` > 0, which is `now_s` now; 0 if unknown or out of
        reach."""
        if not self.points or not self.reaches(target_s):
            return 0.0
        base_s, slope_s = self._line()
        streams = tokens_per_s * now_s
        if not self._is_line:
            return streams * slope_s / target_s
        most = _REACH * max(point.streams for _, point in self.points)
        if base_s >= target_s:  # the base alone takes the target
            return streams / most
        return max(slope_s * tokens_per_s * target_s / (target_s - base_s), streams / most)

    def workers_for_kv(self, tokens_per_s: float, now_s: float, kv_of_stream: float) -> float:
        """Workers needed to hold the streams' KV. `kv_of_stream`: share of a worker that one stream
        takes. More workers shorten streams, so that fewer run at once."""
        if not self._is_line:
            return tokens_per_s * now_s * kv_of_stream
        base_s, slope_s = self._line()
        return tokens_per_s * (slope_s + min(base_s, now_s) * kv_of_stream)

    @property
    def _is_line(self) -> bool:
        """Whether two points determine the base. Otherwise the gap counts as proportional to the
        streams, and the number of streams as fixed: the most that more workers could gain."""
        return len(self.points) > 1

    def _line(self) -> tuple[float, float]:
        """(base, slope) by least squares, in seconds and seconds per stream; neither is
        negative."""
        streams = [point.streams for _, point in self.points]
        gaps_s = [point.itl_s for _, point in self.points]
        if not self._is_line:
            return 0.0, gaps_s[0] / streams[0]
        slope_s, base_s = statistics.linear_regression(streams, gaps_s)
        if slope_s <= 0:
            return statistics.fmean(gaps_s), 0.0
        if base_s >= 0:
            return base_s, slope_s
        return 0.0, statistics.linear_regression(streams, gaps_s, proportional=True).slope


def _blend(old: ItlPoint, new: ItlPoint) -> ItlPoint:
    return ItlPoint(
        old.streams + _NEWEST * (new.streams - old.streams),
        old.itl_s + _NEWEST * (new.itl_s - old.itl_s),
    )
