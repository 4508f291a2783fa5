"""Compute threads and GPUs divided among ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from baton.config.cluster import ClusterConfig, PoolConfig, parse_config
from baton.config.transfer import TransferConfig
from baton.control.client import ControlClient
from baton.fleet import Role
from cli.main import main
from cluster.errors import ReplicaError
from cluster.local.bring_up import start_ray
from cluster.local.process_tree import watched_over
from cluster.pools.pool_settings import num_ranks, own_settings
from cluster.supervisor.bundles import rank_resources
from cluster.supervisor.replica import RayReplicas, ReplicaName
from cluster.supervisor.supervisor import SupervisorHandle
from cluster.worker.config import (
    WorkerConfig,
    num_threads_of,
    worker_config,
)
from tests.cluster.whole_cluster import PROMPT, Site, fake_cluster, live_workers, run, running_site
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
        pools={"all": PoolConfig(role=Role.MIXED, replicas=1)},
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
    model: Path, run_dir: Path
) -> None:
    half = NUM_CORES // 2
    with running_site(mixed_cluster(model), run_dir) as site:
        scale(site, 2)
        wait_for_threads(site, run_dir / "all-0.log", [(half, NUM_CORES)])
        assert "instead of" not in (run_dir / "all-1.log").read_text()  # it began with its share
        scale(site, 1)
        wait_for_threads(site, run_dir / "all-0.log", [(half, NUM_CORES), (NUM_CORES, half)])


NUM_GPUS = 2


@pytest.fixture(scope="module")
def ray_with_gpus() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir="/tmp"))
        start_ray(stack, stack.enter_context(watched_over()), Path(folder), NUM_GPUS)
        yield


def on_gpus(folder: Path) -> ClusterConfig:
    config = fake_cluster(folder, replicas=1)
    engine = dataclasses.replace(config.engine, backend="torch", device="cuda")
    return dataclasses.replace(config, engine=engine)


def loads_for_ever(folder: Path) -> None:
    """Reading the model's config.json never ends, so that a rank can be asked what it has."""
    (folder / "config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "config.json")


def ranks_on_gpus(folder: Path, tp_size: int) -> WorkerConfig:
    cluster = on_gpus(folder)
    pool = dataclasses.replace(cluster.pools["decode"], tensor_parallel=tp_size)
    cluster = dataclasses.replace(cluster, pools={**cluster.pools, "decode": pool})
    config = worker_config(cluster, "decode", "decode-0", "127.0.0.1:1")
    loads_for_ever(folder)
    return dataclasses.replace(config, transfer=TransferConfig(transport="memory"))


def visible_gpus(actor: Any) -> str:
    visible = actor.__ray_call__.remote(lambda self: os.environ["CUDA_VISIBLE_DEVICES"])
    return str(ray.get(visible, timeout=30))


def test_only_a_rank_on_a_gpu_asks_for_one(tmp_path: Path) -> None:
    on_gpu = worker_config(on_gpus(tmp_path), "decode", "decode-0", "127.0.0.1:1")
    assert rank_resources(on_gpu)["GPU"] == 1
    on_cpu = worker_config(fake_cluster(tmp_path), "decode", "decode-0", "127.0.0.1:1")
    assert "GPU" not in rank_resources(on_cpu)
    fake = dataclasses.replace(on_gpu.engine, backend="fake")
    assert "GPU" not in rank_resources(dataclasses.replace(on_gpu, engine=fake))


@pytest.mark.cluster
def test_each_rank_under_ray_sees_a_gpu_of_its_own(ray_with_gpus: None, tmp_path: Path) -> None:
    replicas = RayReplicas(tmp_path)
    config = ranks_on_gpus(tmp_path, tp_size=NUM_GPUS)
    name = ReplicaName.new("decode", 0)
    assert replicas.reserve(name, config) is not None
    replica = replicas.start(name, config)
    try:
        seen = sorted(visible_gpus(actor) for actor in replica.actors.values())
        assert seen == ["0", "1"]
    finally:
        assert replicas.destroy(replica)


@pytest.mark.cluster
def test_a_replica_on_more_gpus_than_any_machine_has_is_refused_at_once(
    ray_with_gpus: None, tmp_path: Path
) -> None:
    replicas = RayReplicas(tmp_path)
    config = ranks_on_gpus(tmp_path, tp_size=NUM_GPUS + 1)
    began_at = time.monotonic()
    with pytest.raises(ReplicaError, match="3 ranks with a GPU each; free GPUs on all machines: 2"):
        replicas.reserve(ReplicaName.new("decode", 0), config)
    assert time.monotonic() - began_at < 15  # not as long as for a place that may come free
    assert replicas.find({"decode": NUM_GPUS + 1}) == []


@pytest.mark.cluster
def test_a_replica_for_which_too_few_gpus_are_free_is_refused_soon(
    ray_with_gpus: None, tmp_path: Path
) -> None:
    replicas = RayReplicas(tmp_path)
    taken = ray.util.placement_group([{"GPU": 1}])
    assert taken.wait(30)
    began_at = time.monotonic()
    try:
        with pytest.raises(
            ReplicaError, match="2 ranks with a GPU each; free GPUs on all machines: 1"
        ):
            replicas.reserve(
                ReplicaName.new("decode", 0), ranks_on_gpus(tmp_path, tp_size=NUM_GPUS)
            )
        assert time.monotonic() - began_at < 15
    finally:
        ray.util.remove_placement_group(taken)


@pytest.mark.cluster
def test_scaling_a_pool_beyond_the_gpus_is_refused_at_once_and_changes_nothing(
    ray_with_gpus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on_gpus(tmp_path)
    empty = {name: dataclasses.replace(p, replicas=0) for name, p in config.pools.items()}
    with contextlib.ExitStack() as stack:
        config = dataclasses.replace(config, pools=empty)
        supervisor = SupervisorHandle.start(config, tmp_path)
        stack.callback(supervisor.stop)
        address = supervisor.address()
        began_at = time.monotonic()
        assert main(["scale", "decode", "3", "--control", address]) == 1
        assert time.monotonic() - began_at < 15
        reported = capsys.readouterr()
        assert reported.out == ""
        assert (
            "all pools together would need 3 GPUs, one for each rank; there are 2, 2"
            in reported.err
        )
        with ControlClient(address) as control:
            assert [pool.desired_replicas for pool in control.fleet().pools] == [0, 0]
