"""The machine's cores are divided among what runs now, whatever the cluster file began with."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path

import pytest

from baton.config.cluster import ClusterConfig, PoolConfig, parse_config
from baton.control_client import ControlClient
from cluster.pools.pool_settings import num_ranks, own_settings
from cluster.worker.config import num_threads_of
from tests.cluster.whole_cluster import PROMPT, Site, live_workers, run, running_site
from tests.engine import checkpoints

NUM_CORES = len(os.sched_getaffinity(0))
POOLS = {
    "prefill": {"role": "prefill", "tensor_parallel": 2},
    "decode": {"role": "decode", "replicas": 2, "engine": {"num_threads": 7}},
}


def test_cores_are_divided_among_the_ranks_that_there_are_unless_the_file_names_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)))
    config = parse_config({"pools": POOLS})
    pools = own_settings(config)
    for replicas, share in (((1, 2), 6), ((1, 1), 8), ((4, 4), 2), ((9, 9), 1), ((0, 0), 24)):
        num = num_ranks(pools, dict(zip(POOLS, replicas, strict=True)))
        assert num_threads_of(config.pool_engine("prefill"), num) == share
        assert num_threads_of(config.pool_engine("decode"), num) == 7


def mixed_cluster(folder: Path) -> ClusterConfig:
    """One worker of both roles, which has all cores to itself."""
    checkpoints.save("llama", folder)
    config = parse_config({"model": str(folder), "pools": {"all": {"role": "mixed"}}})
    return dataclasses.replace(
        config,
        pools={"all": PoolConfig(role="mixed", replicas=1)},
        engine=dataclasses.replace(config.engine, dtype="float32", num_blocks=256, block_size=8),
        router=dataclasses.replace(config.router, port=0),
        control=dataclasses.replace(config.control, port=0),
    )


def scale(site: Site, replicas: int) -> None:
    with ControlClient(site.cluster.control_address) as control:
        control.set_replicas("all", replicas)
    site.wait_for(lambda seen: len(live_workers(seen)) == replicas)


def wait_for_threads(site: Site, log_file: Path, changes: list[tuple[int, int]]) -> None:
    """A worker takes its number over with a step, so have it step."""
    give_up_at = time.monotonic() + 60
    while True:
        assert run(site.cluster.router_address, PROMPT[:20], 4).ids
        found = re.findall(r"computing with (\d+) threads instead of (\d+)", log_file.read_text())
        if [(int(now), int(before)) for now, before in found] == changes:
            return
        assert time.monotonic() < give_up_at, (found, changes)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.skipif(NUM_CORES < 2, reason="one core cannot be divided")
def test_a_running_worker_gives_cores_away_when_its_pool_is_scaled_out_and_has_them_back_after(
    tmp_path: Path,
) -> None:
    (model := tmp_path / "model").mkdir()
    (run_dir := tmp_path / "run").mkdir()
    half = NUM_CORES // 2
    with running_site(mixed_cluster(model), run_dir) as site:
        scale(site, 2)
        wait_for_threads(site, run_dir / "all-0.log", [(half, NUM_CORES)])
        assert "instead of" not in (run_dir / "all-1.log").read_text()  # it began with its share
        scale(site, 1)
        wait_for_threads(site, run_dir / "all-0.log", [(half, NUM_CORES), (NUM_CORES, half)])
