"""`baton up --autoscale` to zero and back: who comes meanwhile is held, and answered as ever."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config.cluster import ClusterConfig
from baton.config.planner import PlannerConfig
from baton.config.settings import changed
from baton.control.client import ControlClient
from baton.v1 import control_pb2
from cluster.local.process_tree import descendants, wait_until_gone
from tests.cluster.whole_cluster import PROMPT, fake_cluster, run

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(240)]

FLEET_WAIT_S = 0.5
PLANNER = PlannerConfig(
    panic_window_s=2.0,
    stable_window_s=4.0,
    scale_in_hold_s=0.0,
    warm_up_s=0.0,
    scale_to_zero_after_s=4.0,
)


def stopping_cluster(folder: Path) -> ClusterConfig:
    config = fake_cluster(folder, replicas=1)
    pools = {
        name: dataclasses.replace(pool, min_replicas=0, max_replicas=2)
        for name, pool in config.pools.items()
    }
    router = changed(config.router, admission={"fleet_wait_s": FLEET_WAIT_S})
    return dataclasses.replace(config, pools=pools, router=router, planner=PLANNER)


@contextlib.contextmanager
def autoscaled(file: Path) -> Iterator[tuple[str, str]]:
    """The router's and the control service's addresses; nothing is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "up", "--autoscale", "-f", str(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = ""
        while "ctrl-C ends" not in said:
            line = process.stdout.readline()
            assert line, f"it has ended: {said}"
            said += line
        router = re.search(r"is served at (\S+)", said)
        control = re.search(r"control service at ([^\s;]+)", said)
        assert router is not None
        assert control is not None
        yield router[1], control[1]
        processes = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 0, rest
        assert wait_until_gone(processes, 5.0) == set()
        assert "all pools stop together" in rest
        assert "all pools start together, requests held: " in rest
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_stopped(control: str) -> None:
    """Both pools, and not one worker is left."""

    def is_stopped(fleet: control_pb2.WatchFleetResponse) -> bool:
        gone = control_pb2.WORKER_STATE_GONE
        workers = [worker for worker in fleet.workers if worker.state != gone]
        return not workers and not any(pool.desired_replicas for pool in fleet.pools)

    with ControlClient(control) as client:
        assert any(map(is_stopped, client.watch_fleet(60.0)))


def test_pools_that_stopped_start_again_for_the_next_request_which_outwaits_their_start(
    tmp_path: Path,
) -> None:
    (folder := tmp_path / "model").mkdir()
    file = tmp_path / "cluster.yaml"
    file.write_text(stopping_cluster(folder).to_yaml())
    with autoscaled(file) as (router, control):
        before = run(router, PROMPT, 20)
        for _ in range(2):
            wait_stopped(control)
            asked_at_s = time.monotonic()
            answer = run(router, PROMPT, 20)
            waited_s = time.monotonic() - asked_at_s
            assert answer.ids == before.ids
            assert waited_s > FLEET_WAIT_S, "nobody was there to answer at once"
            print(f"held and answered within {waited_s:.1f} s")
