"""The supervisor without Ray: what it would have Ray do is written down instead."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config.cluster import ClusterConfig, parse_config
from baton.control_client import ControlClient
from baton.errors import ConfigError, InUseError, OtherModelError
from baton.v1 import common_pb2, control_pb2
from cluster.pools.pool_table import PoolTable
from cluster.registry.registry import Progress, Registration
from cluster.supervisor.bundles import BundleNode
from cluster.supervisor.replica import Replica, ReplicaName, Replicas
from cluster.supervisor.state import SupervisorState
from cluster.supervisor.supervisor import Supervision
from cluster.worker.config import WorkerConfig

MODEL = "models/demo"


def cluster_of(replicas: int = 1) -> ClusterConfig:
    pool = {"role": "mixed", "replicas": replicas, "max_replicas": 32}
    return parse_config({"model": MODEL, "pools": {"all": pool}, "control": {"port": 0}})


def supervision_over(replicas: Any, cluster: ClusterConfig, run_dir: Path) -> Supervision:
    supervision = Supervision(cluster, run_dir)
    ground = dataclasses.replace(supervision._ground, replicas=cast(Replicas, replicas))
    supervision._ground = ground
    return supervision


class SlowStarts:
    """Starts that last until they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Semaphore(0)
        self.num_begun = 0
        self.told: list[str] = []

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        return []

    def reserve(self, name: ReplicaName, config: object) -> BundleNode | None:
        return BundleNode("node")

    def start(self, name: ReplicaName, config: object) -> Replica:
        self.num_begun += 1
        assert self.let_go.acquire(timeout=30)
        return Replica(name, {}, ())

    def destroy(self, replica: Replica) -> bool:
        return True

    def clear(self) -> None:
        """Nothing else is left."""

    def set_num_threads(self, replica: Replica, num_threads: int) -> None:
        self.told.append(replica.name.worker_id)


class Found:
    """What a former supervisor left; `find` waits until it may return."""

    def __init__(self) -> None:
        self.looking, self.go_on = threading.Event(), threading.Event()
        self.destroyed: list[str] = []

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        self.looking.set()
        assert self.go_on.wait(30)
        return [Replica(ReplicaName("all", index, 1), {}, (), serves=True) for index in (0, 1)]

    def destroy(self, replica: Replica) -> bool:
        self.destroyed.append(replica.name.worker_id)
        return True

    def clear(self) -> None:
        """Nothing else is left."""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  what is written down has no event
            await asyncio.sleep(0.01)


async def test_stopped_while_it_adopts_the_supervisor_ends_what_it_found(tmp_path: Path) -> None:
    found = Found()
    supervision = supervision_over(found, cluster_of(), tmp_path)
    running = asyncio.create_task(supervision.run(lambda address: None))
    await until(found.looking.is_set)
    supervision.stop()
    found.go_on.set()
    await asyncio.wait_for(running, 10)
    assert sorted(found.destroyed) == ["all-0", "all-1"]


async def test_the_supervisor_tells_where_it_serves_before_it_looks_for_what_to_adopt(
    tmp_path: Path,
) -> None:
    """A rank that hangs holds up its look by half a minute, for which a new head would not wait."""
    found, told = Found(), list[str]()
    supervision = supervision_over(found, cluster_of(), tmp_path)
    running = asyncio.create_task(supervision.run(told.append))
    await until(found.looking.is_set)
    assert len(told) == 1
    supervision.stop()
    found.go_on.set()
    await asyncio.wait_for(running, 10)


async def test_starts_that_take_long_keep_a_replica_that_runs_from_nothing(tmp_path: Path) -> None:
    slow = SlowStarts()
    supervision = supervision_over(slow, cluster_of(replicas=20), tmp_path)
    running = asyncio.create_task(supervision.run(lambda address: None))
    try:
        await until(lambda: slow.num_begun >= 10)
        slow.let_go.release()
        await until(lambda: len(slow.told) == 1)
    finally:
        supervision.stop()
        slow.let_go.release(100)
        await asyncio.wait_for(running, 10)


