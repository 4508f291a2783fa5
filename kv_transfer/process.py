"""The identity of a process, and the proof that it is gone.

A process that no longer exists cannot write into shared memory. A pid alone proves nothing, because
pids are reused; pid and start time together name one process of one kernel. A zombie without other
threads has released its memory: the kernel drops it before the process can be waited for. A zombie
main thread proves nothing while other threads still run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from baton.v1 import common_pb2

_DEAD_STATES = frozenset("ZXx")


@dataclass(frozen=True)
class ProcessIdentity:
    """One start of one process; `start_time_ticks` are clock ticks since boot."""

    boot_id: str
    pid_namespace: int
    pid: int
    start_time_ticks: int

    def to_proto(self) -> common_pb2.ProcessIdentity:
        return common_pb2.ProcessIdentity(**vars(self))

    @staticmethod
    def from_proto(message: common_pb2.ProcessIdentity) -> ProcessIdentity:
        return ProcessIdentity(
            message.boot_id, message.pid_namespace, message.pid, message.start_time_ticks
        )


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


@dataclass(frozen=True)
class ProcessStat:
    """What /proc/<pid>/stat says."""

    name: str
    state: str
    parent_pid: int
    start_time_ticks: int

    @property
    def is_zombie(self) -> bool:
        return self.state in _DEAD_STATES


def stat_of(pid: int) -> ProcessStat | None:
    """Read what the kernel says of a process; None: there is none."""
    try:
        # A name is bytes: the kernel cuts a long one, even inside a character.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessStat(name, fields[0], int(fields[1]), int(fields[19]))


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
    identity = identity_of(os.getpid())
    assert identity is not None
    return identity


def identity_of(pid: int) -> ProcessIdentity | None:
    """Identity of a process in this pid namespace; None: no process has that pid."""
    found = stat_of(pid)
    if found is None:
        return None
    return ProcessIdentity(_boot_id(), _pid_namespace(), pid, found.start_time_ticks)


def is_gone(identity: ProcessIdentity) -> bool | None:
    """Whether the process can no longer touch memory.

    None: unknown, because the process is on another machine or in another pid namespace.
    """
    if identity.boot_id != _boot_id() or identity.pid_namespace != _pid_namespace():
        return None
    found = stat_of(identity.pid)
    if found is None or found.start_time_ticks != identity.start_time_ticks:
        return True
    if not found.is_zombie:
        return False
    try:
        threads = os.listdir(f"/proc/{identity.pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return set(threads) <= {str(identity.pid)}
