"""Electors as processes that are killed, and stopped and let go on."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.controller.following import until
from tests.k8s import elector_process
from tests.k8s.control_plane.plane import ControlPlane

_TIMEOUT_S = 30.0
_ROOT = Path(__file__).parents[2]


def other(name: str) -> str:
    return {"one": "two", "two": "one"}[name]


class Electors:
    """Own the processes, and what they wrote."""

    def __init__(self, control_plane: ControlPlane, namespace: str, written: Path) -> None:
        self._arguments = (str(control_plane.kubeconfig), namespace)
        self._written = written
        self._written.touch()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = (sys.executable, elector_process.__file__, *self._arguments, name)
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self._processes[name] = subprocess.Popen((*command, self._written), env=environment)

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def leaders(self) -> list[str]:
        """Who wrote, each once for all that he wrote in a row."""
        return [name for name, _ in itertools.groupby(self._written.read_text().split())]

    def until_leaders_are(self, *names: str) -> None:
        until(lambda: self.leaders() == [*names], f"leaders {names}", _TIMEOUT_S)

    def until_there_are(self, num_turns: int) -> None:
        until(lambda: len(self.leaders()) >= num_turns, f"{num_turns} turns", _TIMEOUT_S)

    def until_written(self, more: int) -> None:
        enough = self._num_written() + more
        until(lambda: self._num_written() >= enough, f"{more} more lines", _TIMEOUT_S)

    def _num_written(self) -> int:
        return len(self._written.read_text().split())

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def electors(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Electors]:
    with contextlib.closing(Electors(control_plane, namespace, tmp_path / "written")) as electors:
        yield electors


@pytest.mark.full
def test_who_was_stopped_writes_nothing_more_when_he_goes_on_and_who_is_killed_is_replaced(
    electors: Electors,
) -> None:
    electors.start("one")
    electors.until_leaders_are("one")
    electors.start("two")
    for num_turns in (1, 2, 3):
        leader = electors.leaders()[-1]
        electors.send(leader, signal.SIGSTOP)
        electors.until_there_are(num_turns + 1)
        electors.send(leader, signal.SIGCONT)
        electors.until_written(100)
        assert electors.leaders()[num_turns:] == [other(leader)]
    before = electors.leaders()
    electors.send(before[-1], signal.SIGKILL)
    electors.until_leaders_are(*before, other(before[-1]))


@pytest.mark.full
def test_who_is_told_to_end_hands_over(electors: Electors) -> None:
    electors.start("one")
    electors.until_leaders_are("one")
    electors.start("two")
    electors.send("one", signal.SIGTERM)
    electors.until_leaders_are("one", "two")
