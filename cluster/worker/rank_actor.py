"""The Ray actor that is the process of one rank."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass

import ray

from cluster.node.pod import Pod
from cluster.worker.config import RankPosition, WorkerConfig, with_node_settings
from cluster.worker.process import WorkerThread, set_up_logging
from cluster.worker.rank import listen
from engine import compute_threads
from kv_transfer.process import ProcessIdentity, own_identity

MAX_CALLS = 8
"""Calls that a rank answers concurrently."""


@dataclass(frozen=True)
class RankStatus:
    """A rank's status, for a supervisor that finds it."""

    process: ProcessIdentity
    node_id: str
    """Ray's id of its machine or pod."""
    launched: bool
    serves: bool
    """Rank 0 has loaded and warmed up, so a healthy worker is in the registry."""


@dataclass(frozen=True)
class RankExit:
    """A rank has ended. `failure`: why; None: it left in order."""

    failure: str | None


class RankActor:
    """Runs the worker in a thread and answers calls about it.

    No call may last long: Ray lets a call run on after its caller has died.
    """

    def __init__(self) -> None:
        self._worker: WorkerThread | None = None
        self._meeting: socket.socket | None = None

    def status(self) -> RankStatus:
        worker, node_id = self._worker, ray.get_runtime_context().get_node_id()
        serves = worker is not None and worker.serves
        return RankStatus(own_identity(), node_id, worker is not None, serves)

    def listen(self, host: str) -> int:
        """On rank 0, before any launch: listen for the other ranks. Returns the port."""
        self._meeting = listen(host)
        port: int = self._meeting.getsockname()[1]
        return port

    def launch(self, config: WorkerConfig, position: RankPosition) -> None:
        """Start the rank, which registers itself. This process ends soon after the rank."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        config = with_node_settings(config, Pod.of(os.environ), address)
        set_up_logging(config.log_level, config.log_file(position.rank))
        if self._meeting is not None:
            position = dataclasses.replace(position, listen_fd=self._meeting.detach())
        self._worker = WorkerThread(config, position)
        self._worker.start()

    def set_num_threads(self, num_threads: int) -> None:
        """Compute with this many threads from the next step on."""
        compute_threads.want(num_threads)

    def leave(self) -> None:
        """End the rank now, in order; its running requests are lost."""
        if self._worker is not None:
            self._worker.stop()

    def wait_for_exit(self, timeout_s: float) -> RankExit | None:
        """Wait for the rank's end; None after `timeout_s`."""
        assert self._worker is not None, "launch comes first"
        try:
            return RankExit(self._worker.wait(timeout_s))
        except TimeoutError:
            return None
