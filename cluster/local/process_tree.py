"""Which processes descend from this one, and the reaper that ends them when `baton up` is killed.

`python -m cluster.local.process_tree MARK` is the reaper. It lives as long as its standard input,
whose other end only the process that calls `local.up` holds. Then it ends every process that was
named to it (one line each: pid and start time) or carries MARK in its environment. A process that
sets its own title, as Ray's agents do, overwrites its environment. The kernel ends Ray's other
processes with their parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kv_transfer.process import stat_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """One start of a process: a pid alone may be used again."""

    pid: int
    start_time_ticks: int
    name: str


def descendants(root_pid: int | None = None) -> set[Process]:
    """Children of a process (default: this one), their children, and so on; without zombies."""
    children: dict[int, list[Process]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        found = stat_of(int(entry.name)) if entry.name.isdigit() else None
        if found is not None and not found.is_zombie:
            process = Process(int(entry.name), found.start_time_ticks, found.name)
            children[found.parent_pid].append(process)
    result: set[Process] = set()
    waiting = [os.getpid() if root_pid is None else root_pid]
    while waiting:
        for child in children[waiting.pop()]:
            if child not in result:
                result.add(child)
                waiting.append(child.pid)
    return result


def still_alive(processes: Iterable[Process]) -> set[Process]:
    return {
        process
        for process in processes
        if (found := stat_of(process.pid)) is not None
        and not found.is_zombie
        and found.start_time_ticks == process.start_time_ticks
    }


def wait_until_gone(processes: Iterable[Process], timeout_s: float) -> set[Process]:
    """Wait for the processes' end. Returns those that still live after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = still_alive(processes)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = still_alive(left)
    return left


# --- the reaper ---------------------------------------------------------------------------------

MARK_VARIABLE = "BATON_CLUSTER_MARK"
_LEAVE_S = 3.0
_PATIENCE_S = 30.0
_POLL_S = 0.1


class Reaper:
    """This process's end of a reaper's standard input."""

    def __init__(self, mark: str, names: IO[bytes]) -> None:
        self.variables = {MARK_VARIABLE: mark}
        """Environment variables for processes that must not outlive this one."""
        self._names = names

    def name(self, processes: Iterable[Process]) -> None:
        """Name processes that must not outlive this one. A repeated name changes nothing."""
        for process in processes:
            self._names.write(b"%d %d\n" % (process.pid, process.start_time_ticks))
        self._names.flush()


@contextlib.contextmanager
def watched_over() -> Iterator[Reaper]:
    """A reaper for this process. It also ends what is left at the end of the block."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    reaper = subprocess.Popen(
        [sys.executable, "-m", "cluster.local.process_tree", mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # on ctrl-C the cluster ends its parts in order
    )
    assert reaper.stdin is not None
    try:
        yield Reaper(mark, reaper.stdin)
    finally:
        reaper.stdin.close()
        if reaper.wait() != 0:
            log.error("some processes of the cluster cannot be ended")


@contextlib.contextmanager
def inherited(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for processes started there."""
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
    """Ask the processes to end, then kill them. Returns the pids that are left after
    `_PATIENCE_S`."""
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
    mark, named = sys.argv[1], set()
    for line in sys.stdin:
        if line.endswith("\n"):  # the last one may have been cut off
            pid, start_time_ticks = map(int, line.split())
            named.add(Process(pid, start_time_ticks, ""))
    return 1 if reap(mark, named) else 0


if __name__ == "__main__":
    sys.exit(main())
