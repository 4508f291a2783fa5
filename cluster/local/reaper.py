"""Ends a cluster whose `baton up` was killed: nobody else is left to do it.

`python -m cluster.local.reaper MARK` lives as long as its standard input, whose other end only the
process that calls `local.up` holds. At its end every process is ended that was named there (a line
each: pid and start time), or carries MARK in its environment: a process that sets its own title, as
Ray's agents do, writes over its environment. Ray's other parts follow their parent by themselves,
as the kernel sees to it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from cluster.local.process_tree import Process, still_alive

log = logging.getLogger(__name__)

MARK_VARIABLE = "BATON_CLUSTER_MARK"
_LEAVE_S = 3.0
_PATIENCE_S = 30.0
_POLL_S = 0.1


class Reaper:
    """The living end of a reaper's standard input."""

    def __init__(self, mark: str, names: IO[bytes]) -> None:
        self.variables = {MARK_VARIABLE: mark}
        """The environment to start processes with that must not outlive this one."""
        self._names = names

    def name(self, processes: Iterable[Process]) -> None:
        """These must not outlive this process either. Naming one again changes nothing."""
        for process in processes:
            self._names.write(b"%d %d\n" % (process.pid, process.start_time_ticks))
        self._names.flush()


@contextlib.contextmanager
def watched_over() -> Iterator[Reaper]:
    """A reaper for this process. What is left at the end of the block is ended too."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    reaper = subprocess.Popen(
        [sys.executable, "-m", "cluster.local.reaper", mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # ctrl-C is for the cluster to handle, in its order
    )
    assert reaper.stdin is not None
    try:
        yield Reaper(mark, reaper.stdin)
    finally:
        reaper.stdin.close()
        if reaper.wait() != 0:
            log.error("processes of the cluster are left that cannot be ended")


@contextlib.contextmanager
def inherited(variables: dict[str, str]) -> Iterator[None]:
    """For what takes its environment from this process: set the variables inside."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def marked(mark: str) -> set[int]:
    """Pids of the living processes that carry the mark, except this one."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone since, or another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def reap(mark: str, named: set[Process]) -> set[int]:
    """Ask them to leave, then make them; returns those that are left after all patience."""
    started_at = time.monotonic()
    asked: set[int] = set()
    while left := marked(mark) | {process.pid for process in still_alive(named)}:
        waited_s = time.monotonic() - started_at
        if waited_s > _PATIENCE_S:
            return left
        for pid in left if waited_s > _LEAVE_S else left - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if waited_s > _LEAVE_S else signal.SIGTERM)
        asked |= left
        time.sleep(_POLL_S)
    return set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.local.reaper")
    parser.add_argument("mark")
    mark, named = parser.parse_args().mark, set()
    for line in sys.stdin:
        if line.endswith("\n"):  # the last one may have been cut off
            pid, start_time_ticks = map(int, line.split())
            named.add(Process(pid, start_time_ticks, ""))
    return 1 if reap(mark, named) else 0


if __name__ == "__main__":
    sys.exit(main())