class Keeps(SlowStarts):
    """Starts that succeed at once; the configurations that they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.configs: list[WorkerConfig] = []

    def start(self, name: ReplicaName, config: WorkerConfig) -> Replica:
        self.configs.append(config)
        return Replica(name, {}, ())


async def test_workers_are_told_the_announced_host_of_the_registry_where_there_is_one(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    control = dataclasses.replace(cluster.control, announced_host="head-svc")
    keeps, told = Keeps(), asyncio.get_running_loop().create_future()
    supervision = supervision_over(
        keeps, dataclasses.replace(cluster, control=control, runs_on="pods"), tmp_path
    )
    running = asyncio.create_task(supervision.run(told.set_result))
    await until(lambda: keeps.configs)
    listens = json.loads((tmp_path / "supervisor.json").read_text())["listen"]
    assert listens.startswith("127.0.0.1:")
    assert told.result() == f"head-svc:{listens.rpartition(':')[2]}"
    assert [config.control_address for config in keeps.configs] == [told.result()]
    assert keeps.told == []  # nobody divides the cores of pods
    supervision.stop()
    await asyncio.wait_for(running, 10)


async def test_an_added_pool_that_leaves_its_dtype_open_computes_in_the_others_(
    tmp_path: Path,
) -> None:
    keeps, told = Keeps(), asyncio.get_running_loop().create_future()
    supervision = supervision_over(keeps, cluster_of(), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    with ControlClient(await told) as control:
        for name, dtype in (("first", "float16"), ("second", "auto")):
            text = f"pools: {{{name}: {{role: mixed, engine: {{dtype: {dtype}}}}}}}"
            await asyncio.to_thread(control.add_pool, name, text, 1)
    await until(lambda: len(keeps.configs) == 3)
    dtypes = {config.pool: config.engine.dtype for config in keeps.configs}
    assert dtypes == {"all": "auto", "first": "float16", "second": "float16"}
    supervision.stop()
    await asyncio.wait_for(running, 10)


class Adopts(Keeps):
    """Finds one replica of each pool that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_for: list[dict[str, int]] = []

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        self.looked_for.append(dict(tp_sizes))
        return [Replica(ReplicaName(name, 0, 1), {}, (), serves=True) for name in tp_sizes]


TOLD = """
supervisor: {fence_after_s: 4}
engine: {device: cpu, dtype: float32, num_blocks: 77}
pools: {more: {role: mixed, tensor_parallel: 2}}
"""


