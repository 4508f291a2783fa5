"""What a worker's heartbeats say of a step under way, and what the registry makes of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import grpc.aio
import pytest

from baton.config.engine import FakeEngineConfig
from baton.config.workers import RegistryConfig
from baton.control.calls import control_stub
from baton.fleet import Role
from baton.v1 import control_pb2
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from cluster.worker.worker import Worker
from engine.loop import EngineThread
from tests.cluster.conftest import (
    ENGINE,
    DecodeLink,
    HeldStep,
    MiniRouter,
    make_spec,
    running_worker,
    until,
)
from tests.cluster.pool_settings import settings_of
from tests.identities import OPERATOR, WORKER

LIVE = control_pb2.WORKER_STATE_LIVE
SUSPECT = control_pb2.WORKER_STATE_SUSPECT

TIMED = replace(
    ENGINE,
    fake=FakeEngineConfig(
        window=20, vocab_size=50_000, prefill_token_s=0.0001, decode_step_s=0.0001
    ),
)
HUNG_S = 60.0
"""Longer than any measured step's patience, shorter than `first_step_s`."""


def hung(worker: Worker) -> control_pb2.StepProgress:
    """The worker's next heartbeat, had its step lasted for so long by then."""
    progress = worker._beat().progress  # what the registrar would send
    assert progress.runnable
    progress.idle_s = HUNG_S
    return progress


async def state_told(progress: control_pb2.StepProgress) -> control_pb2.WorkerState.ValueType:
    """What becomes of a worker that says this, by the registry's own service."""
    registry = Registry(RegistryConfig(), time.monotonic)
    registry.pools.add(settings_of(), 1)
    message = control_pb2.RegisterRequest(progress=progress)
    message.worker.ref.worker_id = "decode-0"
    async with (
        asyncio.timeout(10),
        serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = control_stub(channel, WORKER)
        call = stub.Register()
        await call.write(message)
        async for fleet in stub.WatchFleet(control_pb2.WatchFleetRequest()):
            states = [worker.state for worker in fleet.workers]
            if states and states[0] != control_pb2.WORKER_STATE_STARTING:
                call.cancel()
                return states[0]
    raise AssertionError("the stream ended")


async def test_work_never_done_before_is_not_hung_and_work_that_was_is_found_hung() -> None:
    async with (
        running_worker("prefill-0", Role.PREFILL, TIMED) as prefill,
        running_worker("decode-0", Role.DECODE, TIMED) as decode,
    ):
        link = await DecodeLink(decode.address, "router-a").open()
        router = MiniRouter(prefill.address, link)

        # A prefill worker's first prompt: steps that only opened handoffs came before it.
        step = HeldStep(prefill)
        generated = asyncio.create_task(router.generate(make_spec("a"), prefill.info().ref))
        await until(step.begun.is_set)
        assert await state_told(hung(prefill)) == LIVE
        step.go_on.set()
        await generated

        # A decode worker's first prompt of its own: all that it has done so far is to decode.
        for request_id, reported in (("b", LIVE), ("c", SUSPECT)):
            step, heard = HeldStep(decode), link.of(request_id)
            await link.reserve(make_spec(request_id))
            await until(step.begun.is_set)
            assert decode.engine.num_steps > 0
            assert await state_told(hung(decode)) == reported
            step.go_on.set()
            await link.until(partial(getattr, heard, "finished"))
        await router.close()
        await link.close()


async def test_an_idle_engine_that_is_woken_while_it_is_looked_at_is_not_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = RegistryConfig(first_step_s=HUNG_S / 2)
    async with running_worker("prefill-0", Role.PREFILL, registry=judge) as worker:
        await until(lambda: not worker.engine.runnable)
        with monkeypatch.context() as patched:

            def idle_until_now(engine: EngineThread) -> float:
                patched.setattr(engine, "_runnable", True)
                return time.monotonic() - HUNG_S

            patched.setattr(EngineThread, "last_step_at", property(idle_until_now))
            assert worker.engine_is_well()
