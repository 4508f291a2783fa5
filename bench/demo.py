"""Seconds from the start of `baton demo` to the first token of its first answer, and where they go.

The environment is warm: a run that is not counted comes first. Stages are what the command itself
announces; weights is the longest a worker took to load, imports included, and lies inside loading
the model. Medians.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bench.report import markdown

RUNS = 3
TARGET_S = 20.0
LONGEST_RUN_S = 300.0
_READY = re.compile(r"ready after ([\d.]+) s")


@dataclass
class Run:
    """One `baton demo`: seconds of each stage in order, and to the first token in all."""

    stages: dict[str, float] = field(default_factory=dict)
    first_token_s: float = 0.0
    weights_s: float = 0.0


class _Watch:
    """Notes when the command announces a stage and when its first answer begins."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._marks: list[tuple[str, float]] = [("imports", 0.0)]
        self.errors = ""
        self.first_token = threading.Event()
        self.run = Run()

    def read_announcements(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace")
            self.errors += text
            if text.rstrip().endswith("...") and not self.first_token.is_set():
                name = text.rstrip(". \n").partition(":")[0]
                if name != self._marks[-1][0]:
                    self._marks.append((name, self._elapsed()))

    def read_answers(self, stream: IO[bytes]) -> None:
        shown = b""
        while piece := os.read(stream.fileno(), 1 << 16):
            shown += piece
            if not self.first_token.is_set():
                self._look(shown)

    def _look(self, shown: bytes) -> None:
        if b" is served by " in shown and self._marks[-1][0] != "first answer":
            self._marks.append(("first answer", self._elapsed()))
        if re.search(rb"^> .*\n.", shown, re.MULTILINE):
            self.run.first_token_s = self._elapsed()
            ends = [start for _, start in self._marks[1:]] + [self.run.first_token_s]
            for (name, start), end in zip(self._marks, ends, strict=True):
                self.run.stages[name] = end - start
            self.first_token.set()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began


def run_once() -> Run:
    """Run the command to its end. Raises RuntimeError when it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="bd") as folder:  # short: Ray's sockets lie below it
        command = [sys.executable, "-m", "cli.main", "demo"]
        watch = _Watch()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder},
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            readers = [
                threading.Thread(target=watch.read_announcements, args=(process.stderr,)),
                threading.Thread(target=watch.read_answers, args=(process.stdout,)),
            ]
            too_long = threading.Timer(LONGEST_RUN_S, process.terminate)
            too_long.start()
            for reader in readers:
                reader.start()
            watch.first_token.wait(LONGEST_RUN_S)
            watch.run.weights_s = _weights_s(Path(folder))
            for reader in readers:
                reader.join()
            too_long.cancel()
        if process.returncode != 0 or not watch.first_token.is_set():
            raise RuntimeError(f"baton demo ended with {process.returncode}: {watch.errors}")
        return watch.run


def _weights_s(folder: Path) -> float:
    """From the workers' logs, which go with the cluster."""
    logs = [log.read_text() for log in folder.glob("baton-*/*.log")]
    return max(float(found) for log in logs for found in _READY.findall(log))


def measure(progress: Callable[[str], None], runs: int = RUNS) -> list[Run]:
    progress("baton demo, not counted")
    run_once()
    result = []
    for number in range(1, runs + 1):
        progress(f"baton demo, run {number} of {runs}")
        result.append(run_once())
    return result


def table(runs: list[Run]) -> str:
    rows = [_row(name, [run.stages[name] for run in runs]) for name in runs[0].stages]
    rows.append(_row("of these: weights", [run.weights_s for run in runs]))
    rows.append(_row("to the first token", [run.first_token_s for run in runs]))
    median = statistics.median(run.first_token_s for run in runs)
    verdict = "met" if median < TARGET_S else "missed"
    header = ("stage", "median s", "every run")
    return f"{markdown(header, rows)}\n\ntarget of {TARGET_S:g} s: {verdict}"


def _row(name: str, seconds: list[float]) -> list[str]:
    each = " ".join(f"{value:.1f}" for value in seconds)
    return [name, f"{statistics.median(seconds):.1f}", each]
