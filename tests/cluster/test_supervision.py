"""The supervisor without Ray, over in-memory replicas."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.config.internal import InternalConfig
from baton.control.client import ControlClient
from baton.errors import ConfigError, InUseError, OtherModelError
from baton.v1 import common_pb2, control_pb2
from cluster.progress import Progress
from cluster.registry.registry import Registration, Registry
from cluster.supervisor.run_dir import SupervisorState
from cluster.supervisor.supervisor import Supervision
from tests.cluster.memory_replicas import (
    MODEL,
    MemoryReplicas,
    cluster_of,
    controlled,
    registry_of,
    replica_of,
    supervised,
    until,
)

FOUND = (replica_of("all", 0), replica_of("all", 1))
BOTH = ["WORKER_ROLE_PREFILL", "WORKER_ROLE_DECODE"]
ADDED = """
supervisor: {fence_after_s: 4}
engine: {device: cpu, dtype: float32, num_blocks: 77}
pools: {more: {role: mixed, tensor_parallel: 2}}
"""


def slots_of(supervision: Supervision, pool: str) -> list[str]:
    return [slot.worker_id for slot in registry_of(supervision).pools.slots_of(pool)]


def saved(run_dir: Path, key: str) -> object:
    return json.loads((run_dir / "supervisor.json").read_text())[key]


async def test_a_supervisor_that_is_stopped_while_it_adopts_ends_what_it_found(
    tmp_path: Path,
) -> None:
    replicas = MemoryReplicas(*FOUND)
    replicas.may_find.clear()
    async with supervised(replicas, cluster_of(), tmp_path) as (supervision, address):
        await until(replicas.is_finding.is_set)
        assert address.done()  # before the search: a rank that hangs delays it by half a minute
        supervision.stop()
        replicas.may_find.set()
    assert sorted(name.worker_id for name in replicas.destroyed) == ["all-0", "all-1"]


async def test_slow_starts_delay_nothing_for_a_replica_that_runs(tmp_path: Path) -> None:
    replicas = MemoryReplicas()
    replicas.may_start = type(replicas.may_start)(0)
    async with supervised(replicas, cluster_of(replicas=20), tmp_path):
        try:
            await until(lambda: replicas.num_begun >= 10)
            replicas.may_start.release()
            await until(lambda: len(replicas.set_threads) == 1)
        finally:
            replicas.may_start.release(100)


async def test_workers_get_the_announced_host_of_the_registry(tmp_path: Path) -> None:
    cluster = cluster_of()
    control = dataclasses.replace(cluster.control, announced_host="head-svc")
    cluster = dataclasses.replace(cluster, control=control, runs_on="pods")
    replicas = MemoryReplicas()
    async with supervised(replicas, cluster, tmp_path) as (_, address):
        await until(lambda: replicas.configs)
        listens = str(saved(tmp_path, "listen"))
        assert listens.startswith("127.0.0.1:")
        assert address.result() == f"head-svc:{listens.rpartition(':')[2]}"
        assert [config.control_address for config in replicas.configs] == [address.result()]
        assert replicas.set_threads == []  # pods have their own cores


async def test_an_added_pool_with_dtype_auto_takes_the_dtype_of_the_others(tmp_path: Path) -> None:
    replicas = MemoryReplicas()
    async with controlled(replicas, cluster_of(), tmp_path) as (_, control):
        for name, dtype in (("first", "float16"), ("second", "auto")):
            text = f"pools: {{{name}: {{role: mixed, engine: {{dtype: {dtype}}}}}}}"
            await asyncio.to_thread(control.add_pool, name, text, 1)
        await until(lambda: len(replicas.configs) == 3)
    dtypes = {config.pool: config.engine.dtype for config in replicas.configs}
    assert dtypes == {"all": "auto", "first": "float16", "second": "float16"}


async def test_an_added_pool_is_started_by_its_own_file_and_adopted_after_a_restart(
    tmp_path: Path,
) -> None:
    replicas = MemoryReplicas()
    killed = controlled(replicas, cluster_of(), tmp_path, is_killed=True)
    async with killed as (supervision, control):
        with pytest.raises(ConfigError, match=r"runs_on: must be machine, .* not pods"):
            await asyncio.to_thread(control.add_pool, "more", ADDED + "runs_on: pods", 1)
        await asyncio.to_thread(control.add_pool, "more", ADDED, 1)
        await until(lambda: len(replicas.configs) == 2)
        first, more = replicas.configs
        assert (more.worker_id, more.cluster.model) == ("more-0", MODEL)
        assert more.shape.tensor_parallel == 2
        assert first.engine.num_blocks != more.engine.num_blocks == 77
        pools = registry_of(supervision).pools
        limits = [pools.settings(p).config.supervisor.fence_after_s for p in ("all", "more")]
        assert limits == [10.0, 4.0]
        with pytest.raises(InUseError):
            await asyncio.to_thread(control.remove_pool, "more")

    replicas = MemoryReplicas(finds_any=True)
    async with controlled(replicas, cluster_of(), tmp_path) as (supervision, control):
        assert replicas.looked_for == [{"all": 1, "more": 2}]
        await until(lambda: slots_of(supervision, "more"))
        assert replicas.configs == []
        await asyncio.to_thread(control.set_replicas, "more", 0)
        await until(lambda: not slots_of(supervision, "more"))
        await asyncio.to_thread(control.remove_pool, "more")
    again = Supervision(cluster_of(), tmp_path, replicas)
    assert list(registry_of(again).pools.all_settings()) == ["all"]


async def test_a_supervisor_that_lost_its_state_adopts_the_replicas_of_a_pool_that_is_added(
    tmp_path: Path,
) -> None:
    replicas = MemoryReplicas(finds_any=True)
    async with controlled(replicas, cluster_of(replicas=0), tmp_path) as (supervision, control):
        await until(lambda: slots_of(supervision, "all"))
        await asyncio.to_thread(control.add_pool, "more", ADDED, 1)
        await until(lambda: slots_of(supervision, "more"))
    assert replicas.looked_for == [{"all": 1}, {"more": 2}]
    assert replicas.configs == []
    assert {(name.worker_id, name.generation) for name in replicas.destroyed} >= {("more-0", 1)}


async def returning(control: ControlClient) -> list[str]:
    """The roles that a router which has just started sees on their way back."""

    def first() -> control_pb2.WatchFleetResponse:
        return next(iter(control.watch_fleet(10.0)))

    (pool,) = (await asyncio.to_thread(first)).pools
    return [common_pb2.WorkerRole.Name(role) for role in pool.comes_back_for]


async def test_a_pool_on_its_way_back_from_zero_still_is_after_a_restart_until_a_worker_is_live(
    tmp_path: Path,
) -> None:
    killed = controlled(MemoryReplicas(), cluster_of(replicas=0), tmp_path, is_killed=True)
    async with killed as (_, control):
        await asyncio.to_thread(control.set_replicas, "all", 1)
        assert await returning(control) == BOTH
    again = controlled(MemoryReplicas(), cluster_of(replicas=0), tmp_path)
    async with again as (supervision, control):
        assert await returning(control) == BOTH
        registry = registry_of(supervision)
        stream = registry.register(Registration("all-0", 1, "all", b""))
        assert stream is not None
        registry.heartbeat(stream, Progress(False, 0.0, None), b"", draining=False)
        assert await returning(control) == []
        await until(lambda: saved(tmp_path, "away") == [])


async def test_only_the_model_that_served_before_a_restart_serves_after_it(tmp_path: Path) -> None:
    killed = supervised(MemoryReplicas(), cluster_of(), tmp_path, is_killed=True)
    async with killed as (supervision, _):
        await until(lambda: slots_of(supervision, "all"))
        registry_of(supervision).register(Registration("all-0", 1, "all", b"", "demo", b"one"))
        await until(lambda: saved(tmp_path, "model_fingerprint") == b"one".hex())
    async with controlled(MemoryReplicas(), cluster_of(), tmp_path) as (supervision, control):
        assert (await asyncio.to_thread(control.fleet)).model_fingerprint == b"one"
        with pytest.raises(OtherModelError, match=r"worker all-0 loaded .*models/demo: "):
            registry_of(supervision).register(Registration("all-0", 2, "all", b"", "demo", b"two"))


async def test_an_added_pool_of_another_model_is_refused_before_any_search(tmp_path: Path) -> None:
    replicas = MemoryReplicas(finds_any=True)
    wrong = pytest.raises(ConfigError, match=r"model: must be .*models/demo, .* not other")
    async with controlled(replicas, cluster_of(replicas=0), tmp_path) as (_, control):
        with wrong as caught:
            await asyncio.to_thread(control.add_pool, "more", ADDED + "model: other", 1)
        assert caught.value.field == "model"
        assert replicas.looked_for in ([], [{"all": 1}])


async def test_a_run_directory_that_cannot_be_written_ends_no_supervisor_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir := tmp_path / "run").mkdir()
    async with supervised(MemoryReplicas(), cluster_of(), run_dir) as (supervision, _):
        attempts, save = [], supervision.save

        def counted() -> None:
            attempts.append(registry_of(supervision).now_s())
            save()

        monkeypatch.setattr(supervision, "save", counted)
        await until(lambda: slots_of(supervision, "all"))
        run_dir.rename(tmp_path / "gone")
        registry_of(supervision).pools.set_live({"all": 1})
        await until(lambda: "supervisor.new" in caplog.text)
        await until(lambda: len(attempts) > 3)
        assert caplog.text.count("supervisor.new") == 1, "logged once"
        (tmp_path / "gone").rename(run_dir)
        await until(lambda: saved(run_dir, "away") == [])


SUPERVISOR = """
import pickle, sys
from cluster.supervisor.supervisor import SupervisorActor
actor = SupervisorActor(pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2])
try:
    actor.address()
