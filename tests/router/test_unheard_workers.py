"""A stream whose router is lost, and a worker that may keep it but does not answer the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.clock import ManualClock
from baton.config.settings import changed
from baton.fleet import Role, WorkerState
from baton.v1 import control_pb2, router_pb2
from router.fleet.worker_link import Contact
from router.units.router import Router
from tests.cluster.conftest import nothing_held, running_worker
from tests.router.answers import PROMPT, Answer, Client, ask_for, expected
from tests.router.deployment import Deployment, deployment, left_behind
from tests.router.proxy import Proxy
from tests.router.real_workers import (
    CONFIG,
    NUM_TOKENS,
    SLOW,
    Listed,
    alone,
    named,
    router_over,
    until,
)

PATIENT = changed(CONFIG, timeouts={"attach_s": 2.0})


def num_reserves(d: Deployment) -> int:
    return sum(d.worker(name).num_reserves for name in ("d0", "d1"))


async def refused(client: Client, request: router_pb2.GenerateRequest) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"has yet to (answer|report)") as caught:
        await client.ask(request)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@contextlib.asynccontextmanager
async def left_on_a_worker_that_hangs(
    num_hangs: int, **changes: Any
) -> AsyncIterator[tuple[Deployment, Client, router_pb2.GenerateRequest]]:
    """The request is for its first token's successors."""
    async with deployment(decode=2, **changes) as d:
        request = ask_for(PROMPT, request_id="mine")
        second = await d.add_router()
        await d.connected(3, d.routers[1])
        await left_behind(d, 0, "d0", request)
        d.servers.pop(0)
        d.worker("d0").may_decode.set()
        d.worker("d0").faults.hang_attaches = num_hangs
        request.resume_from_index = 1
        yield d, second, request


async def test_a_worker_that_does_not_answer_is_not_one_that_does_not_keep_the_request() -> None:
    async with left_on_a_worker_that_hangs(num_hangs=1) as (d, client, request):
        await refused(client, request)
        answer = await client.ask(request)
        assert answer.ids == expected(PROMPT, 12)[1:]
        assert [routed.attempt for routed in answer.routed] == [1]
        assert num_reserves(d) == 1


async def test_what_a_worker_said_of_a_stream_is_kept_when_its_session_ends_first() -> None:
    async with left_on_a_worker_that_hangs(num_hangs=0) as (d, client, request):
        d.worker("d1").faults.hang_attaches = 1
        d.worker("d0").may_decode.clear()
        asking = asyncio.create_task(client.ask(request))
        await d.until(lambda: d.worker("d0").num_attaches == 1)
        d.worker("d0").drop_sessions()
        await d.until(lambda: d.worker("d0").num_attaches == 2)
        d.worker("d0").may_decode.set()
        answer = await asking
        assert answer.ids == expected(PROMPT, 12)[1:]
        assert [routed.attempt for routed in answer.routed] == [1]
        assert num_reserves(d) == 1


async def test_what_a_worker_keeps_that_the_registry_suspects_is_run_again() -> None:
    async with left_on_a_worker_that_hangs(num_hangs=1) as (d, client, request):
        d.worker("d0").state = control_pb2.WORKER_STATE_SUSPECT
        await d.registry.publish()
        entry = d.entry("d0")
        await d.until(lambda: entry.state is WorkerState.SUSPECT)
        answer = await client.ask(request)
        assert answer.ids == expected(PROMPT, 12)[1:]
        assert [routed.decode_worker for routed in answer.routed] == ["d1"]
        assert num_reserves(d) == 2


async def test_a_stream_waits_at_a_door_that_knows_of_no_units_yet() -> None:
    async with left_on_a_worker_that_hangs(0, timeouts={"attach_s": 0.3}) as left:
        d, _, request = left
        port = int(d.registry.address.rpartition(":")[2])
        await d.registry.stop()
        third = await d.add_router(is_awaited=False, timeouts={"attach_s": 5.0})
        asking = asyncio.create_task(third.ask(request))
        await d.until(lambda: d.servers[-1].units.num_waiting == 1)
        await d.registry.start(port)
        answer = await asking
        assert answer.ids == expected(PROMPT, 12)[1:]
        assert num_reserves(d) == 1


@pytest.mark.parametrize("registered", [[], ["p0", "d1"]], ids=["nobody", "some"])
async def test_nothing_is_run_again_while_the_registry_settles(registered: list[str]) -> None:
    async with left_on_a_worker_that_hangs(0, timeouts={"attach_s": 0.3}) as left:
        d, _, request = left
        everyone = d.registry.workers
        d.registry.workers = [w for w in everyone if w.worker_id in registered]
        d.registry.settles = True
        await d.registry.publish()
        third = await d.add_router(admission={"fleet_wait_s": 10.0})
        router = d.routers[-1]
        await router.links.wait_reported()
        await d.connected(len(registered), router)
        await refused(third, request)
        if registered:
            assert (await third.ask(ask_for(PROMPT))).ids == expected(PROMPT, 12)
        d.registry.workers, d.registry.settles = everyone, False
        await d.registry.publish()
        await d.connected(3, router)
        answer = await third.ask(request)
        assert answer.ids == expected(PROMPT, 12)[1:]
        assert [routed.attempt for routed in answer.routed] == [1]
        assert d.worker("d0").num_reserves == 1


async def test_a_client_that_has_seen_nothing_waits_for_no_worker_that_does_not_answer() -> None:
    async with left_on_a_worker_that_hangs(num_hangs=1) as (d, client, request):
        request.resume_from_index = 0
        assert (await client.ask(request)).ids == expected(PROMPT, 12)
        assert num_reserves(d) > 1  # where it runs already that attempt is stale


