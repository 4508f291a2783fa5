"""The planner's hand on a registry's pools."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from baton.config.planner import PlannerConfig
from baton.config.workers import RegistryConfig
from baton.errors import NoCapacityError
from baton.fleet import Role, WorkerState
from baton.v1 import common_pb2, control_pb2, worker_pb2
from cli.autoscale import Autoscaler
from cluster.planner.fleet_signals import FleetSignals, PoolBounds
from cluster.planner.measure import measure_demand
from cluster.planner.needs import PlannerState
from cluster.planner.planner import decide
from cluster.planner.signals import PoolGaps, Signals, WorkerSignals
from cluster.pools.pool_settings import PoolSettings
from cluster.progress import Progress
from cluster.registry.control_service import Changes, serve
from cluster.registry.pool_changes import PoolBacking
from cluster.registry.registry import Registration, Registry
from tests.cluster.pool_settings import settings_of
from tests.identities import OPERATOR

BOUNDS = {"prefill": PoolBounds(1, 4), "decode": PoolBounds(1, 4)}
QUICK = PlannerConfig(
    panic_window_s=0.5, stable_window_s=1.0, warm_up_s=0.0, scale_in_hold_s=0.0, catch_up_s=10.0
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


def worker_of(taken: Signals) -> WorkerSignals:
    (pool,) = taken.pools
    (worker,) = pool.workers
    return worker


def test_the_registrys_report_becomes_signals_with_the_times_they_lack() -> None:
    signals = FleetSignals()
    signals.take(fleet(control_pb2.WORKER_STATE_STARTING), BOUNDS, 10.0)
    signals.take(fleet(control_pb2.WORKER_STATE_LIVE), BOUNDS, 12.0)
    taken = signals.take(fleet(control_pb2.WORKER_STATE_SUSPECT), BOUNDS, 20.0)
    (pool,), worker = taken.pools, worker_of(taken)
    assert (pool.desired_replicas, pool.num_pending, pool.max_replicas) == (2, 1, 4)
    assert worker.state is WorkerState.LIVE
    assert (worker.live_since_s, worker.measured_at_s) == (12.0, 12.0)
    assert (worker.num_streams, worker.max_streams, worker.kv_use) == (3, 8, 0.25)
    assert worker.prefill_tokens_per_s == 1000.0
    assert worker.itl_s is None


def test_what_clients_saw_of_a_pool_comes_with_its_router_s_report() -> None:
    reported = fleet(control_pb2.WORKER_STATE_LIVE)
    seen = [
        control_pb2.PoolFigures(pool="decode", num_recent_gaps=300, recent_itl_p95_s=0.25),
        control_pb2.PoolFigures(pool="prefill", ttft_p95_s=0.5),
    ]
    reported.routers.add(router_id="router-1", pools=seen)
    (router,) = FleetSignals().take(reported, BOUNDS, 10.0).routers
    assert router.gaps == (PoolGaps("decode", 300, 0.25),)


def test_a_registry_that_settles_is_reported() -> None:
    reported = fleet(control_pb2.WORKER_STATE_LIVE)
    assert not FleetSignals().take(reported, BOUNDS, 10.0).settles
    reported.settles = True
    assert FleetSignals().take(reported, BOUNDS, 10.0).settles


def test_a_worker_that_has_yet_to_register_again_is_the_one_that_was_live_before() -> None:
    """Taken for new, how fast it is would count for nothing until it is warm again."""
    signals, live = FleetSignals(), fleet(control_pb2.WORKER_STATE_LIVE)
    signals.take(live, BOUNDS, 10.0)
    settling = fleet(control_pb2.WORKER_STATE_LIVE)
    settling.settles = True
    del settling.workers[:]
    signals.take(settling, BOUNDS, 20.0)
    assert worker_of(signals.take(live, BOUNDS, 30.0)).live_since_s == 10.0
    del settling.workers[:]
    settling.settles = False
    signals.take(settling, BOUNDS, 40.0)
    assert worker_of(signals.take(live, BOUNDS, 50.0)).live_since_s == 50.0


def test_a_router_that_is_silent_is_one_that_was_not_heard_of() -> None:
    reported = fleet(control_pb2.WORKER_STATE_LIVE)
    reported.routers.add(router_id="router-1", requests_per_s=2.5)
    reported.silent_routers.add(router_id="router-2", silent_s=3.0)
    heard, silent = FleetSignals().take(reported, BOUNDS, 10.0).routers
    assert (heard.router_id, heard.measured_at_s) == ("router-1", 10.0)
    assert (silent.router_id, silent.measured_at_s) == ("router-2", None)
    taken = FleetSignals().take(reported, BOUNDS, 10.0)
    demand = measure_demand(taken, QUICK)
    assert demand is not None
    assert (demand.requests_per_s, demand.unheard_factor) == (2.5, 2.0)
    del reported.routers[:]
    taken = FleetSignals().take(reported, BOUNDS, 10.0)
    _, plan = decide(PlannerState(), taken, QUICK)
    assert "no router has reported within" in plan["decode"].reason


@asynccontextmanager
async def fleet_of(
    registry: Registry, report: control_pb2.ReportRouterRequest, backing: PoolBacking | None = None
) -> AsyncIterator[str]:
    """A prefill and a decode worker and a router that keep reporting; the registry's address."""
    streams = []
    for name, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE)):
        registry.pools.add(settings_of(name, role, max_replicas=4), 1)
        ref = common_pb2.WorkerRef(worker_id=f"{name}-0", incarnation=1)
        info = control_pb2.WorkerInfo(ref=ref, pool=name, max_num_seqs=8)
        mine = Registration(ref.worker_id, 1, name, info.SerializeToString())
        streams.append(registry.register(mine))

    # A size that changes makes the registry report at every beat, not once a second.
    registry.pools.add(settings_of("idle", Role.DECODE, max_replicas=1), 0)
    changes = Changes()

    async def beat() -> None:
        for number in itertools.count():
            for stream in streams:
                assert stream is not None
                progress = Progress(False, 0.0, None)
                registry.heartbeat(stream, progress, LOAD.SerializeToString(), False)
            registry.routers.report(report.router_id, report.SerializeToString(), 0)
            registry.pools.set_replicas("idle", number % 2)
            changes.announce()
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat())
    try:
        async with serve(registry, changes, "127.0.0.1:0", OPERATOR, backing) as address:
            yield address
    finally:
        beating.cancel()


