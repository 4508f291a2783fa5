"""Signals of made-up moments, and a planner whose plans come true."""

from __future__ import annotations

from dataclasses import replace

from baton.config.planner import PlannerConfig
from baton.fleet import Role, WorkerState
from cluster.planner.needs import PlannerState
from cluster.planner.planner import Plan, decide
from cluster.planner.signals import (
    PoolSignals,
    QueueSignals,
    RouterSignals,
    Signals,
    WorkerSignals,
)

RATE = 1_000.0
"""Tokens/s that a made-up worker prefills."""
STABLE_S = PlannerConfig().stable_window_s


def worker(  # noqa: PLR0913
    name: str,
    now_s: float,
    *,
    age_s: float = 1.0,
    live_for_s: float = 10_000.0,
    state: WorkerState = WorkerState.LIVE,
    streams: int = 0,
    kv_use: float = 0.0,
    rate: float | None = RATE,
    itl_s: float | None = None,
) -> WorkerSignals:
    """A worker whose figures are `age_s` old."""
    return WorkerSignals(
        worker_id=name,
        state=state,
        live_since_s=now_s - live_for_s if state is WorkerState.LIVE else None,
        measured_at_s=now_s - age_s,
        num_streams=streams,
        max_streams=256,
        kv_use=kv_use,
        prefill_tokens_per_s=rate,
        itl_s=itl_s,
    )


def prefill_pool(
    now_s: float, desired: int, *, num_live: int | None = None, rate: float | None = RATE
) -> PoolSignals:
    """A pool whose replicas are all live, unless `num_live` says otherwise."""
    live = desired if num_live is None else num_live
    workers = tuple(worker(f"prefill-{i}", now_s, rate=rate) for i in range(live))
    return PoolSignals("prefill", Role.PREFILL, desired, 16, workers=workers)


def decode_pool(
    now_s: float,
    desired: int,
    *,
    num_live: int | None = None,
    streams: int = 0,
    fill: float = 0.0,
    itl_s: float | None = 0.02,
) -> PoolSignals:
    """A pool that shares `streams`, and KV of so many workers, evenly among its live workers."""
    live = desired if num_live is None else num_live
    workers = tuple(
        worker(
            f"decode-{i}",
            now_s,
            streams=streams // live,
            kv_use=min(1.0, fill / live),
            itl_s=itl_s if streams else None,
        )
        for i in range(live)
    )
    return PoolSignals("decode", Role.DECODE, desired, 16, workers=workers)


def router(
    now_s: float,
    *,
    tokens_per_s: float = 0.0,
    prompt_tokens: int = 200,
    held: int = 0,
    for_prefill: QueueSignals | None = None,
    for_decode: QueueSignals | None = None,
) -> RouterSignals:
    """A router at which prompts of `prompt_tokens` arrive, heard a second ago."""
    return RouterSignals(
        router_id="router-0",
        measured_at_s=now_s - 1.0,
        requests_per_s=tokens_per_s / prompt_tokens,
        uncached_tokens_per_s=tokens_per_s,
        num_held=held,
        waiting_for_prefill=for_prefill or QueueSignals(),
        waiting_for_decode=for_decode or QueueSignals(),
    )


def queue(num_requests: int, wait_s: float, tokens: int) -> QueueSignals:
    """Requests that have come in evenly within `wait_s`."""
    return QueueSignals(num_requests, tokens, wait_s, wait_s / 2)


def moment(now_s: float, router_seen: RouterSignals, *pools: PoolSignals) -> Signals:
    return Signals(now_s, pools, (router_seen,))


class Planning:
    """A planner from one call to the next, and what it wanted last."""

    def __init__(self, config: PlannerConfig | None = None) -> None:
        self.config = config or PlannerConfig()
        self.state = PlannerState()
        self.plan: Plan = {}

    def see(self, signals: Signals) -> Plan:
        self.state, self.plan = decide(self.state, signals, self.config)
        return self.plan

    def desired(self, pool: str) -> int:
        return self.plan[pool].desired_replicas

    def reason(self, pool: str) -> str:
        return self.plan[pool].reason


def quiet(
    planning: Planning, pools: tuple[PoolSignals, ...], until_s: float, from_s: float = 0.0
) -> None:
    """The same moment again and again."""
    now_s = from_s
    while now_s <= until_s:
        fresh = tuple(
            replace(
                pool, workers=tuple(replace(each, measured_at_s=now_s) for each in pool.workers)
            )
            for pool in pools
        )
        planning.see(moment(now_s, router(now_s), *fresh))
        now_s += 5.0


def with_workers(pool: PoolSignals, *more: WorkerSignals) -> PoolSignals:
    return replace(pool, workers=(*pool.workers, *more))
