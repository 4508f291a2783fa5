"""ctrl-C of `baton up`, through the real command: what runs may finish, unless it comes twice."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.client import Client
from baton.client.events import Tokens
from baton.config.cluster import ClusterConfig
from baton.errors import UnavailableError
from cli.main import EXIT_UNAVAILABLE
from cluster.local.process_tree import Process, descendants, wait_until_gone
from engine.request import RequestId, RequestSpec, SamplingParams
from tests.cluster.whole_cluster import PROMPT, Answer, engine_tokens, fake_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def expected(config: ClusterConfig, prompt: list[int], max_tokens: int) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    spec = RequestSpec(RequestId("0"), np.array(prompt, np.uint32), len(prompt), sampling)
    return engine_tokens(config, [spec])[0]


class Up:
    """`baton up` in a process group of its own, as a shell starts a job in the background."""

    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        file = folder / "cluster.yaml"
        file.write_text(config.to_yaml())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "up", "-f", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        self.processes: set[Process] = set()
        self.told: list[str] = []

    def until_told(self, text: str) -> str:
        """The first line with this text; the test's time limit bounds the wait."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append(line)
            if text in line:
                return line
        raise AssertionError(self.told)

    def ctrl_c(self) -> None:
        """As a terminal does it: the whole group gets the signal."""
        self.processes |= descendants(self.process.pid)
        os.killpg(self.process.pid, signal.SIGINT)

    def status(self, within_s: float) -> int:
        """The exit status; none of its processes is left."""
        status = self.process.wait(within_s)
        assert wait_until_gone(self.processes, 0.0) == set()
        return status


@contextlib.contextmanager
def brought_up(config: ClusterConfig, folder: Path) -> Iterator[Up]:
    up = Up(config, folder)
    try:
        yield up
    finally:
        up.process.kill()
        up.process.wait()
        assert up.process.stdout is not None
        up.process.stdout.close()


def cluster(folder: Path, drain_timeout_s: float, decode_step_s: float = 0.005) -> ClusterConfig:
    (model := folder / "model").mkdir()
    config = fake_cluster(model, replicas=1)
    fake = dataclasses.replace(config.engine.fake, decode_step_s=decode_step_s)
    return dataclasses.replace(
        config,
        engine=dataclasses.replace(config.engine, fake=fake),
        router=dataclasses.replace(config.router, drain_timeout_s=drain_timeout_s),
    )


@dataclass
class Stream:
    """A request in a thread; `flows` is set once it has tokens."""

    answer: Answer
    flows: threading.Event

    def run(self, address: str, prompt: list[int], max_tokens: int) -> Answer:
        with Client(address, reconnect_within_s=5) as client:
            asked: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
            for event in client.generate(token_ids=prompt, temperature=0.0, **asked):
                self.answer.take(event)
                if isinstance(event, Tokens):
                    self.flows.set()
        return self.answer


def streaming(
    threads: ThreadPoolExecutor, address: str, max_tokens: int
) -> list[tuple[Stream, Future[Answer]]]:
    """Two requests, both with tokens."""
    streams = []
    for number in range(2):
        stream = Stream(Answer(), threading.Event())
        prompt = PROMPT[number : number + 60]
        streams.append((stream, threads.submit(stream.run, address, prompt, max_tokens)))
    for stream, _ in streams:
        assert stream.flows.wait(60)
    return streams


def test_ctrl_c_lets_streams_finish_and_leaves_no_process_even_where_sigint_was_ignored(
    tmp_path: Path,
) -> None:
    config = cluster(tmp_path, drain_timeout_s=60.0)
    with brought_up(config, tmp_path) as up, ThreadPoolExecutor(2) as threads:
        address = up.until_told("is served at").split()[-1]
        streams = streaming(threads, address, 600)
        up.ctrl_c()
        up.until_told("stopping")
        for number, (_, running) in enumerate(streams):
            answer = running.result(90)
            assert answer.ids == expected(config, PROMPT[number : number + 60], 600)
        assert up.status(60) == 0


@pytest.mark.full
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_cluster_whose_ray_has_ended_is_closed_and_says_so(tmp_path: Path, part: str) -> None:
    with brought_up(cluster(tmp_path, drain_timeout_s=1.0), tmp_path) as up:
        up.until_told("is served at")
        up.processes = descendants(up.process.pid)
        (lost,) = (process for process in up.processes if process.name == part)
        os.kill(lost.pid, signal.SIGKILL)
        told = up.until_told(f"Ray's {part} ({lost.pid}) has ended")
        assert up.status(60) == EXIT_UNAVAILABLE
        logs = re.search(r"\(logs: (.*)\)", told)
        assert logs is not None, told
        assert "decode-0.log" in os.listdir(logs[1])
        shutil.rmtree(logs[1])
        assert "Traceback" not in "".join(up.told)


@pytest.mark.full
def test_ctrl_c_twice_ends_at_once_and_the_streams_are_told(tmp_path: Path) -> None:
    config = cluster(tmp_path, drain_timeout_s=120.0, decode_step_s=0.05)
    with brought_up(config, tmp_path) as up, ThreadPoolExecutor(2) as threads:
        address = up.until_told("is served at").split()[-1]
        streams = streaming(threads, address, 1500)
        up.ctrl_c()
        up.until_told("stopping")
        began_at = time.monotonic()
        up.ctrl_c()
        for _, running in streams:
            with pytest.raises(UnavailableError):
                running.result(30)
        assert up.status(60) == 130
        assert time.monotonic() - began_at < 40  # 5 s alone on a machine; the drain were 120


@pytest.mark.full
def test_streams_that_do_not_finish_in_time_are_told(tmp_path: Path) -> None:
    config = cluster(tmp_path, drain_timeout_s=1.0, decode_step_s=0.05)
    with brought_up(config, tmp_path) as up, ThreadPoolExecutor(2) as threads:
        address = up.until_told("is served at").split()[-1]
        streams = streaming(threads, address, 1500)
        up.ctrl_c()
        for _, running in streams:
            with pytest.raises(UnavailableError):
                running.result(30)
        assert up.status(60) == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "step", ["starting Ray", "starting the supervisor", "loading the model", "starting the router"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_step_of_the_start_leaves_nothing(
    tmp_path: Path, step: str, number: int
) -> None:
    with brought_up(cluster(tmp_path, drain_timeout_s=30.0), tmp_path) as up:
        up.until_told(step)
        up.processes = descendants(up.process.pid)
        up.process.send_signal(number)
        assert up.status(60) == 130
        assert "Traceback" not in "".join(up.told)
