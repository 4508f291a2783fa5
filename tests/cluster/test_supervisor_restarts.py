"""The supervisor may die or stand still as often as it likes: its replicas go on."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from baton.config.workers import RegistryConfig, SupervisorConfig
from tests.cluster.whole_cluster import (
    PROMPT,
    fake_cluster,
    incarnations,
    run,
    running_site,
)

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_supervisor_that_stood_still_for_longer_than_any_of_its_limits_kills_no_replica(
    model: Path, run_dir: Path
) -> None:
    config = dataclasses.replace(
        fake_cluster(model, replicas=2),
        registry=RegistryConfig(silent_after_s=1.0, gone_after_s=4.0),
        supervisor=SupervisorConfig(fence_after_s=2.5),
    )
    with running_site(config, run_dir) as site:
        before = incarnations(site.all_live())
        supervisor, expected = site.supervisor_pid(), site.expect(PROMPT[:50], 20)

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
        assert incarnations(fleet) == before
        assert [pool.last_error for pool in fleet.pools] == ["", ""]
        site.all_sound()
