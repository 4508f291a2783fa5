"""Replicas of several rank processes with a real model: KV over UCX, transformers as the oracle."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from baton.config.cluster import load_config
from baton.v1 import control_pb2
from cluster.local.process_tree import descendants, wait_until_gone
from tests.cluster.fleet_processes import Fleet, started
from tests.cluster.whole_cluster import books_of, live_workers, running_site
from tests.engine import checkpoints, families


def write_config(folder: Path, prefill_tp: int, decode_tp: int) -> Path:
    config = folder / "cluster.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": str(folder / "model"),
                "pools": {
                    "prefill": {"role": "prefill", "tensor_parallel": prefill_tp},
                    "decode": {"role": "decode", "tensor_parallel": decode_tp},
                },
                "engine": {
                    "block_size": 8,
                    "num_blocks": 128,
                    "num_regions": 2,
                    "max_num_seqs": 32,
                    "max_num_batched_tokens": 32,
                    "dtype": "float32",
                    "num_threads": 1,
                },
            }
        )
    )
    return config


async def books_cover_a_rank_above_0(fleet: Fleet, worker_id: str) -> None:
    async def problems() -> list[str]:
        books = await asyncio.to_thread(books_of, fleet.control, fleet.address(worker_id))
        return list(books.problems)

    (rank1,) = psutil.Process(fleet.processes[worker_id].pid).children()
    assert not await problems()
    rank1.suspend()
    (problem,) = await problems()
    assert problem.startswith("rank 1: it did not answer")
    rank1.resume()
    assert not await problems()


async def a_dead_rank_takes_its_replica_down(fleet: Fleet, worker_id: str) -> None:
    (rank1,) = psutil.Process(fleet.processes[worker_id].pid).children()
    rank1.kill()
    assert await fleet.processes.pop(worker_id).wait() == 1
    suspect = control_pb2.WORKER_STATE_SUSPECT
    await fleet.until(lambda seen: any(w.state == suspect for w in seen.workers))


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.full),
        pytest.param(2, 2, marks=pytest.mark.full),
    ],
)
async def test_unequal_widths_hand_over_the_oracles_tokens_and_a_dead_rank_takes_its_replica_down(
    tmp_path: Path, kit: Any, prefill_tp: int, decode_tp: int
) -> None:
    model = checkpoints.save("llama", tmp_path / "model")
    before = descendants()
    async with started(write_config(tmp_path, prefill_tp, decode_tp)) as fleet:
        ranks = descendants() - before
        assert len(ranks) >= prefill_tp + decode_tp
        link = await kit.decode_link(fleet.address("decode-0"), "router-a").open()
        router = kit.mini_router(fleet.address("prefill-0"), link)
        for length in (1, 8, 70):
            prompt = np.random.default_rng(length).integers(0, families.VOCAB, length)
            spec = kit.make_spec(f"r{length}", length)
            spec.token_ids = prompt.astype("<u4").tobytes()
            spec.kv_fingerprint = fleet.worker("decode-0").info.kv_fingerprint
            tokens = await router.generate(spec, fleet.ref("prefill-0"))
            assert tokens == checkpoints.greedy(model, prompt.tolist(), len(tokens))
            assert len(tokens) == 12
        await router.close()
        await link.close()
        wide = "prefill-0" if prefill_tp > 1 else "decode-0"
        await books_cover_a_rank_above_0(fleet, wide)
        await a_dead_rank_takes_its_replica_down(fleet, wide)
    assert wait_until_gone(ranks, 5.0) == set()


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_supervisor_recreates_a_replica_whole_when_one_of_its_ranks_is_killed(
    tmp_path: Path, rank: int
) -> None:
    checkpoints.save("llama", tmp_path / "model")
    config = load_config(write_config(tmp_path, 1, 2))
    config = dataclasses.replace(
        config,
        router=dataclasses.replace(config.router, port=0),
        control=dataclasses.replace(config.control, port=0),
    )
    with running_site(config) as site:
        before = site.all_live()
        ranks = live_workers(before)["decode-0"].ref.ranks
        assert len(ranks) == 2
        with site.streams(1, 300):
            os.kill(ranks[rank].process.pid, signal.SIGKILL)
            after = site.wait_for_recreated(before, "decode-0")
        new = live_workers(after)["decode-0"].ref.ranks
        assert {r.process.pid for r in new}.isdisjoint(r.process.pid for r in ranks)
        site.serves(after, "decode-0")
        site.all_sound()
