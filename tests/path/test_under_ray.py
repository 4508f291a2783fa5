"""The same tokens when Ray places and supervises the workers, as `baton up` starts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.config.cluster import parse_config
from baton.control.client import ControlClient
from baton.v1 import control_pb2, worker_pb2
from cluster.local.bring_up import RunningCluster, up
from cluster.local.process_tree import descendants, wait_until_gone
from tests.engine import families
from tests.engine.driving import random_prompt
from tests.path.oracles import greedy_answer
from tests.path.whole_path import Pool, Shape, ask, name_of

CHUNKS = (16, 64, 512)
_MAX_ROUNDS = 60


@asynccontextmanager
async def under_ray(shape: Shape, folder: Path) -> AsyncIterator[RunningCluster]:
    before = descendants()
    settings = shape.config(folder, "never")
    # Half of the prompts go where the speeds do not say: the slow pairs are to be seen too. Every
    # handoff is to be reported, also one that ends late on a busy machine.
    settings["router"]["placement"] |= {"explore_share": 0.5, "trust_rates_s": 0.0}
    settings["router"]["timeouts"] = {"handoff_report_s": 30.0}
    config = parse_config(settings)
    running = await asyncio.to_thread(up, config)
    processes = descendants() - before
    try:
        yield running
    finally:
        await asyncio.to_thread(running.close)
    assert wait_until_gone(processes, 0.0) == set()


def until_idle(control_address: str) -> None:
    """The registry's news come with heartbeats: wait for them."""
    seen = control_pb2.WatchFleetResponse()
    with ControlClient(control_address) as control:
        for seen in control.watch_fleet(20.0):
            if seen.workers and all(_is_idle(worker.load) for worker in seen.workers):
                return
    raise AssertionError(f"something is still held: {seen}")


def _is_idle(load: worker_pb2.WorkerLoad) -> bool:
    held = load.num_running + load.num_waiting + load.num_reserved + load.num_quarantined_blocks
    return held == 0 and load.num_free_blocks == load.num_blocks > 0


def shapes() -> list[Any]:
    """Each family in all four pairs of widths; chunks and replicas go round."""
    found = []
    for number, family in enumerate(families.FAMILIES):
        one, other, third = (CHUNKS[(number + n) % 3] for n in range(3))
        replicas = 1 + number % 2
        shape = Shape(
            family,
            prefill=(Pool(1, one, replicas), Pool(2, other)),
            decode=(Pool(1, third, 3 - replicas), Pool(2, one)),
        )
        found.append(pytest.param(shape, marks=pytest.mark.full, id=family))
    narrow = Shape("qwen3", prefill=(Pool(2, 64),), decode=(Pool(2, 512),))
    return [pytest.param(narrow, id="qwen3-tp22"), *found]


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", shapes())
async def test_a_cluster_of_ray_actors_gives_the_tokens_of_transformers(
    shape: Shape, tmp_path: Path
) -> None:
    shape.save(tmp_path / "model")
    prompts = [random_prompt(n, families.VOCAB, n) for n in (1, 16, 17, 70, 333, 1500)]
    expected = [greedy_answer(shape.family, (), tuple(prompt), 12) for prompt in prompts]
    wanted = {(p, d) for p in workers_of("prefill", shape) for d in workers_of("decode", shape)}
    seen: set[tuple[str, str]] = set()
    async with (
        under_ray(shape, tmp_path / "model") as cluster,
        AsyncClient(cluster.router_address) as router,
    ):
        # Every round has a cache of its own; where its requests go is the router's to choose.
        for number in range(_MAX_ROUNDS):
            for is_cached in (False, True):
                answers = await asyncio.gather(
                    *(ask(router, prompt, cache_salt=str(number), logprobs=0) for prompt in prompts)
                )
                assert [answer.greedy for answer in answers] == expected
                assert all(answer.handed_off for answer in answers)
                if is_cached:
                    assert any(answer.num_cached_tokens for answer in answers)
                routed = [answer.routed[0] for answer in answers]
                seen |= {(r.prefill_worker, r.decode_worker) for r in routed}
            if seen == wanted:
                break
        assert seen == wanted
        await asyncio.to_thread(until_idle, cluster.control_address)


def workers_of(role: str, shape: Shape) -> list[str]:
    pools = shape.prefill if role == "prefill" else shape.decode
    return [f"{name_of(role, pool.tp)}-{n}" for pool in pools for n in range(pool.replicas)]
