"""Prefill workers that are killed, or stopped, in the middle of handoffs over TCP.

Each is in a pod with process ids of its own. What it leaves in quarantine comes back, and no stream
is changed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cluster.pods import OWN_PIDS, PodSite, may_have_own_pids, running_head
from tests.cluster.whole_cluster import (
    PROMPT,
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
    pytest.mark.skipif(not may_have_own_pids(), reason="no process may have pids of its own here"),
]
_NUM_STREAMS = 16
_FREE_WITHIN_S = 10.0


def streams_while(site: PodSite, fleet: Fleet, worker_id: str, then: Callable[[int], None]) -> None:
    """Stop a prefill worker in the middle of a push, do `then` with its pid, and compare every
    stream with its quiet run."""
    num_steps = site.books(fleet)[worker_id].num_steps
    salt = time.monotonic_ns()
    prompts = [
        [5 + (salt >> 7 * n) % 200, n + 3, *PROMPT[n : n + 400]] for n in range(_NUM_STREAMS)
    ]
    with ThreadPoolExecutor(_NUM_STREAMS) as threads:
        running = [threads.submit(run, site.pods.router_address, p, 20) for p in prompts]
        pid = site.pods.pod_of(fleet, worker_id).rank().pid
        freeze_mid_push(site, fleet, worker_id, num_steps, pid)
        then(pid)
        answers = [request.result(90) for request in running]
    for answer, ids in zip(answers, site.expected(prompts, [20] * _NUM_STREAMS), strict=True):
        assert answer.ids == ids


@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(2, marks=pytest.mark.timeout(240)),
        pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(2400)]),
    ],
)
def test_no_blocks_stay_in_quarantine_after_kills_over_tcp_among_pids_of_their_own(
    num_kills: int, tmp_path: Path
) -> None:
    config = fake_cluster(tmp_path / "model")
    pools = dict(config.pools)
    pools["decode"] = dataclasses.replace(pools["decode"], replicas=1)
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
        decode = live_workers(first)["decode-0"]
        num_quarantined = 0

        def kill(pid: int) -> None:
            nonlocal num_quarantined
            os.kill(pid, signal.SIGKILL)
            give_up_at = time.monotonic() + _FREE_WITHIN_S
            while books_of(decode.address).num_open_leases > 0:
                num_quarantined += books_of(decode.address).num_quarantined_blocks
                assert time.monotonic() < give_up_at, books_of(decode.address)
                time.sleep(0.1)

        for number in range(num_kills):
            before, worker_id = site.all_live(), f"prefill-{number % 2}"
            streams_while(site, before, worker_id, kill)
            wait_until(lambda: not books_of(decode.address).num_quarantined_blocks, _FREE_WITHIN_S)
            site.wait_for_recreated(before, worker_id)
        assert num_quarantined > 0, "no kill left anything in quarantine"

        def stop_for_a_while(pid: int) -> None:
            """Until its handoffs are given up, which takes their blocks into quarantine."""
            wait_until(lambda: books_of(decode.address).num_quarantined_blocks, 20)
            os.kill(pid, signal.SIGCONT)

        before = site.all_live()
        streams_while(site, before, "prefill-0", stop_for_a_while)
        site.all_sound()
        assert incarnations(site.all_live())["decode-0"] == incarnations(first)["decode-0"]
