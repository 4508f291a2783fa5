"""A pool that is added to a running cluster is like the others, even after its supervisor ends."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config.cluster import ClusterConfig, ControlConfig, PoolConfig
from baton.control.client import ControlClient
from baton.errors import AlreadyExistsError, ConfigError, InUseError
from baton.fleet import Role
from cluster.supervisor.run_dir import state_file
from cluster.worker.rank import free_port
from tests.cluster.pods import PodCluster, running_head
from tests.cluster.whole_cluster import (
    Fleet,
    Site,
    fake_cluster,
    incarnations,
    live_workers,
    running_site,
)

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(400)]

ADDED = "decode-7f3a1"


def text_of(config: ClusterConfig, **engine: int) -> str:
    """What tells of another decode pool, of the cluster's own settings."""
    pool = PoolConfig(role=Role.DECODE, engine=engine)
    pools = {ADDED: pool}
    if config.runs_on == "machine":  # whose files hold what can serve by itself
        pools["prefill"] = PoolConfig(role=Role.PREFILL)
    return dataclasses.replace(config, pools=pools).to_yaml()


def sizes(fleet: Fleet) -> dict[str, tuple[int, int]]:
    return {pool.name: (pool.live_replicas, pool.desired_replicas) for pool in fleet.pools}


def places(fleet: Fleet, pool: str) -> dict[str, str]:
    """Pods by worker ids."""
    (reported,) = (each for each in fleet.pools if each.name == pool)
    return {place.worker_id: place.pod_name for place in reported.places}


def test_a_pool_that_was_added_serves_outlives_its_supervisor_and_leaves_nothing(
    model: Path, run_dir: Path
) -> None:
    config = fake_cluster(model, replicas=1)
    with (
        running_site(config, run_dir) as site,
        ControlClient(site.cluster.control_address) as control,
    ):
        text = text_of(config)
        with pytest.raises(ConfigError, match="runs_on: must be machine") as refused:
            control.add_pool(ADDED, text_of(dataclasses.replace(config, runs_on="pods")), 1)
        assert refused.value.field == "runs_on"
        control.add_pool(ADDED, text, 1)
        three = {"prefill": (1, 1), "decode": (1, 1), ADDED: (1, 1)}
        before = site.wait_for(lambda seen: sizes(seen) == three)
        assert places(before, ADDED) == {f"{ADDED}-0": ""}
        control.set_replicas("decode", 0)
        alone = {"prefill": (1, 1), "decode": (0, 0), ADDED: (1, 1)}
        before = site.wait_for(lambda seen: sizes(seen) == alone and len(live_workers(seen)) == 2)
        asked = [site.ask_new()]
        assert asked[0][1].workers == {"prefill-0", f"{ADDED}-0"}

        os.kill(site.supervisor_pid(), signal.SIGKILL)
        asked.append(site.ask_new())
        after = site.wait_for(lambda seen: sizes(seen) == alone)
        assert incarnations(after) == incarnations(before)
        site.check(asked)
        with ControlClient(site.cluster.control_address) as again:
            again.add_pool(ADDED, text, 5)  # known, and so left as it is
            with pytest.raises(AlreadyExistsError):
                again.add_pool(ADDED, text_of(config, max_num_seqs=3), 1)
            with pytest.raises(InUseError, match="has 1 replicas"):
                again.remove_pool(ADDED)
            again.set_replicas("decode", 1)
            again.set_replicas(ADDED, 0)
            site.wait_for(lambda seen: not places(seen, ADDED))
            again.remove_pool(ADDED)
        site.all_sound()
        assert len(list((run_dir / "processes").iterdir())) == 2
        os.kill(site.supervisor_pid(), signal.SIGKILL)
        assert set(sizes(site.all_live())) == {"prefill", "decode"}  # it does not come back


def test_on_pods_a_cluster_begins_without_pools_and_reports_where_each_replica_starts(
    model: Path, run_dir: Path
) -> None:
    whole = dataclasses.replace(
        fake_cluster(model, replicas=1),
        runs_on="pods",
        control=ControlConfig(port=free_port("127.0.0.1")),
    )
    with running_head(dataclasses.replace(whole, pools={}), run_dir) as pods:
        pods.serve()
        site = Site(cast(Any, pods), whole)
        assert sizes(site.wait_for(lambda seen: True)) == {}
        add_pools(pods, whole)
        site.wait_for(lambda seen: [p.pending_replicas for p in seen.pools] == [1, 1])
        pods.have(**{"prefill": 1, ADDED: 1})
        started = site.wait_for(lambda seen: places(seen, ADDED)[f"{ADDED}-0"])
        assert f"{ADDED}-0" not in live_workers(started)
        both = {"prefill": (1, 1), ADDED: (1, 1)}
        serving = site.wait_for(lambda seen: sizes(seen) == both)
        check_pods(pods, serving)

        os.kill(pods.supervisor().pid, signal.SIGKILL)
        after = site.wait_for(lambda seen: sizes(seen) == both and places(seen, ADDED))
        assert incarnations(after) == incarnations(serving)
        check_pods(pods, after)

        state_file(run_dir).unlink()  # as with a head pod that was lost
        os.kill(pods.supervisor().pid, signal.SIGKILL)
        lost = site.wait_for(lambda seen: not seen.pools and len(live_workers(seen)) == 2)
        assert incarnations(lost) == incarnations(serving)
        add_pools(pods, whole)
        again = site.wait_for(lambda seen: sizes(seen) == both and places(seen, ADDED))
        assert incarnations(again) == incarnations(serving)
        check_pods(pods, again)
        pods.start_router(whole)
        site.check([site.ask_new()])


def add_pools(pods: PodCluster, whole: ClusterConfig) -> None:
    """Of both, each by a file with that pool alone."""
    only = dataclasses.replace(whole, pools={"prefill": whole.pools["prefill"]})
    with ControlClient(pods.control_address) as control:
        control.add_pool("prefill", only.to_yaml(), 1)
        control.add_pool(ADDED, text_of(whole), 1)


def check_pods(pods: PodCluster, fleet: Fleet) -> None:
    """Places tell the pods that the workers are on."""
    pods.check(fleet)
    for name, worker in live_workers(fleet).items():
        assert places(fleet, worker.pool)[name] == worker.pod_name
