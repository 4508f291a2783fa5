"""The Ray actor that is the process of one rank."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass

import ray

from cluster.node.pod import Pod
from cluster.worker.config import RankPlace, WorkerConfig, settled
from cluster.worker.process import WorkerThread, set_up_logging
from cluster.worker.rank import listen
from engine import compute_threads
from kv_transfer.process import ProcessIdentity, own_identity

MAX_CALLS = 8
"""Calls that a rank answers at once."""


@dataclass(frozen=True)
class Standing:
    """What a rank says of itself to whoever finds it."""

    process: ProcessIdentity
    node_id: str
    """Ray's, of the machine or pod that it runs on."""
    launched: bool
    serves: bool
    """Loaded and warmed up, and so in the registry for as long as it is sound; of rank 0 only."""


@dataclass(frozen=True)
class Over:
    """A rank is over. `failure` is why, None when it has left in good order."""

    failure: str | None


class RankActor:
    """The worker lives in a thread; the actor's calls watch over it.

    No call may last: its caller can die, and Ray lets a call of a dead caller run on.
    """

    def __init__(self) -> None:
        self._worker: WorkerThread | None = None
        self._meeting: socket.socket | None = None

    def standing(self) -> Standing:
        worker, node_id = self._worker, ray.get_runtime_context().get_node_id()
        serves = worker is not None and worker.serves
        return Standing(own_identity(), node_id, worker is not None, serves)

    def listen(self, host: str) -> int:
        """Of rank 0, before any launch: have the other ranks meet here. Returns the port."""
        self._meeting = listen(host)
        port: int = self._meeting.getsockname()[1]
        return port

    def launch(self, config: WorkerConfig, place: RankPlace) -> None:
        """Start the rank; it registers by itself. This process ends soon after the rank."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        config = settled(config, Pod.of(os.environ), address)
        set_up_logging(config.log_level, config.log_file(place.rank))
        if self._meeting is not None:
            place = dataclasses.replace(place, listen_fd=self._meeting.detach())
        self._worker = WorkerThread(config, place)
        self._worker.start()

    def set_num_threads(self, num_threads: int) -> None:
        """Compute with so many threads from the next step on."""
        compute_threads.want(num_threads)

    def leave(self) -> None:
        """End the rank now, in good order; what runs is lost."""
        if self._worker is not None:
            self._worker.stop()

    def wait_until_over(self, timeout_s: float) -> Over | None:
        """Return when the rank is over, or after `timeout_s` with None."""
        assert self._worker is not None, "launch comes first"
        try:
            return Over(self._worker.wait(timeout_s))
        except TimeoutError:
            return None
