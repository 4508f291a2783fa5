"""Signals summed up: what the routers see arrive, and what each pool holds. Old figures are left
out, and so is how fast a worker is that has only just begun. Sums do not depend on their order.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from math import fsum

from baton.config.planner import PlannerConfig
from cluster.planner.signals import (
    PoolSignals,
    QueueSignals,
    RouterSignals,
    Signals,
    WorkerPhase,
    WorkerSignals,
)
from cluster.pools.role_plan import Role

_FEWEST_GAPS = 100  # of which five are above the 95th percentile


@dataclass(frozen=True)
class Demand:
    """What the routers tell together."""

    requests_per_s: float
    tokens_per_s: float
    """Uncached prompt tokens that arrive."""
    output_tokens: float | None
    """Of a request, weighted by the routers' arrivals; None: nobody knows."""
    num_held: int
    for_prefill: QueueSignals
    for_decode: QueueSignals
    unheard_factor: float
    """Routers there are for each one that was heard: what arrives at the others is unknown."""

    @property
    def is_none(self) -> bool:
        """At the routers that were heard."""
        waiting = self.num_held + self.for_prefill.num_requests + self.for_decode.num_requests
        return not waiting and self.requests_per_s <= 0


@dataclass(frozen=True)
class ItlPoint:
    """How far apart tokens are where a worker runs so many streams."""

    streams: float
    itl_s: float


@dataclass(frozen=True)
class PoolMeasure:
    """What a pool's workers tell together. Those that drain count nowhere: what they run ends with
    them, and takes nothing from the others."""

    num_live: int
    num_unheard: int
    """Live workers without fresh figures."""
    num_warming: int
    """Workers that load, or went live less than `warm_up_s` ago."""
    num_started: int
    """Workers that are live or load."""
    num_pending: int
    num_draining: int
    newest_at_s: float | None
    """When a live worker's figures were last measured."""
    num_streams: int
    fill: float
    """Workers' worth of KV memory, or of streams where those are scarcer, that is taken."""
    kv_fill: float
    """The same of KV memory alone."""
    num_queued_tokens: int
    prefill_tokens_per_s: float | None
    """Of the middle one of the workers that are warm and heard; None: none of them has a rate."""
    itl: ItlPoint | None
    """Of the same workers, by what their decode steps take; None: none of them decodes."""
    extra_s: float | None
    """By how much the gaps that clients see are longer: with what prompts take beside the streams,
    say. None: not known now."""

    @property
    def is_blind(self) -> bool:
        """Whether there are live workers, and none was heard of late."""
        return 0 < self.num_live == self.num_unheard

    @property
    def is_idle(self) -> bool:
        return not (self.num_unheard or self.num_streams or self.num_queued_tokens)


def measure_demand(signals: Signals, config: PlannerConfig) -> Demand | None:
    """None: no router was heard of late."""
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
    live = [worker for worker in pool.workers if worker.phase is WorkerPhase.LIVE]
    heard = [worker for worker in live if _is_fresh(worker.measured_at_s, signals, config)]
    warm = [worker for worker in heard if _is_warm(worker, signals, config)]
    num_starting = sum(worker.phase is WorkerPhase.STARTING for worker in pool.workers)
    num_young = sum(not _is_warm(worker, signals, config) for worker in live)
    rates = [worker.prefill_tokens_per_s for worker in warm if worker.prefill_tokens_per_s]
    times_s = [worker.measured_at_s for worker in live if worker.measured_at_s is not None]
    itl, num_draining = _itl(warm), sum(w.phase is WorkerPhase.DRAINING for w in pool.workers)
    return PoolMeasure(
        num_live=len(live),
        num_unheard=len(live) - len(heard),
        num_warming=num_starting + num_young,
        num_started=num_starting + len(live),
        num_pending=pool.num_pending,
        num_draining=num_draining,
        newest_at_s=max(times_s, default=None),
        num_streams=sum(worker.num_streams for worker in heard),
        fill=fsum(_fill(worker, pool.role) for worker in heard),
        kv_fill=fsum(worker.kv_use for worker in heard),
        num_queued_tokens=sum(worker.num_queued_tokens for worker in heard),
        prefill_tokens_per_s=statistics.median(sorted(rates)) if rates else None,
        itl=itl,
        # Clients do not tell the gaps of workers that are cold, or drain, from the others'.
        extra_s=None if num_young or num_draining else _extra_s(pool.name, itl, signals, config),
    )


def _is_fresh(measured_at_s: float | None, signals: Signals, config: PlannerConfig) -> bool:
    return measured_at_s is not None and signals.now_s - measured_at_s <= config.stale_after_s


def _is_warm(worker: WorkerSignals, signals: Signals, config: PlannerConfig) -> bool:
    since_s = worker.live_since_s
    return since_s is not None and signals.now_s - since_s >= config.warm_up_s


def _fill(worker: WorkerSignals, role: Role) -> float:
    """A prefill worker's streams are prompts, which its rate counts already."""
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
    if not any(weights):
        weights = [1.0] * len(telling)
    total = fsum(weight * (router.output_tokens or 0.0) for weight, router in zip(weights, telling))
    return total / fsum(weights)


def _together(queues: list[QueueSignals]) -> QueueSignals:
    num_requests = sum(queue.num_requests for queue in queues)
    waits_s = fsum(queue.num_requests * queue.median_wait_s for queue in queues)
    return QueueSignals(
        num_requests=num_requests,
        num_tokens=sum(queue.num_tokens for queue in queues),
        oldest_wait_s=max((queue.oldest_wait_s for queue in queues), default=0.0),
        median_wait_s=waits_s / num_requests if num_requests else 0.0,
    )
