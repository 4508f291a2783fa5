"""Control groups: they know which processes belong to which pod, and end them all at once."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from tests.k8s.kubelet.errors import KernelError

_GONE_WITHIN_S = 10.0
_POLL_S = 0.01


def hierarchy() -> Path | None:
    """Where cgroups of version 2 are mounted, also beside those of version 1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(folder)
    return None


class Cgroup:
    """Own one group and what is in it. Threads share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._is_there = True
        path.mkdir()

    def child(self, name: str) -> Cgroup:
        return Cgroup(self.path / name)

    @property
    def is_empty(self) -> bool:
        """Whether no process is in it, nor in its children."""
        with self._lock:
            return not self._is_there or _is_empty(self.path)

    def kill(self) -> None:
        """Kill every process in it and in its children. Raises KernelError."""
        with self._lock:
            if self._is_there:
                _kill(self.path)

    def remove(self) -> None:
        """Kill what is in it, and remove it. A second call changes nothing."""
        with self._lock:
            if self._is_there:
                remove_group(self.path)
                self._is_there = False

    @property
    def pids(self) -> list[int]:
        """The processes in it, without those in its children."""
        with self._lock:
            if not self._is_there:
                return []
            return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]


def remove_group(path: Path) -> None:
    """Kill what is in it and remove it, whoever made it. Raises KernelError, OSError."""
    _kill(path)
    _remove_tree(path)


def _kill(path: Path) -> None:
    (path / "cgroup.kill").write_text("1")
    give_up_at = time.monotonic() + _GONE_WITHIN_S
    while not _is_empty(path):
        if time.monotonic() > give_up_at:
            raise KernelError(f"{path}: processes are left that cannot be killed")
        time.sleep(_POLL_S)


def _is_empty(path: Path) -> bool:
    return "populated 0" in (path / "cgroup.events").read_text()


def _remove_tree(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir():
            _remove_tree(child)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()
