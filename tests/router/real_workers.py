"""Routers over real workers: a fake engine, and transfer in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from baton.config.engine import FakeEngineConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.v1 import common_pb2, control_pb2, router_pb2, worker_pb2
from cluster.worker.worker import Worker
from engine.wire import read_spec
from router.door.server import RouterServer
from router.units.router import Router
from router.units.units import Units
from tests.cluster.conftest import ENGINE, engine_tokens
from tests.identities import ROUTER
from tests.link_stub import books_at
from tests.router.answers import Client
from tests.router.callers import Caller, caller_at
from tests.router.deployment import QUICK, Registry, reading

SMALL_VOCABULARY = dataclasses.replace(
    ENGINE, fake=FakeEngineConfig(window=20, vocab_size=257, decode_step_s=0.004)
)
NUM_TOKENS = 60


@dataclass
class Listed:
    """A worker as the registry reports it; `address` may be a proxy's."""

    worker: Worker
    address: str

    def info(self) -> control_pb2.FleetWorker:
        info = control_pb2.WorkerInfo()
        info.CopyFrom(self.worker.info())
        info.address = self.address
        return control_pb2.FleetWorker(info=info, state=control_pb2.WORKER_STATE_LIVE)


def request_of(number: int) -> router_pb2.GenerateRequest:
    prompt = [(number * 31 + position) % 256 for position in range(20 + number)]
    sampling = common_pb2.SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, top_p=1.0
    )
    ids = router_pb2.TokenIds(ids=prompt)
    return router_pb2.GenerateRequest(token_ids=ids, sampling=sampling, seed=7)


async def num_decoded(address: str) -> int:
    """Tokens the worker has sampled since its start, those of prefills for others apart."""
    response = await books_at(address)
    assert not response.problems
    return response.num_later_tokens


@asynccontextmanager
async def router_over(
    *workers: Listed, config: RouterConfig = QUICK
) -> AsyncIterator[tuple[Router, Client]]:
    registry = Registry()
    registry.workers = list(workers)  # type: ignore[arg-type]
    await registry.start()
    read = reading(registry)
    units = Units(config, registry.address, ("fake",), ROUTER, read=read, rng=random.Random(0))
    server = RouterServer(units, config, "127.0.0.1:0")
    await server.start()
    router = await units.main_router()
    client = Client(server.address, server.http_address)
    try:
        await until(lambda: sum(entry.usable for entry in router.fleet) == len(workers))
        yield router, client
    finally:
        await client.channel.close()
        await server.stop(0.0)
        await registry.stop()


@asynccontextmanager
async def asked_at(
    door: str, *workers: Listed, config: RouterConfig
) -> AsyncIterator[tuple[Router, Caller]]:
    """A router, and a client at one of its doors."""
    config = changed(config, http={"port": 0})
    async with router_over(*workers, config=config) as (router, client):
        caller = caller_at(door, client.address, client.http_address)
        try:
            yield router, caller
        finally:
            await caller.close()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():  # noqa: ASYNC110  whatever it is, it has no event
            await asyncio.sleep(0.005)


def alone(number: int) -> list[int]:
    """The tokens that one engine gives for the request without anything in between."""
    request = request_of(number)
    prompt = np.asarray(request.token_ids.ids, dtype="<u4")
    spec = worker_pb2.RequestSpec(
        request_id=str(number),
        token_ids=prompt.tobytes(),
        num_prompt_tokens=len(prompt),
        sampling=request.sampling,
        seed=request.seed,
    )
    quick = dataclasses.replace(SMALL_VOCABULARY, fake=FakeEngineConfig(window=20, vocab_size=257))
    return engine_tokens(quick, read_spec(spec))


SLOW = dataclasses.replace(
    ENGINE,
    fake=FakeEngineConfig(window=20, vocab_size=257, decode_step_s=0.02, prefill_token_s=1e-6),
)
CONFIG = changed(QUICK, clients={"resume_window_s": 0.2})


def named(number: int, resume_from_index: int | None = None) -> router_pb2.GenerateRequest:
    request = request_of(number)
    request.request_id = "named"
    if resume_from_index is not None:
        request.resume_from_index = resume_from_index
    return request
