"""The control service over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from baton.v1 import common_pb2, control_pb2, control_pb2_grpc, worker_pb2
from cluster.config import RegistryConfig
from cluster.control_service import Changes, serve
from cluster.registration import Beat, Registrar
from cluster.registry import Registry, Role

LIVE = control_pb2.WORKER_STATE_LIVE


def make_registry() -> Registry:
    registry = Registry(RegistryConfig(), time.monotonic)
    registry.add_pool("decode", Role.DECODE, 1)
    return registry


def worker_info(incarnation: int = 1) -> control_pb2.WorkerInfo:
    return control_pb2.WorkerInfo(
        ref=common_pb2.WorkerRef(worker_id="decode-0", incarnation=incarnation),
        pool="decode",
        role=common_pb2.WORKER_ROLE_DECODE,
        address="127.0.0.1:1",
    )


def beat() -> Beat:
    return Beat(control_pb2.StepProgress(num_steps=3), worker_pb2.WorkerLoad(num_running=2), False)


@contextlib.asynccontextmanager
async def registered(address: str, drained: asyncio.Event) -> AsyncIterator[None]:
    registrar = Registrar(address, worker_info(), beat, drained.set, interval_s=0.05)
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


async def test_a_registered_worker_is_seen_live_with_its_load_and_suspect_once_cut_off() -> None:
    async with (
        serve(make_registry(), Changes(), "127.0.0.1:0") as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlServiceStub(channel)
        async with registered(address, asyncio.Event()):
            fleet = await fleet_where(stub, LIVE)
            assert fleet.workers[0].load.num_running == 2
            assert fleet.pools[0].live_replicas == 1
        await fleet_where(stub, control_pb2.WORKER_STATE_SUSPECT)


async def test_a_drain_asked_of_the_registry_reaches_the_worker() -> None:
    async with (
        serve(make_registry(), Changes(), "127.0.0.1:0") as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlServiceStub(channel)
        drained = asyncio.Event()
        async with registered(address, drained):
            await fleet_where(stub, LIVE)
            await stub.Drain(control_pb2.ControlServiceDrainRequest(worker_id="decode-0"))
            await asyncio.wait_for(drained.wait(), 5)


async def test_a_registry_that_comes_back_empty_is_rebuilt_from_its_workers() -> None:
    async with serve(make_registry(), Changes(), "127.0.0.1:0") as address:
        pass
    async with registered(address, asyncio.Event()):
        async with (
            serve(make_registry(), Changes(), address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            await fleet_where(control_pb2_grpc.ControlServiceStub(channel), LIVE)
        async with (
            serve(make_registry(), Changes(), address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            await fleet_where(control_pb2_grpc.ControlServiceStub(channel), LIVE)


async def test_scaling_an_unknown_pool_names_the_pools_there_are() -> None:
    async with (
        serve(make_registry(), Changes(), "127.0.0.1:0") as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlServiceStub(channel)
        response = await stub.SetReplicas(control_pb2.SetReplicasRequest(pool="decode", replicas=4))
        assert response.previous_replicas == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetReplicas(control_pb2.SetReplicasRequest(pool="decod", replicas=4))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "there are: decode" in str(caught.value.details())
