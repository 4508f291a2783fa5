"""However often the supervisor dies, its replicas go on, and in the end none is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ray.exceptions import RayError

from cluster.rank_actor import MAX_CALLS
from tests.cluster.whole_cluster import (
    PROMPT,
    Site,
    fake_cluster,
    live_workers,
    run,
    running_site,
)

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(600)]


def wait_for_next_supervisor(site: Site, killed: int) -> int:
    give_up_at = time.monotonic() + 60
    while True:
        try:
            pid = site.cluster.supervisor_pid()
        except RayError:
            pid = killed
        if pid != killed:
            return pid
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_replicas_outlive_more_supervisors_than_a_rank_answers_calls_at_once(
    tmp_path: Path,
) -> None:
    (model := tmp_path / "model").mkdir()
    (run_dir := tmp_path / "run").mkdir()
    with running_site(fake_cluster(model, replicas=1), run_dir) as site:
        before = live_workers(site.all_live())
        supervisor = site.cluster.supervisor_pid()
        for _ in range(MAX_CALLS + 4):
            os.kill(supervisor, signal.SIGKILL)
            supervisor = wait_for_next_supervisor(site, supervisor)
            after = live_workers(site.all_live())
            assert {n: w.ref.incarnation for n, w in after.items()} == {
                n: w.ref.incarnation for n, w in before.items()
            }
            assert run(site.cluster.router_address, PROMPT[:50], 20).ids == site.expect(
                PROMPT[:50], 20
            )
        site.all_sound()
        assert len(list((run_dir / "processes").iterdir())) == 2
    assert list((run_dir / "processes").iterdir()) == []