async def test_a_pool_that_was_told_is_started_by_its_own_file_and_adopted_after_a_restart(
    tmp_path: Path,
) -> None:
    keeps, told = Keeps(), asyncio.get_running_loop().create_future()
    supervision = supervision_over(keeps, cluster_of(), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    with ControlClient(await told) as control:
        with pytest.raises(ConfigError, match=r"runs_on: must be machine, .* not pods"):
            await asyncio.to_thread(control.add_pool, "more", TOLD + "runs_on: pods", 1)
        await asyncio.to_thread(control.add_pool, "more", TOLD, 1)
        await until(lambda: len(keeps.configs) == 2)
        config = keeps.configs[1]
        assert (config.worker_id, config.model_path, config.tp_size) == ("more-0", MODEL, 2)
        assert (config.engine.num_blocks, keeps.configs[0].engine.num_blocks) != (77, 77)
        limits = [keeper._limits.fence_after_s for keeper in supervision._keepers.values()]
        assert limits == [10.0, 4.0]
        with pytest.raises(InUseError):
            await asyncio.to_thread(control.remove_pool, "more")
        running.cancel()  # as a supervisor that is killed ends no replica
        await asyncio.wait({running})

    adopts, again = Adopts(), asyncio.get_running_loop().create_future()
    supervision = supervision_over(adopts, cluster_of(), tmp_path)
    running = asyncio.create_task(supervision.run(again.set_result))
    with ControlClient(await again) as control:
        assert adopts.looked_for == [{"all": 1, "more": 2}]
        await until(lambda: len(supervision._keepers) == 2)
        assert adopts.configs == []
        await asyncio.to_thread(control.set_replicas, "more", 0)
        supervision._keepers[("more", 0)].end_now()
        await until(lambda: len(supervision._keepers) == 1)
        await asyncio.to_thread(control.remove_pool, "more")
    supervision.stop()
    await asyncio.wait_for(running, 10)
    supervision = supervision_over(adopts, cluster_of(), tmp_path)
    assert list(supervision._registry.pools.all_settings()) == ["all"]


async def test_a_supervisor_that_lost_its_state_adopts_what_runs_when_it_is_told_of_the_pool(
    tmp_path: Path,
) -> None:
    adopts, told = Adopts(), asyncio.get_running_loop().create_future()
    supervision = supervision_over(adopts, cluster_of(replicas=0), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    with ControlClient(await told) as control:
        await until(lambda: len(supervision._keepers) == 1)
        await asyncio.to_thread(control.add_pool, "more", TOLD, 1)
        await until(lambda: len(supervision._keepers) == 2)
    assert adopts.looked_for == [{"all": 1}, {"more": 2}]
    replica = supervision._keepers[("more", 0)].replica
    assert replica is not None
    assert replica.name.generation == 1
    assert adopts.configs == []
    supervision.stop()
    await asyncio.wait_for(running, 10)


async def returning(control: ControlClient) -> list[str]:
    """The roles that a router hears of as on their way back that has just started."""

    def first() -> control_pb2.WatchFleetResponse:
        return next(iter(control.watch_fleet(10.0)))

    (pool,) = (await asyncio.to_thread(first)).pools
    return [common_pb2.WorkerRole.Name(role) for role in pool.comes_back_for]


BOTH = ["WORKER_ROLE_PREFILL", "WORKER_ROLE_DECODE"]


def kept_away(run_dir: Path) -> list[str]:
    away: list[str] = json.loads((run_dir / "supervisor.json").read_text())["away"]
    return away


async def test_a_pool_on_its_way_back_from_zero_is_still_after_a_restart_until_a_worker_is_live(
    tmp_path: Path,
) -> None:
    told = asyncio.get_running_loop().create_future()
    supervision = supervision_over(Keeps(), cluster_of(replicas=0), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    with ControlClient(await told) as control:
        await asyncio.to_thread(control.set_replicas, "all", 1)
        assert await returning(control) == BOTH
        running.cancel()
        await asyncio.wait({running})

    again = asyncio.get_running_loop().create_future()
    supervision = supervision_over(Keeps(), cluster_of(replicas=0), tmp_path)
    running = asyncio.create_task(supervision.run(again.set_result))
    with ControlClient(await again) as control:
        assert await returning(control) == BOTH
        stream = supervision._registry.register(Registration("all-0", 1, "all", b""))
        assert stream is not None
        supervision._registry.heartbeat(stream, Progress(False, 0.0, None), b"", draining=False)
        assert await returning(control) == []
        await until(lambda: kept_away(tmp_path) == [])
    supervision.stop()
    await asyncio.wait_for(running, 10)


def kept_fingerprint(run_dir: Path) -> str:
    return str(json.loads((run_dir / "supervisor.json").read_text())["model_fingerprint"])


async def test_the_model_that_served_before_a_restart_is_the_only_one_after_it(
    tmp_path: Path,
) -> None:
    supervision = supervision_over(Keeps(), cluster_of(), tmp_path)
    running = asyncio.create_task(supervision.run(lambda address: None))
    await until(lambda: supervision._keepers)
    supervision._registry.register(Registration("all-0", 1, "all", b"", "demo", b"one"))
    await until(lambda: kept_fingerprint(tmp_path) == b"one".hex())
    running.cancel()
    await asyncio.wait({running})

    told = asyncio.get_running_loop().create_future()
    supervision = supervision_over(Keeps(), cluster_of(), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    with ControlClient(await told) as control:
        assert (await asyncio.to_thread(control.fleet)).model_fingerprint == b"one"
    with pytest.raises(OtherModelError, match=r"worker all-0 loaded .*models/demo: "):
        supervision._registry.register(Registration("all-0", 2, "all", b"", "demo", b"two"))
    supervision.stop()
    await asyncio.wait_for(running, 10)


async def test_an_added_pool_of_another_model_is_refused_before_anything_is_looked_for(
    tmp_path: Path,
) -> None:
    adopts, told = Adopts(), asyncio.get_running_loop().create_future()
    supervision = supervision_over(adopts, cluster_of(replicas=0), tmp_path)
    running = asyncio.create_task(supervision.run(told.set_result))
    with (
        ControlClient(await told) as control,
        pytest.raises(ConfigError, match=r"model: must be .*models/demo, .* not other") as caught,
    ):
        await asyncio.to_thread(control.add_pool, "more", TOLD + "model: other", 1)
    assert caught.value.field == "model"
    assert adopts.looked_for in ([], [{"all": 1}])
    supervision.stop()
    await asyncio.wait_for(running, 10)


async def test_a_run_directory_that_takes_nothing_ends_no_supervisor_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervision = supervision_over(Keeps(), cluster_of(), run_dir := tmp_path / "run")
    run_dir.mkdir()
    attempts, booked = [], supervision.save

    def counted() -> None:
        attempts.append(supervision._registry.now_s())
        booked()

    monkeypatch.setattr(supervision, "save", counted)
    running = asyncio.create_task(supervision.run(lambda address: None))
    await until(lambda: supervision._keepers)
    run_dir.rename(tmp_path / "gone")
    supervision._registry.pools.set_replicas("all", 0)
    await until(lambda: "supervisor.new" in caplog.text)
    await until(lambda: len(attempts) > 3)
    assert caplog.text.count("supervisor.new") == 1, "told once"
    (tmp_path / "gone").rename(run_dir)
    await until(lambda: kept_away(run_dir) == ["decode", "prefill"])
    supervision.stop()
    await asyncio.wait_for(running, 10)


SUPERVISOR = """
import pickle, sys
from cluster.supervisor.supervisor import SupervisorActor
actor = SupervisorActor(pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2])
print(repr(actor._address.exception(20)))
"""


@pytest.mark.parametrize("restarted", [False, True])
def test_a_supervisor_without_its_port_tells_who_started_it_or_ends_for_ray_to_try_again(
    tmp_path: Path, restarted: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = cluster_of()
        if restarted:
            state = SupervisorState(tmp_path, cluster)
            state.restore(book := PoolTable())
            state.keep(listen, book, b"")
        else:
            control = dataclasses.replace(cluster.control, port=taken.getsockname()[1])
            cluster = dataclasses.replace(cluster, control=control)
        arguments = [pickle.dumps(cluster).hex(), str(tmp_path)]
        ended = subprocess.run(
            [sys.executable, "-c", SUPERVISOR, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert f"cannot listen on {listen}" in (tmp_path / "supervisor.log").read_text()
    assert ended.returncode == (1 if restarted else 0), ended.stderr
    assert (f"cannot listen on {listen}" in ended.stdout) == (not restarted)
