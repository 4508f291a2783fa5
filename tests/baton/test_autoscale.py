"""The planner's hand on a registry's pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.autoscale import Autoscaler
from baton.fleet_signals import FleetSignals, PoolBounds
from baton.v1 import common_pb2, control_pb2, worker_pb2
from cluster.config import RegistryConfig
from cluster.control_service import Changes, serve
from cluster.planner.config import PlannerConfig
from cluster.planner.signals import WorkerPhase
from cluster.registry import Progress, Registration, Registry
from cluster.role_plan import Role
from tests.cluster.pool_settings import settings_of

BOUNDS = {"prefill": PoolBounds(1, 4), "decode": PoolBounds(1, 4)}
QUICK = PlannerConfig(
    panic_window_s=2.0, stable_window_s=4.0, warm_up_s=0.0, scale_in_hold_s=0.0, catch_up_s=10.0
)
LOAD = worker_pb2.WorkerLoad(
    num_blocks=100, num_free_blocks=75, num_running=2, num_reserved=1, prefill_tokens_per_s=1000.0
)


def fleet(state: control_pb2.WorkerState.ValueType) -> control_pb2.WatchFleetResponse:
    info = control_pb2.WorkerInfo(
        ref=common_pb2.WorkerRef(worker_id="decode-0", incarnation=1),
        pool="decode",
        max_num_seqs=8,
    )
    return control_pb2.WatchFleetResponse(
        workers=[control_pb2.FleetWorker(info=info, state=state, load=LOAD)],
        pools=[
            control_pb2.PoolStatus(
                name="decode",
                role=common_pb2.WORKER_ROLE_DECODE,
                desired_replicas=2,
                pending_replicas=1,
            )
        ],
    )


def test_the_registrys_words_become_signals_with_the_times_they_lack() -> None:
    signals = FleetSignals()
    signals.take(fleet(control_pb2.WORKER_STATE_STARTING), BOUNDS, 10.0)
    signals.take(fleet(control_pb2.WORKER_STATE_LIVE), BOUNDS, 12.0)
    taken = signals.take(fleet(control_pb2.WORKER_STATE_SUSPECT), BOUNDS, 20.0)
    (pool,) = taken.pools
    (worker,) = pool.workers
    assert (pool.desired_replicas, pool.num_pending, pool.max_replicas) == (2, 1, 4)
    assert worker.phase is WorkerPhase.LIVE
    assert (worker.live_since_s, worker.measured_at_s) == (12.0, 12.0)
    assert (worker.num_streams, worker.max_streams, worker.kv_use) == (3, 8, 0.25)
    assert worker.prefill_tokens_per_s == 1000.0
    assert worker.itl_s is None


@asynccontextmanager
async def fleet_of(
    registry: Registry, report: control_pb2.ReportRouterRequest
) -> AsyncIterator[str]:
    """A prefill and a decode worker and a router that keep telling; the registry's address."""
    streams = []
    for name, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE)):
        registry.pools.add(settings_of(name, role, max_replicas=4), 1)
        ref = common_pb2.WorkerRef(worker_id=f"{name}-0", incarnation=1)
        info = control_pb2.WorkerInfo(ref=ref, pool=name, max_num_seqs=8)
        mine = Registration(ref.worker_id, 1, name, info.SerializeToString())
        streams.append(registry.register(mine))

    async def beat() -> None:
        while True:
            for stream in streams:
                assert stream is not None
                progress = Progress(False, 0.0, None)
                registry.heartbeat(stream, progress, LOAD.SerializeToString(), False)
            registry.routers.report(report.router_id, report.SerializeToString())
            await asyncio.sleep(0.2)

    beating = asyncio.create_task(beat())
    try:
        async with serve(registry, Changes(), "127.0.0.1:0") as address:
            yield address
    finally:
        beating.cancel()


async def test_prompts_that_arrive_faster_than_one_worker_computes_get_more_workers() -> None:
    registry = Registry(RegistryConfig(), time.monotonic)
    waiting = control_pb2.QueueFigures(
        num_requests=20, num_tokens=20_000, oldest_wait_s=9.0, median_wait_s=5.0
    )
    report = control_pb2.ReportRouterRequest(
        router_id="router-1",
        requests_per_s=3.0,
        uncached_tokens_per_s=2400.0,
        output_tokens=10.0,
        waiting_for_prefill=waiting,
    )
    told: list[str] = []
    async with fleet_of(registry, report) as address:
        autoscaler = Autoscaler(address, BOUNDS, QUICK, told.append)
        autoscaler.start()
        try:
            async with asyncio.timeout(20):
                while registry.pools.desired_replicas()["prefill"] < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            await asyncio.to_thread(autoscaler.stop)
    assert registry.pools.desired_replicas()["prefill"] <= 4
    assert any("prefill" in reason and "tokens/s" in reason for reason in told)
