"""The same tokens when Ray places and supervises the workers, as `baton up` starts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.config import parse_config
from baton.control_client import ControlClient
from baton.process_tree import descendants, wait_until_gone
from baton.v1 import control_pb2, worker_pb2
from cluster.local import RunningCluster, up
from tests.engine import checkpoints
from tests.engine.driving import random_prompt
from tests.path.whole_path import Shape, ask


@asynccontextmanager
async def under_ray(shape: Shape, folder: Path, run_dir: Path) -> AsyncIterator[RunningCluster]:
    before = descendants()
    config = parse_config(shape.config(folder, "never"))
    running = await asyncio.to_thread(up, config, run_dir=run_dir)
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


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "shape",
    [
        Shape("mistral", replicas=2),
        Shape("qwen3-moe", prefill_tp=2, decode_tp=1),
        Shape("llama", prefill_tp=1, decode_tp=2, chunk=16),
    ],
    ids=lambda shape: f"{shape.family}-{shape.replicas}x-tp{shape.prefill_tp}{shape.decode_tp}",
)
async def test_a_cluster_of_ray_actors_gives_the_tokens_of_transformers(
    shape: Shape, tmp_path: Path
) -> None:
    model = shape.save(tmp_path / "model")
    prompts = [random_prompt(n, checkpoints.VOCAB, n) for n in (1, 16, 17, 70, 333, 1500)]
    expected = [checkpoints.greedy(model, prompt, 12) for prompt in prompts]
    async with (
        under_ray(shape, tmp_path / "model", tmp_path) as cluster,
        AsyncClient(cluster.router_address) as router,
    ):
        for is_cached in (False, True):
            answers = await asyncio.gather(*(ask(router, prompt) for prompt in prompts))
            assert [answer.ids for answer in answers] == expected
            assert all(answer.handed_off for answer in answers)
            if is_cached:
                assert all(answer.num_cached_tokens for answer in answers[2:])
        await asyncio.to_thread(until_idle, cluster.control_address)