async def test_a_worker_whose_sessions_end_as_they_open_is_waited_for_for_so_long_only() -> None:
    async with left_on_a_worker_that_hangs(0, timeouts={"attach_s": 0.3}) as left:
        d, client, request = left
        d.worker("d0").faults.end_sessions = 1 << 30
        d.worker("d0").drop_sessions()
        entry = d.entry("d0")
        await d.until(lambda: not entry.connected)
        await refused(client, request)
        answer = None
        async with asyncio.timeout(5.0):
            while answer is None:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await client.ask(request)
        assert answer.ids == expected(PROMPT, 12)[1:]
        assert [routed.decode_worker for routed in answer.routed] == ["d1"]
        assert num_reserves(d) == 2


# --- over real workers: a worker that only this router does not reach -----------------------------


class Cut:
    """Own a stream's remains on one of two decode workers, to which the next router has lost its
    connection."""

    def __init__(self, router: Router, client: Client, seen: Answer, way: Proxy) -> None:
        self.router, self.client, self.seen, self.way = router, client, seen, way
        self.request = named(1)
        self.request.resume_from_index = len(seen.ids)

    @property
    def is_whole(self) -> bool:
        return sum(entry.usable for entry in self.router.fleet) == 3


@contextlib.asynccontextmanager
async def cut_off_from_its_worker() -> AsyncIterator[Cut]:
    async with (
        running_worker("p0", Role.PREFILL, SLOW) as prefill,
        running_worker("d0", Role.DECODE, SLOW) as first,
        running_worker("d1", Role.DECODE, SLOW) as second,
    ):
        workers = {"p0": prefill, "d0": first, "d1": second}
        listed = [Listed(worker, worker.address) for worker in workers.values()]
        ways = {name: await Proxy.to(workers[name].address) for name in ("d0", "d1")}
        behind = [listed[0], *(Listed(workers[name], way.address) for name, way in ways.items())]
        try:
            async with router_over(*behind, config=PATIENT) as (router, client):
                async with router_over(*listed, config=PATIENT) as (lost, former):
                    asking = asyncio.create_task(former.ask(named(1)))
                    runs = lost.runs
                    await until(lambda: any(len(run.log.ids) > 3 for run in runs))
                    (run,) = runs
                    seen = Answer(0, list(run.log.ids[:3]))
                    (name,) = (n for n in ways if workers[n].decode.runs)  # type: ignore[union-attr]
                    await lost.close()
                    with pytest.raises(grpc.aio.AioRpcError):
                        await asking
                ways[name].freeze()
                ways[name].cut()
                cut = Cut(router, client, seen, ways[name])
                await until(lambda: not cut.is_whole)
                yield cut
        finally:
            for way in ways.values():
                await way.close()
        await nothing_held(*workers.values())
        later = [(await each.integrity()).num_later_tokens for each in (first, second)]
        assert sorted(later)[1] == NUM_TOKENS - 1, later


async def test_a_stream_waits_for_the_worker_that_keeps_it_to_be_reached_again() -> None:
    async with cut_off_from_its_worker() as cut:
        await refused(cut.client, cut.request)
        cut.way.thaw()
        await until(lambda: cut.is_whole)
        answer = await cut.client.ask(cut.request)
        assert cut.seen.ids + answer.ids == alone(1)
        assert [routed.attempt for routed in answer.routed] == [1]
        assert not answer.migrated


async def test_a_stream_goes_on_elsewhere_where_its_worker_is_not_reached_for_long() -> None:
    async with cut_off_from_its_worker() as cut:
        await refused(cut.client, cut.request)
        answer = None
        async with asyncio.timeout(8.0):
            while answer is None:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await cut.client.ask(cut.request)
        assert cut.seen.ids + answer.ids == alone(1)
        assert not cut.is_whole
        cut.way.thaw()


PATIENCE_S = 6.0


def test_a_worker_is_waited_for_while_it_is_connected_and_for_a_while_after() -> None:
    clock = ManualClock(100.0)
    contact = Contact(PATIENCE_S, clock.now_s)
    assert contact.may_be_heard
    contact.begin()
    clock.advance(100.0)
    assert contact.may_be_heard
    contact.end()
    clock.advance(5.9)
    assert contact.may_be_heard
    clock.advance(0.2)
    assert not contact.may_be_heard


def test_connections_that_end_as_they_begin_make_nobody_wait_longer() -> None:
    clock = ManualClock(100.0)
    contact = Contact(PATIENCE_S, clock.now_s)
    contact.begin()
    clock.advance(100.0)
    contact.end()
    waited_s = 0.0
    while contact.may_be_heard:
        clock.advance(0.5)
        waited_s += 0.5
        contact.begin()
        contact.end()
        assert waited_s < 2 * PATIENCE_S
    contact.begin()
    assert not contact.may_be_heard
    clock.advance(1.0)
    assert contact.may_be_heard, "this one lasts"


def test_a_worker_that_comes_back_after_long_is_waited_for_again() -> None:
    clock = ManualClock(100.0)
    contact = Contact(PATIENCE_S, clock.now_s)
    for lasted_s in (100.0, 0.0):
        contact.begin()
        clock.advance(lasted_s)
        contact.end()
        clock.advance(10.0)
        assert not contact.may_be_heard
    contact.begin()
    assert contact.may_be_heard
    contact.end()
    clock.advance(3.0)
    contact.begin()
    contact.end()
    assert contact.may_be_heard
    clock.advance(3.0)
    assert not contact.may_be_heard