BUSY = control_pb2.ReportRouterRequest(
    router_id="router-1",
    requests_per_s=3.0,
    uncached_tokens_per_s=2400.0,
    output_tokens=10.0,
    waiting_for_prefill=control_pb2.QueueFigures(
        num_requests=20, num_tokens=20_000, oldest_wait_s=9.0, median_wait_s=5.0
    ),
)
"""What asks for three prefill workers and more."""


@asynccontextmanager
async def autoscaling(
    report: Callable[[str], None], backing: PoolBacking | None = None
) -> AsyncIterator[Registry]:
    """A fleet of one prefill and one decode worker under that load."""
    registry = Registry(RegistryConfig(silent_after_s=0.5), time.monotonic)  # resyncs for as long
    async with fleet_of(registry, BUSY, backing) as address:
        with Autoscaler(address, BOUNDS, QUICK, report):
            async with asyncio.timeout(20):
                yield registry


async def until_prefill_has(registry: Registry, replicas: int) -> None:
    while registry.pools.desired_replicas()["prefill"] < replicas:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_prompts_that_arrive_faster_than_one_worker_computes_get_more_workers() -> None:
    reported: list[str] = []
    async with autoscaling(reported.append) as registry:
        await until_prefill_has(registry, 3)
    assert registry.pools.desired_replicas()["prefill"] <= 4
    assert any("prefill" in reason and "tokens/s" in reason for reason in reported)


class SmallMachine(PoolBacking):
    """Has room for `num_replicas` of both pools together."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.num_refused = 0

    async def check_room(self, pool: PoolSettings, replicas: Mapping[str, int]) -> None:
        if replicas["prefill"] + replicas["decode"] > self.num_replicas:
            self.num_refused += 1
            raise NoCapacityError(f"no room for {replicas[pool.name]} replicas of {pool.name}")


async def test_a_pool_that_is_to_be_larger_than_the_machine_gets_the_room_that_there_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported: list[str] = []
    machine = SmallMachine(3)
    async with autoscaling(reported.append, machine) as registry:
        await until_prefill_has(registry, 2)
        num_refused = machine.num_refused
        while machine.num_refused < num_refused + 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    desired = registry.pools.desired_replicas()
    assert (desired["prefill"], desired["decode"]) == (2, 1)
    assert any(reason.endswith("; room for 2") for reason in reported)
    warned = [each.getMessage() for each in caplog.records if "no room" in each.getMessage()]
    assert 0 < len(warned) < machine.num_refused
    assert all(former != text for former, text in itertools.pairwise(warned))


async def test_a_refusal_is_reported_again_once_the_pool_has_been_what_it_was_to_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = SmallMachine(2)

    def refusals() -> int:
        return sum("no room for 4" in each.getMessage() for each in caplog.records)

    async with autoscaling(lambda reason: None, machine) as registry:
        while not refusals():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        machine.num_replicas = 8
        await until_prefill_has(registry, 4)
        registry.pools.set_replicas("decode", 0)  # it is put right after prefill is looked at
        while not registry.pools.desired_replicas()["decode"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        machine.num_replicas = 2
        registry.pools.set_replicas("prefill", 1)
        while refusals() < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_fault_of_the_autoscalers_own_is_logged_and_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported: list[str] = []

    def closed_at_first(reason: str) -> None:
        reported.append(reason)
        if len(reported) == 1:
            raise BrokenPipeError("nobody reads what is said")

    async with autoscaling(closed_at_first) as registry:
        await until_prefill_has(registry, 2)
        registry.pools.set_replicas("prefill", 1)
        await until_prefill_has(registry, 2)
    assert "nobody reads what is said" in caplog.text
