"""The control service over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from baton.config.workers import RegistryConfig
from baton.control.calls import control_stub
from baton.control.client import ControlClient
from baton.errors import DeadlineError, InvalidRequestError, OtherModelError
from baton.identity.keys import ROLES
from baton.status import from_rpc_error
from baton.v1 import common_pb2, control_pb2, control_pb2_grpc, worker_pb2
from cluster.registry.control_access import CALLERS
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from cluster.registry.routers import Unit, UnitList
from cluster.worker.reports import Registrar
from tests.cluster.pool_settings import settings_of
from tests.identities import OPERATOR, WORKER, identity
from tests.router.proxy import Proxy

LIVE = control_pb2.WORKER_STATE_LIVE
DRAINING = control_pb2.WORKER_STATE_DRAINING

Call = grpc.aio.StreamStreamCall[control_pb2.RegisterRequest, control_pb2.RegisterResponse]


PATIENT = RegistryConfig(silent_after_s=60.0, gone_after_s=120.0)
"""Workers here speak once: however slow the machine is, none gets silent within a test."""


def make_registry(config: RegistryConfig = PATIENT) -> Registry:
    registry = Registry(config, time.monotonic)
    registry.pools.add(settings_of(max_replicas=4), 1)
    return registry


@contextlib.asynccontextmanager
async def served(
    registry: Registry | None = None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[str, control_pb2_grpc.ControlServiceAsyncStub]]:
    async with (
        serve(registry or make_registry(), Changes(), listen, OPERATOR) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield address, everyones(channel)


def everyones(channel: grpc.aio.Channel) -> Any:
    """A stub that makes each call as who may."""
    stubs = {role: control_stub(channel, identity(role)) for role in ROLES}
    calls = {name: getattr(stubs[min(callers)], name) for name, callers in CALLERS.items()}
    return SimpleNamespace(**calls)


def worker_info(
    worker_id: str = "decode-0",
    role: common_pb2.WorkerRole.ValueType = common_pb2.WORKER_ROLE_DECODE,
    kv_fingerprint: bytes = b"",
    model_fingerprint: bytes = b"",
) -> control_pb2.WorkerInfo:
    return control_pb2.WorkerInfo(
        ref=common_pb2.WorkerRef(worker_id=worker_id, incarnation=1),
        pool="decode",
        role=role,
        address="127.0.0.1:1",
        kv_fingerprint=kv_fingerprint,
        model_fingerprint=model_fingerprint,
    )


def beat() -> control_pb2.RegisterRequest:
    return control_pb2.RegisterRequest(
        progress=control_pb2.StepProgress(num_steps=3), load=worker_pb2.WorkerLoad(num_running=2)
    )


@contextlib.asynccontextmanager
async def registered(
    address: str, drained: asyncio.Event, info: control_pb2.WorkerInfo | None = None
) -> AsyncIterator[None]:
    registrar = Registrar(address, info or worker_info(), beat, drained.set, WORKER, 0.05)
    task = asyncio.create_task(registrar.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def fleet_where(
    stub: control_pb2_grpc.ControlServiceAsyncStub, state: control_pb2.WorkerState.ValueType
) -> control_pb2.WatchFleetResponse:
    async with asyncio.timeout(10):
        async for fleet in stub.WatchFleet(control_pb2.WatchFleetRequest()):
            if [w.state for w in fleet.workers] == [state]:
                return fleet
    raise AssertionError("the stream ended")


async def registering(
    stub: control_pb2_grpc.ControlServiceAsyncStub, *, draining: bool = False
) -> Call:
    """A Register call on which the registry has heard the worker's first message."""
    call = stub.Register()
    number = random.getrandbits(31)  # shown with the fleet, and so tells that it was heard
    message = control_pb2.RegisterRequest(
        worker=worker_info(),
        progress=control_pb2.StepProgress(num_steps=3),
        load=worker_pb2.WorkerLoad(num_running=number),
        draining=draining,
    )
    await call.write(message)
    async with asyncio.timeout(10):
        async for fleet in stub.WatchFleet(control_pb2.WatchFleetRequest()):
            if [w.load.num_running for w in fleet.workers] == [number]:
                return call
    raise AssertionError("the stream ended")


