"""ctrl-C of `baton up`, through the real command: what runs may finish, unless it comes twice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.client import Client
from baton.client.events import Tokens
from baton.errors import UnavailableError
from cli.main import EXIT_UNAVAILABLE
from cluster.local.process_tree import descendants
from tests.cluster.up_command import brought_up, cluster, expected
from tests.cluster.whole_cluster import PROMPT, Answer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


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
        address = up.until_printed("is served at").split()[-1]
        streams = streaming(threads, address, 300)
        up.ctrl_c()
        up.until_printed("stopping")
        for number, (_, running) in enumerate(streams):
            answer = running.result(90)
            assert answer.ids == expected(config, PROMPT[number : number + 60], 300)
        assert up.status(60) == 0


@pytest.mark.full
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_cluster_whose_ray_has_ended_is_closed_and_says_so(tmp_path: Path, part: str) -> None:
    with brought_up(cluster(tmp_path, drain_timeout_s=1.0), tmp_path) as up:
        up.until_printed("is served at")
        up.processes = descendants(up.process.pid)
        (lost,) = (process for process in up.processes if process.name == part)
        os.kill(lost.pid, signal.SIGKILL)
        reported = up.until_printed(f"Ray's {part} ({lost.pid}) has ended")
        assert up.status(60) == EXIT_UNAVAILABLE
        logs = re.search(r"\(logs: (.*)\)", reported)
        assert logs is not None, reported
        assert "decode-0.log" in os.listdir(logs[1])
        shutil.rmtree(logs[1])
        assert "Traceback" not in "".join(up.reported)


@pytest.mark.full
@pytest.mark.parametrize(("comes_twice", "drain_timeout_s"), [(True, 120.0), (False, 1.0)])
def test_streams_that_do_not_finish_in_time_or_before_a_second_ctrl_c_end_as_unavailable(
    tmp_path: Path, comes_twice: bool, drain_timeout_s: float
) -> None:
    config = cluster(tmp_path, drain_timeout_s, decode_step_s=0.05)
    with brought_up(config, tmp_path) as up, ThreadPoolExecutor(2) as threads:
        address = up.until_printed("is served at").split()[-1]
        streams = streaming(threads, address, 1500)
        up.ctrl_c()
        if comes_twice:
            up.until_printed("stopping")
            up.ctrl_c()
        for _, running in streams:
            with pytest.raises(UnavailableError):
                running.result(30)
        assert up.status(60) == (130 if comes_twice else 0)


@pytest.mark.full
@pytest.mark.parametrize(
    "step", ["starting Ray", "starting the supervisor", "loading the model", "starting the router"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_step_of_the_start_leaves_nothing(
    tmp_path: Path, step: str, number: int
) -> None:
    with brought_up(cluster(tmp_path, drain_timeout_s=30.0), tmp_path) as up:
        up.until_printed(step)
        up.processes = descendants(up.process.pid)
        up.process.send_signal(number)
        assert up.status(60) == 130
        assert "Traceback" not in "".join(up.reported)
