"""The processes of every replica: a table on disk, and how they are ended.

A stopped process cannot report its pid, and Ray no longer lists a process that it was asked to
kill. So a new supervisor needs this table to end what a dead one left.

Ray only asks a process to end, and a stopped or stuck process does not listen. In this machine and
pod the kernel ends it and proves the end. In another pod a Ray task does that there. The functions
that end processes block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kv_transfer.process import ProcessIdentity, is_gone


@dataclass(frozen=True)
class ReplicaProcesses:
    """The processes of one replica, all on one Ray node (a machine or a pod)."""

    processes: tuple[ProcessIdentity, ...]
    node_id: str
    """Ray's id of the node."""


class ProcessTable:
    """One file per replica in `folder`, which is created if needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, entry: ReplicaProcesses) -> None:
        """Add a replica, before its processes hold anything."""
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._folder / f"{name}.new"
        fresh.write_text(json.dumps(dataclasses.asdict(entry)))
        os.replace(fresh, self._path(name))

    def remove(self, name: str) -> None:
        """Remove a replica, once all its processes have ended."""
        self._path(name).unlink(missing_ok=True)

    def read(self) -> dict[str, ReplicaProcesses]:
        return {path.stem: _parse(path.read_text()) for path in self._folder.glob("*.json")}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _parse(text: str) -> ReplicaProcesses:
    found = json.loads(text)
    processes = tuple(ProcessIdentity(**process) for process in found["processes"])
    return ReplicaProcesses(processes, found["node_id"])


_GONE_WITHIN_S = 10.0
_TASK_WITHIN_S = 20.0  # Ray must start a process there first


def end_processes(processes: Sequence[ProcessIdentity], node_id: str | None) -> bool:
    """Kill all and wait until they are gone. False: that could not be proved.

    `node_id`: Ray's id of their node, if known."""
    far = [process for process in processes if is_gone(process) is None]
    left = kill_by_pid(processes)
    return not left and (not far or _end_far(far, node_id))


def kill_by_pid(processes: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
    """Kill all that run here and wait until they are gone. Returns those that are not."""
    give_up_at = time.monotonic() + _GONE_WITHIN_S
    while True:
        left = [process for process in processes if is_gone(process) is False]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if not left or time.monotonic() >= give_up_at:
            return left
        time.sleep(0.02)


def _end_there(processes: Sequence[ProcessIdentity]) -> bool:
    """The Ray task that ends processes in their own pod."""
    return not kill_by_pid(processes) and all(map(is_gone, processes))


def _end_far(processes: Sequence[ProcessIdentity], node_id: str | None) -> bool:
    if node_id is None:
        return False
    if _is_leaving(node_id):
        return True
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_end_there).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        ended: bool = ray.get(task.remote(processes), timeout=_TASK_WITHIN_S)
    except RayError:
        return _is_leaving(node_id)
    return ended


def _is_leaving(node_id: str) -> bool:
    """Whether the pod is gone or drains. Nothing new starts in a draining pod, and what is left
    ends with its raylet, which exits once nothing is placed there."""
    nodes: list[dict[str, object]] = ray.nodes()  # type: ignore[no-untyped-call]
    if not any(node["NodeID"] == node_id and node["Alive"] for node in nodes):
        return True
    return node_id in ray._private.state.state.get_draining_nodes()
