"""Replicas under Ray: any number of supervisors adopt one; ended, it leaves no process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import GcsErrorSubscriber
from ray.util.placement_group import PlacementGroup

from baton.config.transfer import TransferConfig
from cluster.errors import ReplicaError
from cluster.local.bring_up import start_ray
from cluster.local.process_tree import watched_over
from cluster.supervisor.replica import RankEnd, RankWatch, RayReplicas, Replica, ReplicaName
from cluster.worker.config import WorkerConfig, worker_config
from cluster.worker.process import MAX_CALLS
from kv_transfer.process import ProcessIdentity, is_gone, own_identity
from tests.cluster.whole_cluster import fake_cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir="/tmp"))
        start_ray(stack, stack.enter_context(watched_over()), Path(folder))
        yield


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    found = worker_config(fake_cluster(tmp_path), "decode", "decode-0", "127.0.0.1:1")
    return dataclasses.replace(found, transfer=TransferConfig(transport="memory"))


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[RayReplicas]:
    """As a supervisor has them; at the end nothing is left."""
    yield (found := a_supervisors(tmp_path))
    for replica in found.find(TP_SIZES):
        assert found.destroy(replica)
    assert ray.util.list_named_actors(all_namespaces=True) == []


TP_SIZES = {"decode": 1}


def a_supervisors(run_dir: Path, answer_within_s: float = 30.0) -> RayReplicas:
    return RayReplicas(run_dir, answer_within_s)


def start(replicas: RayReplicas, config: WorkerConfig) -> Replica:
    name = ReplicaName.new("decode", 0)
    assert replicas.reserve(name, config) is not None
    return replicas.start(name, config)


def ends_of(replica: Replica, watch: RankWatch) -> list[RankEnd]:
    """The test's time limit bounds the wait."""
    while not (ends := watch.wait([replica], 0.5)):
        pass
    return ends


def test_any_number_of_supervisors_adopt_the_same_replica_and_the_last_one_hears_of_its_end(
    tmp_path: Path, replicas: RayReplicas, config: WorkerConfig
) -> None:
    replica = start(replicas, config)
    for _ in range(2 * MAX_CALLS):
        (found,) = a_supervisors(tmp_path).find(TP_SIZES)
        assert (found.name, found.processes) == (replica.name, replica.processes)
        watch = RankWatch()
        assert watch.wait([found], 0.01) == []
    assert is_gone(replica.processes[0]) is False
    wait_until(lambda: a_supervisors(tmp_path).find(TP_SIZES)[0].serves)  # it loads
    os.kill(replica.processes[0].pid, signal.SIGKILL)
    (end,) = ends_of(found, watch)
    assert (end.replica, end.rank) == (replica.name, 0)
    assert "died" in str(end.failure)


def test_a_rank_runs_at_the_priority_of_who_started_the_cluster(
    replicas: RayReplicas, config: WorkerConfig
) -> None:
    (process,) = start(replicas, config).processes
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_rank_that_leaves_in_good_order_has_not_failed(
    replicas: RayReplicas, config: WorkerConfig
) -> None:
    replica, watch = start(replicas, config), RankWatch()
    while not (ends := watch.wait([replica], 0.2)):  # a rank that still loads is not disturbed
        ray.get(replica.actors[0].leave.remote(), timeout=10)
    assert ends == [RankEnd(replica.name, 0, None)]


def test_ray_reports_no_crash_of_a_rank_that_is_ended_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, replicas: RayReplicas, config: WorkerConfig
) -> None:
    def not_launched(config: WorkerConfig, group: PlacementGroup, begun: Any) -> None:
        processes.append(ray.get(begun.actors[0].status.remote()).process)
        begun.processes = tuple(processes[-1:])

    processes: list[ProcessIdentity] = []
    monkeypatch.setattr(replicas, "_launch", not_launched)
    monkeypatch.setattr(
        "cluster.supervisor.replica._KILLED_WITHIN_S", 30.0
    )  # on a machine that is busy
    errors = GcsErrorSubscriber(address=ray.get_runtime_context().gcs_address)
    errors.subscribe()
    assert replicas.destroy(start(replicas, config))
    assert is_gone(processes[0])
    start(replicas, config)
    os.kill(processes[1].pid, signal.SIGKILL)  # of which it tells
    _, reported = errors.poll(timeout=30)
    assert reported is not None, "not even of the one that was killed"
    assert f"Worker PID: {processes[1].pid}" in reported["error_message"]


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "forgotten by Ray"])
def test_a_stopped_rank_that_a_dead_supervisor_left_is_ended_by_the_next(
    tmp_path: Path, replicas: RayReplicas, config: WorkerConfig, listed: bool
) -> None:
    replica = start(replicas, config)
    os.kill(replica.processes[0].pid, signal.SIGSTOP)
    if not listed:
        ray.kill(replica.actors[0], no_restart=True)
    assert a_supervisors(tmp_path, answer_within_s=2.0).find(TP_SIZES) == []
    assert is_gone(replica.processes[0])


def test_the_newest_replica_of_a_slot_is_adopted_and_the_other_ended(
    tmp_path: Path, replicas: RayReplicas, config: WorkerConfig
) -> None:
    older, newer = start(replicas, config), start(replicas, config)
    assert newer.name.generation > older.name.generation
    (found,) = a_supervisors(tmp_path).find(TP_SIZES)
    assert found.name == newer.name
    assert (is_gone(older.processes[0]), is_gone(newer.processes[0])) == (True, False)


def test_a_rank_that_even_the_kernel_cannot_end_in_time_keeps_no_other_one_alive(
    replicas: RayReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    first, second = (identity_of(rank.pid) for rank in ranks)
    monkeypatch.setattr("cluster.supervisor.replica._GONE_WITHIN_S", 0.2)
    # In an uninterruptible call, say: no test can have the kernel hold a process on request.
    monkeypatch.setattr(
        "cluster.supervisor.replica.is_gone", lambda p: False if p == first else is_gone(p)
    )
    try:
        assert not replicas.destroy(Replica(ReplicaName.new("decode", 0), {}, (first, second)))
        assert ranks[1].wait(10) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def identity_of(pid: int) -> ProcessIdentity:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return dataclasses.replace(own_identity(), pid=pid, start_time_ticks=int(fields[19]))


def test_a_replica_that_cannot_be_launched_leaves_nothing(
    replicas: RayReplicas, config: WorkerConfig
) -> None:
    pools = config.cluster.pools
    two_ranks = dataclasses.replace(pools[config.pool], tensor_parallel=2)
    cluster = dataclasses.replace(config.cluster, pools={**pools, config.pool: two_ranks})
    nowhere = dataclasses.replace(config, cluster=cluster, host="no such host")  # they meet there
    with pytest.raises(ReplicaError):
        start(replicas, nowhere)
    assert replicas.find(TP_SIZES) == []
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def test_what_runs_in_a_pool_that_is_not_known_yet_is_left_alone_until_everything_is_to_end(
    tmp_path: Path, replicas: RayReplicas, config: WorkerConfig
) -> None:
    replica, another = start(replicas, config), a_supervisors(tmp_path)
    assert another.find({"prefill": 1}) == []
    assert is_gone(replica.processes[0]) is False
    assert [found.name for found in another.find(TP_SIZES)] == [replica.name]
    another.clear()
    assert is_gone(replica.processes[0])
    assert another.find(TP_SIZES) == []
