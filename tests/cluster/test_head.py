"""What runs in the head pod starts a supervisor, or adopts the one that is there, and leaves it."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config.cluster import ControlConfig
from cluster.supervisor import head
from cluster.worker.rank import free_port
from kv_transfer.process import ProcessIdentity, is_gone
from tests.cluster.pods import running_head
from tests.cluster.whole_cluster import Site, fake_cluster, incarnations, live_workers


def test_without_ray_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "cluster.yaml").write_text("runs_on: pods")
    nobody = f"127.0.0.1:{free_port('127.0.0.1')}"
    options = ["--config", str(file), "--run-dir", str(tmp_path), "--ray-address", nobody]
    assert head.main([*options, "--ray-within", "0.1"]) == 3
    reported = capsys.readouterr().err
    assert f"no Ray answers at {nobody} within 0.1 s" in reported
    assert "Start one here with `ray start --head`" in reported


def test_a_cluster_for_one_machine_is_not_served_on_a_ray_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "cluster.yaml").write_text("{}")
    assert head.main(["--config", str(file), "--run-dir", str(tmp_path)]) == 2
    assert "cluster.yaml: runs_on: must be pods" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--run-dir", "x"], "give --config and --run-dir, or --end"),
        (["--config", "nowhere.yaml", "--run-dir", "x"], "nowhere.yaml: cannot be read"),
        (["--end", "--ray-address", "here"], "--ray-address must be HOST:PORT"),
    ],
)
def test_wrong_usage_is_reported_before_ray_is_looked_for(
    options: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = head.main(options)
    except SystemExit as left:  # as argparse does
        status = int(str(left.code))
    assert status == 2
    assert reported in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_head_that_leaves_ends_nothing_the_next_adopts_and_only_end_ends_replicas(
    model: Path, run_dir: Path
) -> None:
    config = dataclasses.replace(fake_cluster(model, replicas=1), runs_on="pods")
    with running_head(config, run_dir) as pods:
        serving = pods.serve()
        pods.have(prefill=1, decode=1)
        site = Site(cast(Any, pods), config)
        before = incarnations(site.all_live())
        serving.process.terminate()
        assert serving.process.wait(20) == 0
        supervisor = pods.supervisor()
        pods.serve()
        assert pods.supervisor() == supervisor
        fleet = site.all_live()
        assert incarnations(fleet) == before
        workers = live_workers(fleet).values()
        ranks = {ProcessIdentity.from_proto(w.ref.ranks[0].process) for w in workers}
        assert pods.end_all().returncode == 0
        assert all(map(is_gone, ranks))
        again = pods.end_all()
        assert (again.returncode, "no supervisor is running" in again.stdout) == (0, True)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_supervisor_that_cannot_serve_is_reported_and_the_next_head_starts_another(
    model: Path, run_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        control = ControlConfig(port=port)
        config = dataclasses.replace(
            fake_cluster(model, replicas=1), runs_on="pods", control=control
        )
        with running_head(config, run_dir) as pods:
            refused = subprocess.run(
                pods.head_command(),
                env=os.environ | pods.environment,
                capture_output=True,
                text=True,
                timeout=90,
            )
            assert refused.returncode == 3
            assert f"cannot listen on 127.0.0.1:{port}" in refused.stderr
            taken.close()
            pods.serve()
            assert pods.control_address == f"127.0.0.1:{port}"


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_head_whose_ray_has_ended_leaves_at_once_for_its_container_to_be_started_anew(
    model: Path, run_dir: Path
) -> None:
    config = dataclasses.replace(fake_cluster(model, replicas=1), runs_on="pods")
    with running_head(config, run_dir) as pods:
        serving = pods.serve()
        (gcs,) = (process for process in pods.head.tree() if process.name == "gcs_server")
        os.kill(gcs.pid, signal.SIGKILL)
        assert serving.process.wait(30) == 3  # Ray itself ends it after 60 s
