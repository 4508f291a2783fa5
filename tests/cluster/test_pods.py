"""Pools on pods, each a Ray node of its own that joins and leaves: placing, waiting, draining.

Every test begins with the pools' sizes and pods that it needs, and ends with sound books.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config.settings import changed
from baton.config.workers import SupervisorConfig
from baton.control.client import ControlClient
from tests.cluster.pods import (
    DRAINING,
    OWN_PIDS,
    PodSite,
    live_at,
    may_have_own_pids,
    pool_of,
    running_head,
    states_of,
)
from tests.cluster.whole_cluster import (
    CLUSTERS,
    fake_cluster,
    live_workers,
    random_cluster,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

KINDS = ["fake", pytest.param("demo", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=KINDS)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PodSite]:
    config = CLUSTERS[request.param](tmp_path_factory.mktemp("model"))
    one = {name: dataclasses.replace(p, replicas=1) for name, p in config.pools.items()}
    patient = changed(config.router, admission={"fleet_wait_s": 60})  # one worker is a whole pool
    config = dataclasses.replace(config, runs_on="pods", pools=one, router=patient)
    with running_head(config, tmp_path_factory.mktemp("run")) as pods:
        pods.serve()
        site = PodSite(cast(Any, pods), config)
        empty = site.wait_for(lambda seen: [p.pending_replicas for p in seen.pools] == [1, 1])
        assert [pool.num_failed_starts for pool in empty.pools] == [0, 0]
        pods.have(prefill=1, decode=1)
        pods.start_router(config)
        yield site


def test_a_prompt_is_prefilled_on_one_pod_and_decoded_on_another(site: PodSite) -> None:
    fleet = site.settled()
    with site.streams() as asked:
        pass
    for request in asked:
        assert request.result().workers == {"prefill-0", "decode-0"}
    assert len({worker.pod_name for worker in live_workers(fleet).values()}) == 2
    site.all_sound()


def test_a_slot_without_an_open_pod_is_pending_and_live_soon_after_one_joins(site: PodSite) -> None:
    before = site.settled(decode=1)
    num_pods, closed = site.pods.num_of("decode"), site.pods.join("decode")
    with ControlClient(site.pods.control_address) as control:
        control.close_pods([closed.pod.name])
    site.scale("decode", num_pods + 1)
    fleet = site.wait_for(lambda seen: pool_of(seen, "decode").pending_replicas == 1)
    assert pool_of(fleet, "decode").num_failed_starts == 0
    joined, came_at = site.pods.join("decode"), time.monotonic()
    site.wait_for(lambda seen: pool_of(seen, "decode").pending_replicas == 0)
    assert time.monotonic() - came_at < 5  # a second, on a machine with nothing else to do
    after = site.settled(decode=num_pods + 1)
    assert joined.pod.name in {worker.pod_name for worker in live_workers(after).values()}
    kept = live_workers(before)["decode-0"]
    assert live_workers(after)["decode-0"].ref.incarnation == kept.ref.incarnation
    site.pods.end(closed)
    site.all_sound()


@pytest.mark.full
def test_a_pod_that_drains_lets_its_streams_end_and_its_slot_moves_to_another_pod(
    site: PodSite,
) -> None:
    site.pods.have(decode=2)
    before = site.settled(decode=1)
    gone = site.pods.pod_of(before, "decode-0")
    with site.streams():
        draining = gone.drain(60)
        said = finished(draining)
    assert "decode-0 has left" in said
    after = site.settled(decode=1)
    assert site.pods.pod_of(after, "decode-0") is not gone
    assert pool_of(after, "decode").last_error == ""
    site.pods.end(gone)
    site.all_sound()


def finished(draining: subprocess.Popen[str]) -> str:
    """What it said. It has drained its pod, and Ray places nothing there any more."""
    said, _ = draining.communicate(timeout=90)
    assert draining.returncode == 0, said
    assert "closed to Ray" in said
    return said


# --- every combination ----------------------------------------------------------------------------


@pytest.mark.full
def test_scaling_in_drains_the_highest_slot_while_streams_run_and_frees_its_pod(
    site: PodSite,
) -> None:
    site.pods.have(decode=2)
    num_pods = site.pods.num_of("decode")
    before, highest = site.settled(decode=num_pods), f"decode-{num_pods - 1}"
    with site.streams():
        site.scale("decode", num_pods - 1)
        seen = site.wait_for(lambda seen: DRAINING in states_of(seen).values())
        assert [name for name, state in states_of(seen).items() if state == DRAINING] == [highest]
    after = site.settled(decode=num_pods - 1)
    for name, kept in live_workers(after).items():
        assert kept.ref.incarnation == live_workers(before)[name].ref.incarnation
    assert pool_of(after, "decode").last_error == ""
    again = site.settled(decode=num_pods)  # the only pod that is free
    assert site.pods.pod_of(again, highest) is site.pods.pod_of(before, highest)
    site.all_sound()


@pytest.mark.full
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_pod_drains_without_a_supervisor(site: PodSite, signal_: signal.Signals) -> None:
    site.pods.have(decode=2)
    before = site.settled(decode=1)
    gone = site.pods.pod_of(before, "decode-0")
    supervisor = site.pods.supervisor()
    with site.streams():
        draining = gone.drain(60)
        os.kill(supervisor.pid, signal_)
        try:
            finished(draining)
        finally:
            if signal_ is signal.SIGSTOP:
                os.kill(supervisor.pid, signal.SIGCONT)
    after = site.settled(decode=1)
    assert site.pods.pod_of(after, "decode-0") is not gone
    site.pods.end(gone)
    site.all_sound()


@pytest.mark.full
def test_a_replica_never_lands_on_a_pod_of_another_pool_however_long_it_waits(
    site: PodSite,
) -> None:
    site.pods.have(decode=3)
    site.settled(decode=1)  # two are free
    site.scale("prefill", 3)
    try:
        site.wait_for(lambda seen: pool_of(seen, "prefill").pending_replicas == 2)
        with pytest.raises(AssertionError, match="it did not happen"):
            site.wait_for(lambda seen: pool_of(seen, "prefill").pending_replicas < 2, timeout_s=5)
    finally:
        site.scale("prefill", 1)
    site.settled(decode=3)
    site.settled(decode=1)


@pytest.mark.full
def test_a_pod_that_is_lost_without_a_drain_loses_no_token_and_its_slot_moves(
    site: PodSite,
) -> None:
    site.pods.have(decode=2)
    before = site.settled(decode=1)
    lost = site.pods.pod_of(before, "decode-0")
    with site.streams():
        lost.node.kill()
    after = site.settled(decode=1)
    assert site.pods.pod_of(after, "decode-0") is not lost
    site.pods.end(lost)


@pytest.mark.full
def test_a_pod_drains_without_rays_head(model: Path, run_dir: Path) -> None:
    config = dataclasses.replace(fake_cluster(model, replicas=1), runs_on="pods")
    with running_head(config, run_dir) as pods:
        pods.serve()
        pods.have(prefill=1, decode=1)
        site = PodSite(cast(Any, pods), config)
        gone = pods.pod_of(site.settled(), "decode-0")
        pods.start_router(config)
        with site.streams():
            pods.head.kill()
            draining = gone.drain(60)
            said, _ = draining.communicate(timeout=90)
        assert draining.returncode == 0, said
        assert "not closed to Ray, trying again: " in said
        assert "decode-0 has left" in said


@pytest.mark.full
def test_a_replica_of_two_ranks_fills_a_pod_that_has_room_for_both(
    model: Path, run_dir: Path
) -> None:
    config = random_cluster(model)
    pools = {name: dataclasses.replace(pool, replicas=1) for name, pool in config.pools.items()}
    pools["decode"] = dataclasses.replace(pools["decode"], tensor_parallel=2)
    with running_head(dataclasses.replace(config, runs_on="pods", pools=pools), run_dir) as pods:
        pods.serve()
        pods.have(prefill=1, decode=1)  # which is too small
        site = PodSite(cast(Any, pods), config)
        site.wait_for(lambda seen: [p.live_replicas for p in seen.pools] == [1, 0])
        assert pool_of(site.wait_for(lambda seen: True), "decode").pending_replicas == 1
        fits = pods.join("decode", num_ranks=2)
        assert site.pods.pod_of(site.settled(), "decode-0") is fits
        pods.start_router(config)
        with site.streams():
            pass
        site.all_sound()


@pytest.mark.full
@pytest.mark.skipif(not may_have_own_pids(), reason="no process may have pids of its own here")
def test_a_hung_replica_among_process_ids_of_its_own_is_ended_in_its_pod_and_that_is_proved(
    model: Path, run_dir: Path
) -> None:
    config = dataclasses.replace(
        fake_cluster(model, replicas=1),
        runs_on="pods",
        supervisor=SupervisorConfig(fence_after_s=1.0),
    )
    with running_head(config, run_dir) as pods:
        pods.serve()
        started = [pods.start_pod(pool, run_by=OWN_PIDS) for pool in ("prefill", "decode")]
        pods.wait_until_up(*started)
        site = PodSite(cast(Any, pods), config)
        before = live_workers(site.settled())["decode-0"]
        rank = started[1].rank()
        assert rank.pid != before.ref.ranks[0].process.pid
        os.kill(rank.pid, signal.SIGSTOP)
        after = site.wait_for_recreated(site.wait_for(lambda seen: True), "decode-0")
        assert live_workers(after)["decode-0"].pod_name == before.pod_name
        assert not Path(f"/proc/{rank.pid}").exists()
        site.scale("decode", 0)
        site.wait_for(lambda seen: live_at(seen, {"prefill": 1, "decode": 0}))
        assert "known to be over" not in (run_dir / "supervisor.log").read_text()
        assert len(list((run_dir / "processes").iterdir())) == 1
