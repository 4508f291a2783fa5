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
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import markdown, progress

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
        self.shown = ""
        self.run = Run()

    def read(self, piece: bytes) -> bool:
        """Read a piece of output. Returns whether the first token has come with it."""
        self.shown += piece.decode(errors="replace")
        if self.run.first_token_s:
            return False
        now_s = time.perf_counter() - self._began
        for name in self._stages()[len(self._marks) - 1 :]:
            self._marks.append((name, now_s))
        if re.search(r"^> .*\n.", self.shown, re.MULTILINE) is None:
            return False
        self.run.first_token_s = now_s
        ends = [start for _, start in self._marks[1:]] + [now_s]
        for (name, start), end in zip(self._marks, ends, strict=True):
            self.run.stages[name] = end - start
        return True

    def _stages(self) -> list[str]:
        """List the stages that the whole lines announce, in order."""
        lines = self.shown.rpartition("\n")[0].splitlines()
        names = [line.rstrip(". ").partition(":")[0] for line in lines if line.endswith("...")]
        if any(" is served by " in line for line in lines):
            names.append("first answer")
        return list(dict.fromkeys(names))


def run_once() -> Run:
    """Run the command to its end. Raises RuntimeError when it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="bd") as folder:  # short: Ray's sockets lie below it
        command = [sys.executable, "-m", "cli.main", "demo"]
        watch = _Watch()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": folder},
        ) as process:
            assert process.stdout is not None
            too_long = threading.Timer(LONGEST_RUN_S, process.terminate)
            too_long.start()
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                if watch.read(piece):
                    watch.run.weights_s = _weights_s(Path(folder))
            too_long.cancel()
        if process.returncode != 0 or not watch.run.first_token_s:
            raise RuntimeError(f"baton demo ended with {process.returncode}: {watch.shown}")
        return watch.run


def _weights_s(folder: Path) -> float:
    """Read the seconds of loading weights from the workers' logs, which go with the cluster."""
    logs = [log.read_text() for log in folder.glob("baton-*/*.log")]
    return max(float(found) for log in logs for found in _READY.findall(log))


def measure() -> list[Run]:
    progress("baton demo, not counted")
    run_once()
    result = []
    for number in range(1, RUNS + 1):
        progress(f"baton demo, run {number} of {RUNS}")
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


if __name__ == "__main__":
    print(f"{__doc__}\n{table(measure())}")
