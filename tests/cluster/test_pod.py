"""What a process knows of the pod that it runs in, and what workers leave there to be found."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from baton.config.cluster import ClusterConfig, parse_config
from baton.config.workers import pod_resource
from baton.v1 import common_pb2, control_pb2
from cluster.node.pod import Pod, PodWorkers
from cluster.pools.pool_settings import own_settings
from cluster.supervisor.bundles import check_room, rank_resources
from cluster.worker.config import WorkerConfig, with_node_settings, worker_config
from kv_transfer.process import ProcessIdentity, identity_of, own_identity

POD = Pod("decode-x1", "10.0.0.7", "node-3")


def cluster_of(runs_on: str = "pods", **pool: object) -> ClusterConfig:
    return parse_config(
        {
            "model": "fake",
            "runs_on": runs_on,
            "pools": {"decode": {"role": "decode"} | pool},
            "router": {"placement": {"local_prefill": "always"}},
        }
    )


def config_of(runs_on: str = "pods", **pool: object) -> WorkerConfig:
    return worker_config(cluster_of(runs_on, **pool), "decode", "decode-0", "head:7101")


def test_a_pod_is_what_the_downward_api_says() -> None:
    reported = {"POD_NAME": "decode-x1", "POD_IP": "10.0.0.7", "NODE_NAME": "node-3"}
    assert Pod.of(reported) == POD
    assert Pod.of({"POD_NAME": "decode-x1"}) == Pod("decode-x1", None, "")
    assert Pod.of({"POD_IP": "10.0.0.7"}) is None


def test_a_worker_in_a_pod_listens_at_the_pods_address_or_else_at_rays() -> None:
    assert with_node_settings(config_of(), POD, "10.0.0.9").host == "10.0.0.7"
    without_ip = dataclasses.replace(POD, ip=None)
    assert with_node_settings(config_of(), without_ip, "10.0.0.9").host == "10.0.0.9"
    assert with_node_settings(config_of(), None, "fd00::9").host == "[fd00::9]"
    at_port = Pod.of({"POD_NAME": "a", "BATON_WORKER_PORT": "7104"})
    assert with_node_settings(config_of(), at_port, "10.0.0.9").settings.port == 7104
    assert with_node_settings(config_of(), POD, "10.0.0.9").settings.port == 0
    assert with_node_settings(config_of("machine"), POD, "10.0.0.9") == config_of("machine")


def test_a_worker_that_has_a_pod_to_itself_has_all_of_its_cores() -> None:
    assert config_of(replicas=2).engine.num_threads is None  # the rank looks for itself


def test_each_rank_asks_for_a_unit_of_its_pool_where_there_are_pods() -> None:
    assert rank_resources(config_of())[pod_resource("decode")] == 1
    assert pod_resource("decode") not in rank_resources(config_of("machine"))


def test_pods_that_may_still_come_are_not_refused() -> None:
    on_gpus = cluster_of(tensor_parallel=8, max_replicas=64, engine={"device": "cuda"})
    check_room("decode", own_settings(on_gpus), {"decode": 64})


# --- what is found in a pod -----------------------------------------------------------------------


def worker(process: ProcessIdentity, incarnation: int = 1) -> control_pb2.WorkerInfo:
    rank = common_pb2.RankAddress(process=process.to_proto())
    ref = common_pb2.WorkerRef(worker_id="decode-0", incarnation=incarnation, ranks=[rank])
    return control_pb2.WorkerInfo(ref=ref, address="10.0.0.7:4000", kv_fingerprint=b"\xff\0")


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodWorkers:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return PodWorkers(POD)


def test_a_worker_is_found_in_its_pod_until_it_strikes_itself(workers: PodWorkers) -> None:
    assert workers.live() == []
    first, second = worker(own_identity()), worker(own_identity(), incarnation=2)
    workers.add(first)
    workers.add(second)
    assert workers.live() == [first, second]
    workers.remove(first)
    assert workers.live() == [second]
    assert POD.folder.stat().st_mode & 0o77 == 0


def test_a_worker_that_was_killed_is_not_found_in_its_pod(workers: PodWorkers) -> None:
    killed = subprocess.Popen(["sleep", "60"])
    identity = identity_of(killed.pid)
    assert identity is not None
    workers.add(worker(identity))
    assert len(workers.live()) == 1
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie: nobody waits for it
    assert workers.live() == []
    killed.wait()


def test_a_pod_is_closed_for_as_long_as_its_containers_own_process_lives(
    workers: PodWorkers,
) -> None:
    assert not workers.is_closed
    container = subprocess.Popen(["sleep", "60"])
    identity = identity_of(container.pid)
    assert identity is not None
    workers.close(identity)
    assert workers.is_closed
    assert workers.live() == []
    container.kill()
    container.wait()
    assert not workers.is_closed


def test_a_container_that_was_started_anew_with_pids_of_its_own_opens_its_pod(
    workers: PodWorkers,
) -> None:
    workers.close(dataclasses.replace(own_identity(), pid_namespace=1))
    assert not workers.is_closed
