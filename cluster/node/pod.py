"""The pod that this process runs in, and the workers that serve there.

Each worker writes its address to a file of the pod, for the process that drains the pod. By then
the supervisor, its registry and Ray's head may be gone. A worker that still loads has no file.
Closing the pod keeps it from serving on a machine that is about to end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.message import Message

from baton.config.workers import PORT_VARIABLE
from baton.v1 import common_pb2, control_pb2
from kv_transfer.process import ProcessIdentity, is_gone


@dataclass(frozen=True)
class Pod:
    """A pod as Kubernetes' downward API describes it in its containers' environment."""

    name: str
    ip: str | None
    node_name: str
    port: int = 0
    """The worker's port; 0: the port of the worker's settings."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Pod | None:
        """Return the pod that the environment describes; None outside Kubernetes."""
        name = environment.get("POD_NAME")
        if not name:
            return None
        ip, node_name = environment.get("POD_IP") or None, environment.get("NODE_NAME", "")
        return cls(name, ip, node_name, int(environment.get(PORT_VARIABLE) or 0))

    @property
    def folder(self) -> Path:
        """The pod's own folder, readable by this user only: pods may share /tmp in tests."""
        return Path(tempfile.gettempdir()) / f"baton-pod-{self.name}"


class PodWorkers:
    """The workers that serve in a pod: one file each, while it serves.

    A worker first adds itself and then checks whether the pod is closed. A drain first closes the
    pod and then lists the workers. So at least one of them sees the other.
    """

    def __init__(self, pod: Pod) -> None:
        self._folder = pod.folder
        self._closed = self._folder / "closed"

    def add(self, worker: control_pb2.WorkerInfo) -> None:
        self._write(self._path(worker), worker)

    def close(self, container: ProcessIdentity) -> None:
        """Let no worker begin to serve here while the container's main process lives. A restarted
        container is open again."""
        self._write(self._closed, container.to_proto())

    @property
    def is_closed(self) -> bool:
        try:
            text = self._closed.read_text()
        except FileNotFoundError:
            return False
        container = json_format.Parse(text, common_pb2.ProcessIdentity())
        # None means that it ended: a restarted container has its own pid namespace.
        return is_gone(ProcessIdentity.from_proto(container)) is False

    def remove(self, worker: control_pb2.WorkerInfo) -> None:
        self._path(worker).unlink(missing_ok=True)

    def live(self) -> list[control_pb2.WorkerInfo]:
        """Workers with a process left. A killed worker leaves its file behind."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                text = path.read_text()
            except FileNotFoundError:  # it has just left
                continue
            worker = json_format.Parse(text, control_pb2.WorkerInfo())
            if not is_over(worker):
                found.append(worker)
        return found

    def _write(self, path: Path, message: Message) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json_format.MessageToJson(message))
        os.replace(fresh, path)

    def _path(self, worker: control_pb2.WorkerInfo) -> Path:
        return self._folder / f"{worker.ref.worker_id}.{worker.ref.incarnation}.json"


def is_over(worker: control_pb2.WorkerInfo) -> bool:
    """Whether all processes of a worker in this pod have ended."""
    ranks = worker.ref.ranks
    return all(is_gone(ProcessIdentity.from_proto(rank.process)) for rank in ranks)
