"""Ends processes for good, wherever they run, and tells whether that is proved. Blocks.

Ray only asks a process to end; a stopped or stuck one does not listen. In this machine and pod the
kernel ends it and says that it has; in another pod Ray has that done by a task there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kv_transfer.process import ProcessIdentity, is_gone

_GONE_WITHIN_S = 10.0
_ASKED_WITHIN_S = 20.0  # a process that has to be started there first


def end_processes(processes: Sequence[ProcessIdentity], node_id: str | None) -> bool:
    """Kill them all and wait until they are gone; False when that could not be proved. `node_id`:
    Ray's, of where they run, where that is known."""
    far = [process for process in processes if is_gone(process) is None]
    left = kill_by_pid(processes)
    return not left and (not far or _end_far(far, node_id))


def kill_by_pid(processes: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
    """Kill all that run here and wait until they are gone; those that are not in time."""
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
    """What Ray runs in their pod."""
    return not kill_by_pid(processes) and all(map(is_gone, processes))


def _end_far(processes: Sequence[ProcessIdentity], node_id: str | None) -> bool:
    if node_id is None:
        return False
    if _is_leaving(node_id):
        return True
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_end_there).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        ended: bool = ray.get(task.remote(processes), timeout=_ASKED_WITHIN_S)
    except RayError:
        return _is_leaving(node_id)
    return ended


def _is_leaving(node_id: str) -> bool:
    """Whether the pod is gone, or drains: nothing new comes there, and what is left in it ends with
    its raylet, which leaves when nothing is placed there any more."""
    nodes: list[dict[str, object]] = ray.nodes()  # type: ignore[no-untyped-call]
    if not any(node["NodeID"] == node_id and node["Alive"] for node in nodes):
        return True
    return node_id in ray._private.state.state.get_draining_nodes()
