"""Two routers that live, over the same real workers, and one request id."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.fleet import Role
from baton.v1 import common_pb2, router_pb2
from decode_worker.session import Phase
from router.request.machine import Prefill
from router.units.router import Router
from tests.cluster.conftest import HeldStep, nothing_held, running_worker
from tests.router.answers import failures_of, refusal
from tests.router.callers import DOORS, Caller, HttpAnswer, LostError
from tests.router.deployment import attempts, default_model
from tests.router.proxy import Proxy
from tests.router.real_workers import (
    CONFIG,
    NUM_TOKENS,
    SLOW,
    Listed,
    alone,
    asked_at,
    named,
    num_decoded,
    request_of,
    router_over,
    until,
)

PATIENT = changed(CONFIG, clients={"resume_window_s": 30.0}, timeouts={"attach_s": 10.0})


BOTH_DOORS = pytest.mark.parametrize("door", ["grpc", pytest.param("http", marks=pytest.mark.full)])


@asynccontextmanager
async def two_routers(
    listed: list[Listed], config: RouterConfig = PATIENT, door: str = "grpc"
) -> AsyncIterator[tuple[tuple[Router, Any], tuple[Router, Any]]]:
    async with (
        asked_at(door, *listed, config=config) as first,
        asked_at(door, *listed, config=config) as second,
    ):
        yield first, second


@pytest.fixture
async def listed() -> AsyncIterator[list[Listed]]:
    async with (
        running_worker("p0", Role.PREFILL, SLOW) as prefill,
        running_worker("d0", Role.DECODE, SLOW) as decode,
    ):
        yield [Listed(prefill, prefill.address), Listed(decode, decode.address)]
        await nothing_held(prefill, decode)


async def refused_as_moved(former: asyncio.Task[Any]) -> None:
    with pytest.raises(LostError, match="another router"):
        await former


def assert_first_attempt(answer: Any) -> None:
    """HTTP does not tell."""
    assert isinstance(answer, HttpAnswer) or [r.attempt for r in answer.routed] == [1]


@pytest.mark.parametrize("door", DOORS)
async def test_a_router_that_lost_its_client_does_not_end_the_stream_at_the_next(
    listed: list[Listed], door: str
) -> None:
    worker = listed[1].address
    async with two_routers(listed, CONFIG, door) as ((router_a, client_a), (router_b, client_b)):
        await client_a.ask(request_of(1))  # its prompt is cached from now on
        steps = await num_decoded(worker)
        seen = await client_a.ask(named(1), lambda answer: answer.num_tokens >= 6)
        assert 6 <= seen.num_tokens < NUM_TOKENS
        whole = await client_b.come_again(named(1), seen)
        whole.assert_says(default_model(), alone(1))
        assert whole.num_cached_tokens > 0
        assert await num_decoded(worker) - steps == NUM_TOKENS - 1
        await until(lambda: router_a.fleet.num_bookings == 0)
        for router in (router_a, router_b):
            failures = failures_of(router).keys()
            assert failures <= {"MOVED"}


@pytest.mark.parametrize("door", DOORS)
async def test_a_router_whose_request_was_attached_while_it_is_prefilled_sees_the_handoff_through(
    listed: list[Listed], door: str
) -> None:
    step = HeldStep(listed[0].worker)
    async with two_routers(listed, door=door) as ((_, client_a), (router_b, client_b)):
        former = asyncio.create_task(client_a.ask(named(1)))
        await asyncio.to_thread(step.begun.wait, 10)
        latter = asyncio.create_task(client_b.ask(named(1, 0)))
        await until(lambda: router_b.fleet.num_bookings == 1)
        assert not former.done()
        step.go_on.set()
        await refused_as_moved(former)
        answer = await latter
        answer.assert_says(default_model(), alone(1))
        assert isinstance(answer, HttpAnswer) or not answer.migrated
        assert not failures_of(router_b)


@BOTH_DOORS
@pytest.mark.parametrize("is_aborted", [False, True])
async def test_a_router_that_closes_leaves_the_prefill_to_the_one_that_asked_for_it_since(
    listed: list[Listed], is_aborted: bool, door: str
) -> None:
    step = HeldStep(listed[0].worker)
    async with two_routers(listed, door=door) as ((router_a, client_a), (router_b, client_b)):
        former = asyncio.create_task(client_a.ask(named(1)))
        await asyncio.to_thread(step.begun.wait, 10)
        latter = asyncio.create_task(client_b.ask(named(1, 0)))
        await until(lambda: has_asked_its_writer(router_b))
        await router_a.close()
        with pytest.raises(LostError):
            await former
        if is_aborted:
            router_b.abort("", "named")
        step.go_on.set()
        answer = await latter
        assert_first_attempt(answer)
        assert not failures_of(router_b)
        if is_aborted:
            assert answer.reason in (common_pb2.FINISH_REASON_ABORTED, "abort")
            assert answer.num_tokens == 0
        else:
            answer.assert_says(default_model(), alone(1))
        assert is_aborted or (await listed[0].worker.integrity()).num_first_tokens == 1


def has_asked_its_writer(router: Router) -> bool:
    return any(state.prefill is Prefill.TAKEN for state in attempts(router))


@BOTH_DOORS
@pytest.mark.parametrize("is_first_gone", [False, True])
async def test_a_router_that_attaches_before_a_lease_was_sent_has_the_prompt_computed_itself(
    listed: list[Listed], is_first_gone: bool, door: str
) -> None:
    """Where the first router is gone nobody knows of it, and the second comes after the lease."""
    prefill, decode = (one.worker for one in listed)
    assert decode.decode is not None
    hold = threading.Event()
    async with two_routers(listed, door=door) as ((router_a, client_a), (router_b, client_b)):
        decode.engine.post(lambda _: hold.wait(30))
        former = asyncio.create_task(client_a.ask(named(1)))
        runs = decode.decode.runs
        await until(lambda: len(runs) == 1)
        if is_first_gone:
            await router_a.close()
            await until(lambda: runs.num_orphans() == 1)
            hold.set()
            await until(lambda: all(run.phase is Phase.LEASED for run in runs))
        latter = asyncio.create_task(client_b.ask(named(1, 0)))
        if not is_first_gone:
            await until(lambda: router_b.fleet.num_bookings == 1)
            hold.set()
        with pytest.raises(LostError):
            await former
        answer = await latter
        answer.assert_says(default_model(), alone(1))
        assert_first_attempt(answer)
        assert not failures_of(router_b)
        assert (await prefill.integrity()).num_first_tokens == 1
        assert (await decode.integrity()).num_later_tokens == NUM_TOKENS - 1


@BOTH_DOORS
async def test_a_prompt_that_its_writer_lost_is_given_up_by_the_router_that_asked_for_it_last(
    listed: list[Listed], door: str
) -> None:
    hasty = changed(PATIENT, timeouts={"first_token_s": 0.3})
    prefill, decode = (one.worker for one in listed)
    assert decode.decode is not None
    hold_decode, hold_prefill = threading.Event(), threading.Event()
    async with two_routers(listed, hasty, door) as ((router_a, client_a), (router_b, client_b)):
        decode.engine.post(lambda _: hold_decode.wait(30))
        former = asyncio.create_task(client_a.ask(named(1)))
        runs = decode.decode.runs
        await until(lambda: len(runs) == 1)
        await router_a.close()
        with pytest.raises(LostError):
            await former
        prefill.engine.post(lambda _: hold_prefill.wait(30))
        hold_decode.set()
        latter = asyncio.create_task(client_b.ask(named(1, 0)))
        await until(lambda: bool(failures_of(router_b)))
        hold_prefill.set()
        (await latter).assert_says(default_model(), alone(1))


async def test_a_first_token_that_ends_a_request_that_has_moved_ends_it_at_the_router_of_now(
    listed: list[Listed],
) -> None:
    step = HeldStep(listed[0].worker)
    request = named(1)
    request.sampling.max_tokens = 1
    async with (
        router_over(*listed, config=PATIENT) as (_, client_a),
        router_over(*listed, config=PATIENT) as (router_b, client_b),
        router_over(*listed, config=PATIENT) as (_, client_c),
    ):
        former = asyncio.create_task(client_a.ask(request))
        await asyncio.to_thread(step.begun.wait, 10)
        request.resume_from_index = 0
        latter = asyncio.create_task(client_b.ask(request))
        await until(lambda: router_b.fleet.num_bookings == 1)
        step.go_on.set()
        later = client_c.ask(request)  # after the end, where it is not known
        for answer in (await former, await latter, await later):
            assert answer.ids == alone(1)[:1]
            assert [routed.attempt for routed in answer.routed] == [1]
            assert answer.reason == common_pb2.FINISH_REASON_LENGTH
        assert not failures_of(router_b)
        assert (await listed[0].worker.integrity()).num_first_tokens == 1
        assert (await listed[1].worker.integrity()).num_later_tokens == 0


@dataclasses.dataclass
class Parted:
    """Two routers over the same workers; `cut_off` is the first one's way to the decode worker."""

    first: Caller
    router: Router
    second: Caller
    second_router: Router
    cut_off: Proxy


