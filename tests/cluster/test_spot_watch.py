"""A notice that a machine ends drains the pod on it, with nobody's help."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cluster.fleet_processes import started
from tests.cluster.metadata_server import MetadataServer, serving_metadata
from tests.cluster.one_pod import CONFIG, streaming
from tests.cluster.pods import PodProcess, PodSite, running_head
from tests.cluster.whole_cluster import LIVE, fake_cluster, live_workers


def command(cloud: str, served: MetadataServer, *options: str) -> list[str]:
    asked = [f"--cloud={cloud}", f"--address={served.address}", "--timeout=60"]
    return [sys.executable, "-m", "cluster.node.spot_watch", *asked, *options]


@contextlib.asynccontextmanager
async def watching(cloud: str, served: MetadataServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """As it runs in a worker's container."""
    process = await asyncio.create_subprocess_exec(
        *command(cloud, served), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize(
    "cloud",
    ["aws", *(pytest.param(each, marks=pytest.mark.full) for each in ("gcp", "azure"))],
)
async def test_a_pod_on_a_machine_that_is_called_back_drains_and_its_stream_ends_there(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    with serving_metadata() as served:
        async with (
            streaming(tmp_path, monkeypatch, kit, 2000) as pod,
            watching(cloud, served) as watch,
        ):
            await asyncio.to_thread(served.until_asked, 2)
            assert pod.fleet.worker("decode-0").state == LIVE
            served.call_back(cloud, in_s=60)
            assert not pod.link.of("last").finished
            said, _ = await asyncio.wait_for(watch.communicate(), 90)
            assert watch.returncode == 0, said.decode()
            assert "spot_watch: this machine ends: " in said.decode()
            assert "decode-0 has left" in said.decode()
            assert pod.link.of("last").in_order() == kit.oracle.tokens(pod.spec)
            assert await asyncio.wait_for(pod.fleet.processes["decode-0"].wait(), 5) == 0


async def test_what_a_notice_leaves_no_time_for_is_given_up_before_the_machine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    with serving_metadata() as served:
        async with (
            streaming(tmp_path, monkeypatch, kit, 5000) as pod,
            watching("aws", served) as watch,
        ):
            await asyncio.to_thread(served.until_asked, 2)
            served.call_back("aws", in_s=9)
            ends_at = time.monotonic() + 9
            await asyncio.wait_for(pod.fleet.processes["decode-0"].wait(), 30)
            assert time.monotonic() < ends_at
            assert len(pod.link.of("last").tokens) < 5000
            said, _ = await asyncio.wait_for(watch.communicate(), 30)
            (within_s,) = re.findall(r"draining pod pod-a, within ([0-9.]+) s", said.decode())
            assert 4 <= float(within_s) <= 9
            assert watch.returncode == 0, said.decode()


async def test_a_worker_that_had_yet_to_load_at_a_notice_serves_in_its_containers_next_life_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("POD_NAME", "pod-a")
    (config := tmp_path / "cluster.yaml").write_text(CONFIG.replace("}", ", replicas: 0}", 1))
    async with started(config) as fleet:
        with serving_metadata() as served, sleeping_container(served) as container:
            served.call_back("aws", in_s=60)
            said = await asyncio.to_thread(container.stdout.readline)
            while "pod pod-a is drained" not in said:
                said = await asyncio.to_thread(container.stdout.readline)
                assert said, "it says no more"
            await fleet.start("decode", 0)
            live = asyncio.create_task(fleet.until(lambda seen: len(seen.workers) > 0))
            left = asyncio.create_task(fleet.processes["decode-0"].wait())
            await asyncio.wait({live, left}, return_when=asyncio.FIRST_COMPLETED)
            assert left.done()
            assert left.result() == 0
            assert not live.done()
            live.cancel()
        await fleet.start("decode", 0)
        await fleet.until(lambda seen: [each.state for each in seen.workers] == [LIVE])


@contextlib.contextmanager
def sleeping_container(served: MetadataServer, *options: str) -> Iterator[Any]:
    """As a worker's container has it: the shell becomes Ray."""
    container = subprocess.Popen(
        f"{shlex.join(command('aws', served, *options))} & exec sleep 600",
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield container
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(container.pid, signal.SIGKILL)
        container.communicate()


async def test_a_service_that_is_away_at_first_is_reported_once_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("POD_NAME", "pod-a")
    with serving_metadata() as served:
        served.is_away = True
        async with watching("aws", served) as watch:
            await asyncio.to_thread(served.until_asked, 3)
            served.call_back("aws", in_s=60)
            served.is_away = False
            said, _ = await asyncio.wait_for(watch.communicate(), 60)
    assert watch.returncode == 0, said.decode()
    assert said.decode().count("the metadata service does not answer") == 1
    assert "pod pod-a is drained" in said.decode()


async def test_a_container_whose_machine_goes_on_starts_anew_and_believes_the_notice_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("POD_NAME", "pod-a")
    with serving_metadata() as served:
        with sleeping_container(served, "--restart-after=1") as container:
            await asyncio.to_thread(served.until_asked, 2)
            served.call_back("aws", in_s=3)
            said, _ = await asyncio.to_thread(container.communicate, timeout=60)
            assert container.returncode == -signal.SIGTERM, said
            assert "pod pod-a is drained" in said
        with sleeping_container(served, "--restart-after=1") as container:
            await asyncio.to_thread(served.until_asked, len(served.asked) + 5)
            assert container.poll() is None
            os.killpg(container.pid, signal.SIGKILL)
            assert container.stdout.read() == ""


# --- a whole cluster ------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(pod: PodProcess, cloud: str, served: MetadataServer, *options: str) -> Iterator[Any]:
    process = subprocess.Popen(
        command(cloud, served, *options),
        env=os.environ | pod.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("notice_s", [60, 12], ids=["enough", "too-short"])
def test_no_token_is_lost_with_a_machine_that_is_called_back(
    model: Path, run_dir: Path, notice_s: int
) -> None:
    config = dataclasses.replace(fake_cluster(model), runs_on="pods")
    slow = dataclasses.replace(config.engine.fake, decode_step_s=0.06)
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, fake=slow))
    one = dataclasses.replace(config.pools["prefill"], replicas=1)
    config = dataclasses.replace(config, pools=config.pools | {"prefill": one})
    with serving_metadata() as served, running_head(config, run_dir) as pods:
        pods.serve()
        pods.have(prefill=1, decode=3)
        site = PodSite(cast(Any, pods), config)
        before = site.settled(decode=2)
        ends = pods.pod_of(before, "decode-0")
        pods.start_router(config)
        with watched(ends, "gcp", served, f"--notice={notice_s}") as watch:
            with site.streams() as asked:
                served.call_back("gcp", in_s=notice_s)
                said, _ = watch.communicate(timeout=90)
                assert "closed to Ray" in said
            went = [[each.decode_worker for each in r.result().routed] for r in asked]
            assert any(each[0] == "decode-0" for each in went)
            assert any(len(each) > 1 for each in went) == (notice_s == 12), went
        after = site.settled(decode=2)
        assert pods.pod_of(after, "decode-0") is not ends
        assert live_workers(after)["decode-1"] == live_workers(before)["decode-1"]
        site.all_sound()
