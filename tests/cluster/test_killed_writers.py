"""Prefill workers that are killed, or stopped, in the middle of handoffs over TCP.

Each is in a pod with process ids of its own. What it leaves in quarantine comes back, and no stream
is changed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cluster.pods import OWN_PIDS, PodSite, may_have_own_pids, running_head
from tests.cluster.whole_cluster import (
    Fleet,
    books_of,
    fake_cluster,
    freeze_mid_push,
    incarnations,
    live_workers,
    run,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not may_have_own_pids(), reason="no process may have pids of its own here"),
]
_NUM_STREAMS = 16
_FREE_WITHIN_S = 10.0


def streams_while(site: PodSite, fleet: Fleet, worker_id: str, then: Callable[[int], None]) -> None:
    """Stop a prefill worker in the middle of a push, do `then` with its pid, and compare every
    stream with its quiet run."""
    num_steps = site.books(fleet)[worker_id].num_steps
    asked = [site.new_prompt(400) for _ in range(_NUM_STREAMS)]
    with ThreadPoolExecutor(_NUM_STREAMS) as threads:
        running = [threads.submit(run, site.pods.router_address, p, 20) for p in asked]
        pid = site.pods.pod_of(fleet, worker_id).rank().pid
        freeze_mid_push(site, fleet, worker_id, num_steps, pid)
        then(pid)
        answers = [request.result(90).ids for request in running]
    assert answers == site.expected(asked, [20] * _NUM_STREAMS)


@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=pytest.mark.full)])
def test_no_blocks_stay_in_quarantine_after_kills_over_tcp_among_pids_of_their_own(
    tmp_path: Path, num_kills: int
) -> None:
    config = fake_cluster(tmp_path / "model")
    pools = config.pools | {"decode": dataclasses.replace(config.pools["decode"], replicas=1)}
    config = dataclasses.replace(config, runs_on="pods", pools=pools)
    (run_dir := tmp_path / "run").mkdir()
    with running_head(config, run_dir) as pods:
        pods.environment["UCX_TLS"] = "tcp"
        pods.serve()
        started = [pods.start_pod(p, run_by=OWN_PIDS) for p in ("prefill", "prefill", "decode")]
        pods.wait_until_up(*started)
        pods.start_router(config)
        site = PodSite(cast(Any, pods), config)
        first = site.all_live()
        decode = live_workers(first)["decode-0"].address

        def quarantined() -> int:
            return books_of(pods.control_address, decode).num_quarantined_blocks

        def kill(pid: int) -> None:
            os.kill(pid, signal.SIGKILL)
            wait_until(quarantined)
            wait_until(lambda: not quarantined(), _FREE_WITHIN_S, "its blocks stay in quarantine")

        def stop_for_a_while(pid: int) -> None:
            wait_until(quarantined)  # its handoffs are given up
            os.kill(pid, signal.SIGCONT)

        for number in range(num_kills):
            before, worker_id = site.all_live(), f"prefill-{number % 2}"
            streams_while(site, before, worker_id, kill)
            site.wait_for_recreated(before, worker_id)
        streams_while(site, site.all_live(), "prefill-0", stop_for_a_while)
        site.all_sound()
        assert incarnations(site.all_live())["decode-0"] == incarnations(first)["decode-0"]
