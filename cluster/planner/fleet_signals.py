"""The registry's view of a fleet, as the planner's signals.

The wire carries no times. The caller passes every answer of `WatchFleet` to `take` with its time of
arrival. This class remembers since when each worker is live and when it last reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.fleet import WorkerState
from baton.v1 import control_pb2
from baton.wire import ROLE_OF, STATE_OF, STATES
from cluster.planner.signals import (
    PoolGaps,
    PoolSignals,
    QueueSignals,
    RouterSignals,
    Signals,
    WorkerSignals,
)
from cluster.role_plan import RolePlan

_HERE = frozenset(STATE_OF) - {STATES[WorkerState.GONE]}


@dataclass(frozen=True)
class PoolBounds:
    """What a pool may be scaled to. Both are its size if something else sets that."""

    min_replicas: int
    max_replicas: int


@dataclass
class _Seen:
    """One start of a worker."""

    incarnation: int
    live_since_s: float | None = None
    heard_at_s: float | None = None


class FleetSignals:
    """Own what was seen of the workers so far."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def take(
        self,
        fleet: control_pb2.WatchFleetResponse,
        bounds: Mapping[str, PoolBounds],
        now_s: float,
    ) -> Signals:
        """The signals of one answer. `bounds`: by pool name; a pool without bounds is left out."""
        here = [worker for worker in fleet.workers if worker.state in _HERE]
        names = {worker.info.ref.worker_id for worker in here}
        if not fleet.settles:  # else a missing worker may have yet to register again
            self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        workers: dict[str, list[WorkerSignals]] = {pool.name: [] for pool in fleet.pools}
        for worker in here:
            workers.setdefault(worker.info.pool, []).append(self._worker(worker, now_s))
        pools = [
            _pool(pool, bounds[pool.name], tuple(workers[pool.name]))
            for pool in fleet.pools
            if pool.name in bounds
        ]
        routers = [_router(report, now_s) for report in fleet.routers]
        # Their last reports are void: their clients may have moved to other routers.
        routers += [RouterSignals(each.router_id, None) for each in fleet.silent_routers]
        return Signals(now_s, tuple(pools), tuple(routers), fleet.settles)

    def _worker(self, worker: control_pb2.FleetWorker, now_s: float) -> WorkerSignals:
        info, load = worker.info, worker.load
        seen = self._seen.get(info.ref.worker_id)
        if seen is None or seen.incarnation != info.ref.incarnation:
            seen = self._seen[info.ref.worker_id] = _Seen(info.ref.incarnation)
        state = STATE_OF[worker.state]
        if state is WorkerState.LIVE and seen.live_since_s is None:
            seen.live_since_s = now_s
        if state in (WorkerState.LIVE, WorkerState.DRAINING):
            seen.heard_at_s = now_s
        return WorkerSignals(
            worker_id=info.ref.worker_id,
            state=WorkerState.LIVE if state is WorkerState.SUSPECT else state,
            live_since_s=seen.live_since_s,
            measured_at_s=seen.heard_at_s,
            num_streams=load.num_running + load.num_reserved,
            max_streams=max(1, info.max_num_seqs),
            kv_use=1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
            num_queued_tokens=load.num_queued_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s or None,
            itl_s=load.decode_step_s or None,
        )


def _pool(
    pool: control_pb2.PoolStatus, bounds: PoolBounds, workers: tuple[WorkerSignals, ...]
) -> PoolSignals:
    return PoolSignals(
        name=pool.name,
        role=ROLE_OF[pool.role],
        desired_replicas=pool.desired_replicas,
        max_replicas=bounds.max_replicas,
        min_replicas=bounds.min_replicas,
        num_pending=pool.pending_replicas,
        num_failed_starts=pool.num_failed_starts,
        workers=workers,
        role_plan=RolePlan(pool.role_plan.prefill, pool.role_plan.decode),
    )


def _router(report: control_pb2.ReportRouterRequest, now_s: float) -> RouterSignals:
    """The signals of a router that reports."""
    return RouterSignals(
        router_id=report.router_id,
        measured_at_s=now_s,
        requests_per_s=report.requests_per_s,
        uncached_tokens_per_s=report.uncached_tokens_per_s,
        output_tokens=report.output_tokens if report.HasField("output_tokens") else None,
        num_held=report.num_held,
        waiting_for_prefill=_queue(report.waiting_for_prefill),
        waiting_for_decode=_queue(report.waiting_for_decode),
        gaps=tuple(
            PoolGaps(pool.pool, pool.num_recent_gaps, pool.recent_itl_p95_s)
            for pool in report.pools
            if pool.num_recent_gaps
        ),
    )


def _queue(figures: control_pb2.QueueFigures) -> QueueSignals:
    return QueueSignals(
        num_requests=figures.num_requests,
        num_tokens=figures.num_tokens,
        oldest_wait_s=figures.oldest_wait_s,
        median_wait_s=figures.median_wait_s,
    )
