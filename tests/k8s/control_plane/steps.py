"""A build's commands, one by one: reported while they run, ended in time, explained when they
fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.k8s.control_plane.errors import BuildError

_REPORT_EVERY_S = 30.0
_TAIL_BYTES = 3000


class Steps:
    """Own the time that is left and the log that all commands write to."""

    def __init__(self, log: Path, limit_s: float, report: Callable[[str], None]) -> None:
        self._log = log
        self._started_at = time.monotonic()
        self._limit_s = limit_s
        self._report = report

    def report(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started_at), 60)
        self._report(f"[{minutes}:{seconds:02}] {what}")

    def run(
        self,
        what: str,
        command: tuple[str | Path, ...],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Raises BuildError when the command is missing, fails, or the build's time is over."""
        self.report(what)
        with self._log.open("ab") as log:
            before = log.tell()
            try:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise BuildError(f"{what}: {error}") from error
            try:
                status = self._wait(what, process)
            finally:
                _end(process)
        if status:
            raise BuildError(f"{what}: {command[0]} ended with {status}:\n{self._since(before)}")

    def _wait(self, what: str, process: subprocess.Popen[bytes]) -> int:
        while True:
            left_s = self._started_at + self._limit_s - time.monotonic()
            if left_s <= 0:
                raise BuildError(
                    f"{what}: not done {self._limit_s / 60:.0f} minutes after the start"
                )
            try:
                return process.wait(min(left_s, _REPORT_EVERY_S))
            except subprocess.TimeoutExpired:
                self.report(f"still {what}")

    def _since(self, position: int) -> str:
        written = self._log.read_bytes()[position:]
        return written[-_TAIL_BYTES:].decode(errors="replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its children: a compiler has many."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