@asynccontextmanager
async def parted(listed: list[Listed], door: str) -> AsyncIterator[Parted]:
    patient = changed(PATIENT, timeouts={"reattach_s": 10.0}, links={"keepalive_s": 30.0})
    proxy = await Proxy.to(listed[1].address)
    behind = [listed[0], Listed(listed[1].worker, proxy.address)]
    try:
        async with (
            asked_at(door, *behind, config=patient) as (router_a, client_a),
            asked_at(door, *listed, config=patient) as (router_b, client_b),
        ):
            yield Parted(client_a, router_a, client_b, router_b, proxy)
    finally:
        await proxy.close()


@BOTH_DOORS
@pytest.mark.parametrize("is_prefilling", [False, True])
async def test_a_router_whose_session_was_gone_does_not_take_back_what_another_attached(
    listed: list[Listed], is_prefilling: bool, door: str
) -> None:
    """Nobody could report the move to it. The prefill that it began is needed all the same."""
    prefill, decode = (one.worker for one in listed)
    assert decode.decode is not None
    runs = decode.decode.runs
    step = HeldStep(prefill) if is_prefilling else None
    async with parted(listed, door) as two:
        former = asyncio.create_task(two.first.ask(named(1)))
        if step is not None:
            await asyncio.to_thread(step.begun.wait, 10)
        else:
            await until(lambda: any(len(r.log.ids) > 3 for r in two.router.runs))
        two.cut_off.freeze()
        two.cut_off.cut()
        await until(lambda: runs.num_orphans() == 1)
        latter = asyncio.create_task(two.second.ask(named(1, 0)))
        await until(lambda: runs.num_orphans() == 0)
        two.cut_off.thaw()
        if step is not None:
            try:
                await until(lambda: any(state.has_moved for state in attempts(two.router)))
            finally:
                step.go_on.set()
        await refused_as_moved(former)
        answer = await latter
        answer.assert_says(default_model(), alone(1))
        assert_first_attempt(answer)
        assert not failures_of(two.second_router)
        assert (await prefill.integrity()).num_first_tokens == 1
        assert (await decode.integrity()).num_later_tokens == NUM_TOKENS - 1


