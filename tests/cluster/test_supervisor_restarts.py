"""The supervisor may die or stand still as often as it likes: its replicas go on."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
from ray.exceptions import RayError

from baton.config.workers import RegistryConfig, SupervisorConfig
from cluster.worker.process import MAX_CALLS
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
    model: Path, run_dir: Path
) -> None:
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


def test_a_supervisor_that_stood_still_for_longer_than_any_of_its_limits_kills_no_replica(
    model: Path, run_dir: Path
) -> None:
    config = dataclasses.replace(
        fake_cluster(model, replicas=2),
        registry=RegistryConfig(silent_after_s=1.0, gone_after_s=4.0),
        supervisor=SupervisorConfig(fence_after_s=2.5),
    )
    with running_site(config, run_dir) as site:
        before = live_workers(site.all_live())
        supervisor, expected = site.cluster.supervisor_pid(), site.expect(PROMPT[:50], 20)

        def requests_succeed_for(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                assert run(site.cluster.router_address, PROMPT[:50], 20).ids == expected

        for _ in range(2):
            os.kill(supervisor, signal.SIGSTOP)
            try:
                requests_succeed_for(8.0)
            finally:
                os.kill(supervisor, signal.SIGCONT)
            requests_succeed_for(4.0)  # a fence, and what follows, would come in this time
        fleet = site.all_live()
        assert {n: w.ref.incarnation for n, w in live_workers(fleet).items()} == {
            n: w.ref.incarnation for n, w in before.items()
        }
        assert [pool.last_error for pool in fleet.pools] == ["", ""]
        site.all_sound()
