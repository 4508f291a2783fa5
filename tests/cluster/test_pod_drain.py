"""Draining a pod whose workers run without Ray: streams finish, and it reports what holds it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cluster.node import pod_drain
from tests.cluster.one_pod import streaming


async def test_a_pod_is_drained_once_what_runs_in_it_has_ended_and_its_worker_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    async with streaming(tmp_path, monkeypatch, kit, 600) as pod:
        info = pod.fleet.worker("decode-0").info
        assert (info.pod_name, info.node_name) == ("pod-a", "node-a")
        assert info.address.startswith("127.0.0.9:")
        status, said = await pod.drain(60)
        assert status == 0, said
        assert "decode-0: 1 running" in said
        assert "pod_drain: decode-0 has left" in said.splitlines()[-2]
        assert pod.link.of("last").in_order() == kit.oracle.tokens(pod.spec)
        assert await asyncio.wait_for(pod.fleet.processes["decode-0"].wait(), 5) == 0
        status, said = await pod.drain(60)  # there is nothing any more
        assert status == 0, said
        assert "decode-0" not in said


@pytest.mark.full
async def test_a_pod_that_is_not_drained_in_time_says_what_held_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    async with streaming(tmp_path, monkeypatch, kit, 5000) as pod:
        status, said = await pod.drain(2)
        assert status == 1
        assert "pod_drain: pod pod-a is not drained after 2 s: decode-0: " in said
        assert "1 running" in said.splitlines()[-1]


@pytest.mark.full
async def test_a_worker_that_hangs_is_named_as_what_the_drain_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    async with streaming(tmp_path, monkeypatch, kit, 600) as pod:
        pid = pod.fleet.processes["decode-0"].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            status, said = await pod.drain(3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert status == 1
        assert said.splitlines()[-1].endswith("decode-0: no answer")


def test_draining_outside_a_pod_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("POD_NAME", raising=False)
    assert pod_drain.main(["--timeout", "3"]) == 2
    assert "POD_NAME is not set" in capsys.readouterr().err