async def test_an_abort_reaches_a_request_that_another_router_follows(
    listed: list[Listed],
) -> None:
    async with two_routers(listed, CONFIG) as ((router_a, client_a), (_, client_b)):
        with pytest.raises(grpc.aio.AioRpcError, match="no request 'unheard' runs here"):
            await client_b.client.stub.Abort(router_pb2.AbortRequest(request_id="unheard"))
        asking = asyncio.create_task(client_a.ask(named(1)))
        await until(lambda: any(len(run.log.ids) > 1 for run in router_a.runs))
        await client_b.client.stub.Abort(router_pb2.AbortRequest(request_id="named"))
        answer = await asking
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        assert answer.ids == alone(1)[: len(answer.ids)]
        assert len(answer.routed) == 1
        assert not failures_of(router_a)


@pytest.mark.parametrize("tenant", ["", "of/a tenant"])
async def test_an_abort_reaches_a_request_that_waits_at_another_router(
    listed: list[Listed], tenant: str
) -> None:
    config = changed(CONFIG, admission={"fleet_wait_s": 20.0})
    async with two_routers(listed, config) as ((_, client_a), (router_b, client_b)):
        for entry in router_b.fleet:
            router_b.fleet.hold(entry, 60.0)
        request = named(1)
        request.tenant = tenant
        asking = asyncio.create_task(client_b.ask(request))
        await until(lambda: len(router_b.admission) == 1)
        abort = router_pb2.AbortRequest(request_id="named", tenant=tenant)
        await client_a.client.stub.Abort(abort)
        answer = await asking
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        assert not answer.ids
        with pytest.raises(grpc.aio.AioRpcError, match="no request 'named' runs here"):
            await client_a.client.stub.Abort(
                router_pb2.AbortRequest(request_id="named", tenant=tenant)
            )


async def test_an_id_that_another_router_runs_with_another_body_is_taken_until_it_is_aborted(
    listed: list[Listed],
) -> None:
    async with two_routers(listed, CONFIG) as ((_, client_a), (router_b, client_b)):
        seen = await client_a.ask(named(1), lambda answer: answer.num_tokens >= 6)
        assert seen.num_tokens < NUM_TOKENS
        error = await refusal(client_b.client, named(2))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        await client_a.client.stub.Abort(router_pb2.AbortRequest(request_id="named"))
        decode = listed[1].worker.decode
        await until(lambda: decode.is_idle)
        answer = await client_b.ask(named(2))
        assert answer.ids == alone(2)
        assert not answer.migrated
        assert failures_of(router_b).keys() == {"TAKEN", "STALE"}
