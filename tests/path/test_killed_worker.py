"""A decode worker is killed under its streams: they go on where blocks have another size, with the
tokens of transformers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from baton.client import AsyncClient
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.v1.router_pb2 import Routed
from router.door.server import RouterServer
from router.units.router import Router
from router.units.units import Units
from tests.cluster.fleet_processes import Fleet, started
from tests.engine.checkpoints import VOCAB
from tests.engine.driving import random_prompt
from tests.identities import ROUTER
from tests.path.oracles import greedy_tokens
from tests.path.whole_path import Answer, Shape, ask, name_of
from tests.router.callers import HttpCaller

FAMILY = "llama"
BLOCK_SIZES = {"small": 16, "large": 32}
NUM_REQUESTS = 16
NUM_TOKENS = 96
KILLED = "decode-small-0"


@contextlib.asynccontextmanager
async def two_block_sizes(
    folder: Path,
) -> AsyncIterator[tuple[Fleet, Router, tuple[AsyncClient, HttpCaller]]]:
    """A prefill and a decode worker of each, and a router before them with its two doors."""
    shape = Shape(FAMILY)
    shape.save(folder / "model")
    config = shape.config(folder / "model", "never") | {"served_model_name": "one"}
    pools = config["pools"]
    config["pools"] = {
        f"{role}-{size}": pools[name_of(role, 1)]
        | {"engine": pools[name_of(role, 1)]["engine"] | {"block_size": block_size}}
        for role in ("prefill", "decode")
        for size, block_size in BLOCK_SIZES.items()
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(started(path))
        routing = changed(RouterConfig(), http={"port": 0}, placement={"local_prefill": "never"})
        units = Units(routing, fleet.control, ("one",), ROUTER)
        server = RouterServer(units, routing, "127.0.0.1:0")
        await server.start()
        router = await units.main_router()
        stack.push_async_callback(server.stop, 0.0)
        async with asyncio.timeout(60):
            while sum(entry.usable for entry in router.fleet) < 4:  # noqa: ASYNC110  no event
                await asyncio.sleep(0.05)
        over_http = HttpCaller(server.http_address or "")
        stack.push_async_callback(over_http.close)
        over_grpc = await stack.enter_async_context(AsyncClient(server.address))
        yield fleet, router, (over_grpc, over_http)


def streams_from(router: Router, worker_id: str) -> bool:
    """Whether a request that is decoded there has put out two tokens."""
    return any(
        len(run.log.ids) > 1 and run.log.end is None and mark.decode_worker == worker_id
        for run in router.runs
        for _, mark in run.log.marks
        if isinstance(mark, Routed)
    )


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_streams_of_a_killed_decode_worker_go_on_in_blocks_of_another_size(
    tmp_path: Path,
) -> None:
    prompts = [random_prompt(40 + 7 * number, VOCAB, seed=number) for number in range(NUM_REQUESTS)]
    async with two_block_sizes(tmp_path) as (fleet, router, clients):

        async def one(number: int) -> Answer:
            return await ask(
                clients[number % 2],
                prompts[number],
                tries=None,
                max_tokens=NUM_TOKENS,
                request_id=f"request-{number}",
                timeout_s=300.0,
            )

        asking = [asyncio.create_task(one(number)) for number in range(NUM_REQUESTS)]
        async with asyncio.timeout(300):
            while not streams_from(router, KILLED):  # noqa: ASYNC110  no event
                await asyncio.sleep(0.01)
        await fleet.kill(KILLED)
        answers = await asyncio.gather(*asking)

    for number, answer in enumerate(answers):
        assert answer.ids == greedy_tokens(FAMILY, (), tuple(prompts[number]), NUM_TOKENS), number
    workers_of = [[routed.decode_worker for routed in answer.routed] for answer in answers[::2]]
    moved = [workers for workers in workers_of if workers[0] == KILLED and len(workers) > 1]
    assert moved, workers_of
    assert all(workers[-1] == "decode-large-0" for workers in moved)
