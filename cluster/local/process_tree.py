"""Which processes descend from this one, and which of them still live: read from /proc."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process named for good: its pid alone may be used again."""

    pid: int
    start_time_ticks: int
    name: str


def descendants(root_pid: int | None = None) -> set[Process]:
    """Children of a process (default: this one), their children, and so on; without zombies."""
    children: dict[int, list[Process]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _read(int(entry.name))) is not None:
            parent_pid, process = found
            children[parent_pid].append(process)
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
        if (found := _read(process.pid)) is not None
        and found[1].start_time_ticks == process.start_time_ticks
    }


def wait_until_gone(processes: Iterable[Process], timeout_s: float) -> set[Process]:
    """Wait for the processes' end; those that live after `timeout_s` are returned."""
    deadline = time.monotonic() + timeout_s
    left = still_alive(processes)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = still_alive(left)
    return left


def _read(pid: int) -> tuple[int, Process] | None:
    """Parent's pid and the process; None when it is gone or only waits to be reaped."""
    try:
        # Names are bytes: the kernel cuts long ones, also inside a letter.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    if fields[0] in ("Z", "X"):
        return None
    return int(fields[1]), Process(pid, int(fields[19]), name)