async def states_of_next_messages(
    stub: control_pb2_grpc.ControlServiceAsyncStub, count: int
) -> set[control_pb2.WorkerState.ValueType]:
    """One comes about every second, and one on every change."""
    watch = stub.WatchFleet(control_pb2.WatchFleetRequest())
    async with asyncio.timeout(10):
        seen = {(await watch.read()).workers[0].state for _ in range(count)}
    watch.cancel()
    return seen


async def test_a_second_stream_of_a_worker_ends_the_first_and_its_own_end_changes_nothing() -> None:
    async with served() as (_, stub):
        former = await registering(stub, draining=True)
        latter = await registering(stub)  # which says nothing of a drain
        assert await asyncio.wait_for(former.read(), 10) is grpc.aio.EOF
        latter.cancel()
        assert await states_of_next_messages(stub, 2) == {DRAINING}


async def test_a_registered_worker_is_seen_live_with_its_load_and_suspect_once_cut_off() -> None:
    async with served(make_registry(RegistryConfig())) as (address, stub):
        async with registered(address, asyncio.Event()):
            fleet = await fleet_where(stub, LIVE)
            assert fleet.workers[0].load.num_running == 2
            assert fleet.pools[0].live_replicas == 1
        await fleet_where(stub, control_pb2.WORKER_STATE_SUSPECT)


async def live(stub: control_pb2_grpc.ControlServiceAsyncStub, count: int) -> None:
    """Until so many workers are, two messages in a row: the registry has looked in between."""
    seen = 0
    async for fleet in stub.WatchFleet(control_pb2.WatchFleetRequest()):
        seen = seen + 1 if [w.state for w in fleet.workers] == [LIVE] * count else 0
        if seen == 2:
            return


async def test_a_worker_that_no_partner_shares_a_fingerprint_with_is_live_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill = worker_info("prefill-0", common_pb2.WORKER_ROLE_PREFILL, b"one")
    sound, odd = worker_info("decode-0", kv_fingerprint=b"one"), worker_info("decode-1")
    quick = dataclasses.replace(RegistryConfig(), silent_after_s=0.3)
    never = asyncio.Event()
    async with (
        served(Registry(quick, time.monotonic)) as (address, stub),
        registered(address, never, prefill),
        registered(address, never, sound),
        asyncio.timeout(10),
    ):
        await live(stub, 2)
        async with registered(address, never, odd):
            await live(stub, 3)
    reported = [r.getMessage() for r in caplog.records if "pairs with none" in r.getMessage()]
    assert reported == [
        "decode-1 has another KV fingerprint than every prefill worker (prefill-0): it pairs with "
        "none; engine.dtype and engine.block_size must be the same in all pools"
    ]


async def test_a_worker_of_another_model_is_refused_by_name_and_gives_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    never = asyncio.Event()
    async with (
        served() as (address, stub),
        registered(address, never, worker_info(model_fingerprint=b"one")),
    ):
        assert (await fleet_where(stub, LIVE)).model_fingerprint == b"one"
        other = worker_info("decode-1", model_fingerprint=b"other")
        refused = Registrar(address, other, beat, never.set, WORKER, 0.05)
        with pytest.raises(
            OtherModelError, match=r"^worker decode-1 loaded .*models/demo"
        ) as caught:
            await asyncio.wait_for(refused.run(), 10)
        fleet = await fleet_where(stub, LIVE)
        assert [worker.info.ref.worker_id for worker in fleet.workers] == ["decode-0"]
    code = cast(grpc.aio.AioRpcError, caught.value.__cause__).code()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.message.endswith(
        "Pin `model_revision`, set one engine.quantization for all pools, or start a new cluster "
        "for another model"
    )
    assert caught.value.message in caplog.messages  # the registry's own log


