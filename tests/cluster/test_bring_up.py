"""A cluster that cannot start says why, soon; one whose `baton up` is killed leaves nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.config.cluster import ClusterConfig
from baton.config.workers import RegistryConfig
from baton.errors import ConfigError, UnavailableError
from cluster.local.bring_up import _build_kernels, _wait_for_pools, up
from cluster.local.process_tree import descendants, wait_until_gone, watched_over
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from tests.cluster.pool_settings import settings_of
from tests.cluster.whole_cluster import fake_cluster
from tests.engine import checkpoints
from tests.identities import OPERATOR

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def too_small(folder: Path) -> ClusterConfig:
    config = fake_cluster(folder, replicas=1)
    return dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, num_blocks=None, kv_memory_bytes=1)
    )


def with_torch(config: ClusterConfig) -> ClusterConfig:
    engine = dataclasses.replace(config.engine, backend="torch", device="cpu", dtype="float32")
    return dataclasses.replace(config, engine=engine)


def broken_weights(folder: Path) -> ClusterConfig:
    config = fake_cluster(folder, replicas=1)
    checkpoints.save("llama", folder)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    return with_torch(config)


def no_transport(folder: Path) -> ClusterConfig:
    config = fake_cluster(folder, replicas=1)
    return dataclasses.replace(
        config, transfer=dataclasses.replace(config.transfer, ucx_library="libnowhere.so.9")
    )


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        pytest.param(
            too_small,
            "ValueError: kv_memory_bytes=1 holds no 2 blocks of KV",
            marks=pytest.mark.full,
        ),
        pytest.param(broken_weights, "model.safetensors", marks=pytest.mark.full),
        (no_transport, "libnowhere"),
    ],
)
def test_a_cluster_whose_workers_cannot_start_fails_soon_with_their_error(
    model: Path, run_dir: Path, make: type, cause: str
) -> None:
    config, before, began_at = make(model), descendants(), time.monotonic()
    with pytest.raises(UnavailableError) as failure:
        up(config, run_dir=run_dir)
    assert cause in failure.value.message
    named = re.search(
        r"the (prefill|decode) pool does not start: \1-0: .*log: (.*)\)", str(failure.value)
    )
    assert named is not None, failure.value
    assert cause in Path(named[2]).read_text()
    assert time.monotonic() - began_at < 90  # 8 s alone on a machine
    assert wait_until_gone(descendants() - before, 5.0) == set()


@pytest.mark.full
def test_a_cluster_on_more_gpus_than_the_machine_has_is_refused_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where there are some
    config, before = fake_cluster(tmp_path, replicas=1), descendants()
    engine = dataclasses.replace(config.engine, backend="torch", device="cuda")
    with pytest.raises(ConfigError, match=r"would need 2 GPUs, .*there are 0"):
        up(dataclasses.replace(config, engine=engine))
    assert wait_until_gone(descendants() - before, 5.0) == set()


def test_a_cluster_on_pods_is_refused_here_before_anything_starts(tmp_path: Path) -> None:
    config, before = fake_cluster(tmp_path, replicas=1), descendants()
    with pytest.raises(ConfigError, match="runs_on must be machine, not pods"):
        up(dataclasses.replace(config, runs_on="pods"))
    assert descendants() == before


def test_ray_that_cannot_start_is_reported_on_one_line_and_leaves_no_process(
    model: Path, run_dir: Path
) -> None:
    config, before = fake_cluster(model, replicas=1), descendants()
    (shared := run_dir / "shared").mkdir(0o777)
    shared.chmod(0o1777)
    with pytest.raises(ConfigError, match="not yours alone"):
        up(config, run_dir=shared)
    (deep := run_dir / ("deep" * 30)).mkdir()
    with pytest.raises(UnavailableError, match=r"Ray does not start: .*path length cannot exceed"):
        up(config, run_dir=deep)
    (run_dir / "ray").touch()
    with pytest.raises(UnavailableError, match=r"Ray does not start: .*exists"):
        up(config, run_dir=run_dir)
    assert wait_until_gone(descendants() - before, 5.0) == set()


def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty := tmp_path / "no-programs").mkdir()
    monkeypatch.setenv("PATH", str(empty))
    config, reported = fake_cluster(tmp_path, replicas=1), []
    _build_kernels(config, reported.append)  # the fake engine needs none
    assert reported == []
    _build_kernels(with_torch(config), reported.append)
    assert reported == [
        "building the CPU kernels",
        "using torch's kernels, several times slower "
        "(NativeBuildError: no compiler (c++ or g++ or clang++) on this machine)",
    ]


def test_the_logs_stay_after_an_error_that_nobody_foresaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = fake_cluster(tmp_path, replicas=1)

    def ends_with(error: BaseException) -> int:
        def at_the_first_step(_: str) -> None:
            raise error

        with pytest.raises(type(error)):
            up(config, at_the_first_step)
        return len(list(tmp_path.glob("baton-*")))

    assert ends_with(KeyboardInterrupt()) == 0
    assert ends_with(ArithmeticError("a bug")) == 1


async def test_pools_that_are_not_live_in_time_are_named_with_the_setting() -> None:
    registry = Registry(RegistryConfig(), time.monotonic)
    registry.pools.add(settings_of(), 2)
    async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as control:
        problem = r"not live after 1\.5 s \(supervisor\.start_timeout_s\): .*decode 0/2$"
        with pytest.raises(UnavailableError, match=problem):
            await asyncio.to_thread(_wait_for_pools, control, OPERATOR, print, 1.5)


def test_kill_9_of_baton_up_leaves_no_process_behind(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(fake_cluster(model, replicas=1).to_yaml())
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "up", "-f", str(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert any("is served at" in line for line in process.stdout)
        processes = descendants(process.pid)
        assert len(processes) >= 8
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert wait_until_gone(processes, 30.0) == set()


def test_the_reaper_ends_what_a_killed_process_leaves_even_if_it_does_not_listen(
    tmp_path: Path,
) -> None:
    reported = tmp_path / "pids"
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(100)"
    )
    script = f"""
import json, os, pathlib, subprocess, sys, time
from cluster.local.process_tree import watched_over
from cluster.registry.registry import Registry
from baton.fleet import Role
from tests.identities import OPERATOR
with watched_over() as reaper:
    child = subprocess.Popen([sys.executable, "-c", {stubborn!r}], stdout=subprocess.PIPE,
                             start_new_session=True, env=os.environ | reaper.variables)
    child.stdout.readline()
    pathlib.Path({str(reported)!r} + ".new").write_text(json.dumps(child.pid))
    os.rename({str(reported)!r} + ".new", {str(reported)!r})
    time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    give_up_at = time.monotonic() + 60
    while not reported.exists():
        assert process.poll() is None
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    left = descendants(process.pid)
    assert json.loads(reported.read_text()) in {found.pid for found in left}
    assert len(left) == 2  # the reaper too
    process.kill()
    process.wait()
    assert wait_until_gone(left, 30.0) == set()


def test_at_the_end_the_reaper_ends_what_is_marked_or_named_but_nothing_else() -> None:
    before = descendants()
    with watched_over() as reaper:
        sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
        known = descendants()
        named = subprocess.Popen(sleep)
        reaper.name(descendants() - known)
        marked = subprocess.Popen(sleep, env=os.environ | reaper.variables)
        other = subprocess.Popen(sleep)
        assert len(descendants() - before) == 4
    try:
        assert named.wait(10) == marked.wait(10) == -signal.SIGTERM
        assert {found.pid for found in descendants() - before} == {other.pid}
    finally:
        for child in (named, marked, other):
            child.kill()
            child.wait()
