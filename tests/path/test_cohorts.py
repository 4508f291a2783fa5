"""Two models behind one router, half the requests each: every stream is one model's, from its first
token to its last, also where a decode worker is killed under it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yaml

from baton.client import AsyncClient
from cluster.config import RegistryConfig
from cluster.control_service import Changes, serve
from cluster.pool_settings import told_settings
from cluster.registry import Registry
from router.config import RouterConfig
from router.output import Routed
from router.router import Router
from router.server import RouterServer
from router.text import TextModel
from tests.cluster.fleet_processes import Fleet
from tests.engine.checkpoints import VOCAB
from tests.engine.driving import random_prompt
from tests.path.oracles import greedy_tokens
from tests.path.whole_path import Answer, Shape, ask

FAMILIES = {"old": "llama", "new": "qwen2"}  # by cohort
POOLS = (("prefill", 1), ("decode", 2))
NUM_REQUESTS = 16
NUM_TOKENS = 96
KILLED = "decode-new-0"


def cluster_file(cohort: str, folder: Path) -> Path:
    """Of one cohort, whose checkpoint is written too."""
    shape = Shape(FAMILIES[cohort])
    shape.save(folder / cohort)
    config = shape.config(folder / cohort, "never") | {"served_model_name": "both"}
    pools = list(config["pools"].values())
    config["pools"] = {
        f"{role}-{cohort}": pool | {"replicas": replicas}
        for (role, replicas), pool in zip(POOLS, pools)
    }
    path = folder / f"{cohort}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.asynccontextmanager
async def two_cohorts(
    folder: Path, change: Callable[[Path], None] = lambda checkpoint: None
) -> AsyncIterator[tuple[Fleet, Router, AsyncClient]]:
    """The processes of the new one, whose checkpoint may be changed before they start, the router
    before both, and its client."""
    registry = Registry(RegistryConfig(), time.monotonic)
    registry.pools.set_cohort_weights({"old": 50, "new": 50})
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(serve(registry, Changes(), "127.0.0.1:0"))
        for cohort in FAMILIES:
            path = cluster_file(cohort, folder)
            if cohort == "new":
                change(folder / cohort)
            fleet = Fleet(registry, control, path)
            stack.push_async_callback(fleet.end)
            for role, replicas in POOLS:
                name = f"{role}-{cohort}"
                registry.pools.add(told_settings(name, path.read_text(), cohort), replicas)
                for index in range(replicas):
                    await fleet.start(name, index)
        await fleet.until(
            lambda seen: all(p.live_replicas == p.desired_replicas for p in seen.pools), 300
        )
        config = RouterConfig(local_prefill="never")
        text_model = await asyncio.to_thread(TextModel.load, folder / "old")
        server = RouterServer(Router(config, control, "both", text_model), config, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        router = server.router
        async with asyncio.timeout(60):
            while sum(entry.usable for entry in router.fleet) < 6:  # noqa: ASYNC110  no event
                await asyncio.sleep(0.05)
        yield fleet, router, await stack.enter_async_context(AsyncClient(server.address))


def prompt_of(number: int) -> list[int]:
    return random_prompt(40 + 7 * number, VOCAB, seed=number)


def streams_from(router: Router, worker_id: str) -> bool:
    """Whether a request that is decoded there has put out two tokens."""
    return any(
        len(run.log.ids) > 1 and run.log.end is None and mark.decode_worker == worker_id
        for run in router._runs.values()
        for _, mark in run.log.marks
        if isinstance(mark, Routed)
    )


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_every_stream_is_one_model_s_while_a_decode_worker_is_killed_under_some(
    tmp_path: Path,
) -> None:
    async with two_cohorts(tmp_path) as (fleet, router, client):

        async def one(number: int) -> Answer:
            return await ask(
                client,
                prompt_of(number),
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

    cohorts = [answer.routed[-1].cohort for answer in answers]
    for number, (answer, cohort) in enumerate(zip(answers, cohorts)):
        whole = greedy_tokens(FAMILIES[cohort], (), prompt_of(number), NUM_TOKENS)
        assert answer.ids == whole, (number, answer.routed)
    assert set(cohorts) == set(FAMILIES)
    places = [[routed.decode_worker for routed in answer.routed] for answer in answers]
    moved = [workers for workers in places if workers[0] == KILLED and len(workers) > 1]
    assert moved, places
    assert all(workers[-1] == "decode-new-1" for workers in moved)
