"""The real `baton up` as a process, and the tokens that its clients must get."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from baton.config.cluster import ClusterConfig
from cluster.local.process_tree import Process, descendants, wait_until_gone
from engine.request import RequestId, RequestSpec, SamplingParams
from tests.cluster.whole_cluster import engine_tokens, fake_cluster


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
        self.reported: list[str] = []

    def until_printed(self, text: str) -> str:
        """The first line with this text; the test's time limit bounds the wait."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.reported.append(line)
            if text in line:
                return line
        raise AssertionError(self.reported)

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
