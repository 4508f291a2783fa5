"""What the operator hears of a supervisor, and what of it cannot wait for the next look."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

from baton.fleet import WorkerState
from baton.v1 import control_pb2
from deploy.controller.kit.objects import Key
from deploy.controller.observed.fleet import Heard, fleet_of, merged
from deploy.controller.reconcile.fleet_watch import FleetWatch
from tests.identities import OPERATOR
from tests.router.deployment import Context, Registry

CLUSTER = Key("here", "main")


class Supervisor(Registry):
    """Reports what a router has said it."""

    report = control_pb2.ReportRouterRequest(router_id="router-1")

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.speaks = asyncio.Event(), asyncio.Event()
        self.speaks.set()

    async def WatchFleet(  # noqa: N802
        self, request: control_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchFleetResponse]:
        self.asked.set()
        await self.speaks.wait()
        async for response in super().WatchFleet(request, context):
            response.routers.append(self.report)
            yield response


@contextlib.asynccontextmanager
async def watching(supervisor: Supervisor) -> AsyncIterator[tuple[FleetWatch, threading.Event]]:
    """The watch of it, and what is set when something has changed."""
    said = threading.Event()
    watch = FleetWatch(lambda _: said.set())
    await supervisor.start()
    try:
        assert not watch.heard(supervisor.address).is_certain
        watch.follow(CLUSTER, OPERATOR, [supervisor.address])
        yield watch, said
    finally:
        watch.stop()
        await supervisor.stop()


async def test_requests_that_are_held_for_stopped_pools_are_reported_at_once() -> None:
    supervisor = Supervisor()
    async with watching(supervisor) as (watch, said):
        assert await asyncio.to_thread(said.wait, 10), "the supervisor speaks"
        for num_held in (1, 0):
            said.clear()
            supervisor.report = control_pb2.ReportRouterRequest(num_held=num_held)
            await supervisor.publish()
            assert await asyncio.to_thread(said.wait, 10)
            fleet = watch.heard(supervisor.address).fleet
            assert fleet is not None
            assert fleet.holds_requests == (num_held > 0)


async def test_a_supervisor_that_has_had_no_time_to_speak_is_not_silent() -> None:
    supervisor = Supervisor()
    supervisor.speaks.clear()
    async with watching(supervisor) as (watch, said):
        await supervisor.asked.wait()
        assert not watch.heard(supervisor.address).is_certain
        supervisor.speaks.set()
        assert await asyncio.to_thread(said.wait, 10)
        heard = watch.heard(supervisor.address)
        assert heard.is_certain
        assert heard.fleet is not None


async def test_a_supervisor_whose_workers_have_yet_to_register_is_not_settled() -> None:
    supervisor = Supervisor()
    supervisor.settles = True
    async with watching(supervisor) as (watch, said):
        for settles in (True, False):
            assert await asyncio.to_thread(said.wait, 10)
            assert watch.heard(supervisor.address).is_settled == (not settles)
            said.clear()
            supervisor.settles = False
            await supervisor.publish()


def answer_of(*pools: control_pb2.PoolStatus, settles: bool = False) -> Heard:
    workers = [
        control_pb2.FleetWorker(
            info=control_pb2.WorkerInfo(ref={"worker_id": f"{pool.name}-0"}, pool=pool.name),
            state=control_pb2.WORKER_STATE_LIVE,
        )
        for pool in pools
    ]
    said = control_pb2.WatchFleetResponse(pools=pools, workers=workers, settles=settles)
    said.routers.add(router_id="r", num_held=1)
    return Heard(fleet_of(said), (said, 3.0), is_certain=True)


def test_two_units_are_one_fleet_whose_sizes_are_sums() -> None:
    def pool(name: str, size: int) -> control_pb2.PoolStatus:
        return control_pb2.PoolStatus(name=name, desired_replicas=size, live_replicas=1)

    former = answer_of(pool("prefill", 1), pool("decode", 3))
    coming = answer_of(pool("decode", 1), settles=True)
    both = merged({"bcdfg": former, "hjkmn": coming})
    assert both.fleet is not None
    assert {name: p.desired_replicas for name, p in both.fleet.pools.items()} == {
        "prefill": 1, "decode": 4,
    }  # fmt: skip
    live = [p.worker_id for p in both.fleet.pools["decode"].slots if p.state is WorkerState.LIVE]
    assert live == ["decode-0", "hjkmn/decode-0"]
    assert both.answer is not None
    assert len(both.answer[0].routers) == 2
    assert (both.is_settled, both.settles, both.is_certain) == (False, True, True)
    assert former.answer is not None
    assert len(former.answer[0].routers) == 1, "an answer is not changed"
    assert merged({"bcdfg": former}) is former
    silent = merged({"bcdfg": former, "hjkmn": Heard(is_certain=True)})
    assert silent.fleet is not None
    assert silent.fleet.pools["decode"].desired_replicas == 3
    assert merged({}) == Heard(is_certain=True)


def test_a_supervisor_that_is_not_there_is_silent() -> None:
    said = threading.Event()
    watch = FleetWatch(lambda _: said.set())
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    try:
        watch.follow(CLUSTER, OPERATOR, [address])
        assert said.wait(20)
        assert watch.heard(address) == Heard(is_certain=True)
    finally:
        watch.stop()