async def test_a_call_that_never_says_who_registers_is_ended_by_a_typed_error() -> None:
    registry = Registry(RegistryConfig(register_within_s=0.2), time.monotonic)
    async with served(registry) as (_, stub):
        call = stub.Register()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10)
        error = from_rpc_error(caught.value)
        assert isinstance(error, DeadlineError)
        assert error.message == "no first message within 0.2 s"


async def test_a_drain_asked_of_the_registry_reaches_the_worker() -> None:
    async with served() as (address, stub):
        drained = asyncio.Event()
        async with registered(address, drained):
            await fleet_where(stub, LIVE)
            await stub.Drain(control_pb2.ControlServiceDrainRequest(worker_id="decode-0"))
            await asyncio.wait_for(drained.wait(), 5)


async def test_a_registry_that_comes_back_empty_is_rebuilt_from_its_workers() -> None:
    async with served() as (address, _):
        pass
    async with registered(address, asyncio.Event()):
        for _ in range(2):
            async with served(listen=address) as (_, stub):
                await fleet_where(stub, LIVE)


@pytest.mark.full
async def test_a_registry_whose_host_falls_silent_is_given_up_within_twice_the_keepalive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as (address, stub):
        proxy = await Proxy.to(address)
        async with registered(proxy.address, asyncio.Event()):
            await fleet_where(stub, LIVE)
            proxy.freeze()
            async with asyncio.timeout(2 * 5.0 + 5.0):
                while True:
                    if f"registry at {proxy.address}: UNAVAILABLE" in caplog.text:
                        break
                    await asyncio.sleep(0.1)
        await proxy.close()


async def test_a_drain_of_an_unknown_worker_is_refused_however_long_its_name() -> None:
    async with served() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Drain(control_pb2.ControlServiceDrainRequest(worker_id="d" * 20_000))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# --- units ----------------------------------------------------------------------------------------


def unit(code: str, share: float, address: str = "") -> control_pb2.Unit:
    return control_pb2.Unit(code=code, control_address=address, share=share)


async def test_the_units_are_sent_on_every_change_and_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.registry.control_service.UNITS_EVERY_S", 0.3)
    registry = Registry(PATIENT, time.monotonic, units=UnitList(Unit("a")))
    async with served(registry) as (address, stub):
        watch = stub.WatchUnits(control_pb2.WatchUnitsRequest(), timeout=20)
        messages = aiter(watch)
        assert list((await anext(messages)).units) == [unit("a", 1.0)]
        both = [unit("a", 0.75), unit("b", 0.25, "elsewhere:1")]
        with ControlClient(address) as client:
            await asyncio.to_thread(client.set_units, both)
        while list((reported := await anext(messages)).units) != both:
            assert list(reported.units) == [unit("a", 1.0)]
        assert list((await anext(messages)).units) == both
        watch.cancel()


@pytest.mark.parametrize(
    ("units", "field"),
    [
        ([], "units"),
        ([unit(code, 0.0) for code in "ab"] + [unit("c", 1.0)], "units"),
        ([unit("a", 0.5), unit("a", 0.5)], "units[1].code"),
        ([unit("a", 1.5), unit("b", -0.5)], "units[0].share"),
        ([unit("a", float("nan"))], "units[0].share"),
        ([unit("a", 1.0), unit("b", float("inf"))], "units[1].share"),
        ([unit("a", 0.5), unit("b", 0.49)], "units"),
    ],
)
async def test_units_that_cannot_be_are_refused_by_their_field(
    units: list[control_pb2.Unit], field: str
) -> None:
    registry = Registry(PATIENT, time.monotonic, units=UnitList(Unit("a")))
    async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as address:
        with ControlClient(address) as client:
            with pytest.raises(InvalidRequestError) as refused:
                await asyncio.to_thread(client.set_units, units)
            assert refused.value.field == field
            await asyncio.to_thread(client.set_units, [unit("a", 0.5), unit("b", 0.5 + 1e-7)])
    assert [each.code for each in registry.units.all] == ["a", "b"]