except OSError as error:
    print(repr(error))
"""


@pytest.mark.parametrize("restarted", [False, True])
def test_a_supervisor_without_its_port_reports_the_error_or_ends_for_ray_to_restart_it(
    tmp_path: Path, restarted: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = cluster_of()
        if restarted:
            state = SupervisorState(tmp_path, cluster)
            state.keep(listen, Registry(cluster.registry, time.monotonic))
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


@pytest.mark.parametrize(
    ("named", "field"),
    [
        ("transfer: {ucx_library: /tmp/evil.so}", "transfer.ucx_library"),
        ("internal: {folder: /tmp/keys}", "internal"),
        ("internal: {identity: 'off'}", "internal"),
        ("model: /tmp/evil", "model"),
        ("tokenizer: /tmp/evil", "tokenizer"),
    ],
)
async def test_a_file_or_library_that_an_added_pool_names_is_refused(
    tmp_path: Path, named: str, field: str
) -> None:
    async with controlled(MemoryReplicas(), cluster_of(), tmp_path) as (_, control):
        with pytest.raises(ConfigError) as refused:
            await asyncio.to_thread(control.add_pool, "more", f"{named}\n{ADDED}", 1)
        assert refused.value.field == field


async def test_an_added_pool_s_workers_have_the_cluster_s_own_identities(tmp_path: Path) -> None:
    replicas, folder = MemoryReplicas(), os.environ["BATON_IDENTITY"]
    cluster = dataclasses.replace(cluster_of(), internal=InternalConfig(folder=folder))
    async with controlled(replicas, cluster, tmp_path) as (_, control):
        await asyncio.to_thread(control.add_pool, "more", ADDED, 1)
        await until(lambda: any(config.pool == "more" for config in replicas.configs))
    assert {config.cluster.internal for config in replicas.configs} == {cluster.internal}
