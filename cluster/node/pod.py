"""The pod that this process runs in, and the workers that serve there.

Each worker tells in a file where it serves, for whoever drains the pod: by then the supervisor, its
registry and Ray's head may all be gone. One that still loads is not among them: so that it does not
begin to serve on a machine that ends, the pod can be closed to it.
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
    """What Kubernetes' downward API says of a pod, in its containers' environment."""

    name: str
    ip: str | None
    node_name: str
    port: int = 0
    """At which its worker listens; 0: as the worker's settings say."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Pod | None:
        """None outside Kubernetes."""
        name = environment.get("POD_NAME")
        if not name:
            return None
        ip, node_name = environment.get("POD_IP") or None, environment.get("NODE_NAME", "")
        return cls(name, ip, node_name, int(environment.get(PORT_VARIABLE) or 0))

    @property
    def folder(self) -> Path:
        """Of its own, and of this user alone: pods of one machine may share what is temporary."""
        return Path(tempfile.gettempdir()) / f"baton-pod-{self.name}"


class PodWorkers:
    """The workers that serve in a pod: one file each, until it serves no more.

    A worker enters first and then looks whether the pod is closed; who closes it reads afterwards
    who is in. So one of them sees the other.
    """

    def __init__(self, pod: Pod) -> None:
        self._folder = pod.folder
        self._closed = self._folder / "closed"

    def enter(self, worker: control_pb2.WorkerInfo) -> None:
        self._write(self._path(worker), worker)

    def close(self, container: ProcessIdentity) -> None:
        """No worker is to begin to serve here while this process lives, its container's own: one
        that is started anew is another life."""
        self._write(self._closed, container.to_proto())

    @property
    def is_closed(self) -> bool:
        try:
            text = self._closed.read_text()
        except FileNotFoundError:
            return False
        container = json_format.Parse(text, common_pb2.ProcessIdentity())
        # None is an end, too: a container that was started anew has pids of its own.
        return is_gone(ProcessIdentity.from_proto(container)) is False

    def strike(self, worker: control_pb2.WorkerInfo) -> None:
        self._path(worker).unlink(missing_ok=True)

    def read(self) -> list[control_pb2.WorkerInfo]:
        """Those of which a process is left: one that was killed strikes nothing."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                text = path.read_text()
            except FileNotFoundError:  # it has left since
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
    """Whether all of its processes, which are of this pod, have ended."""
    ranks = worker.ref.ranks
    return all(is_gone(ProcessIdentity.from_proto(rank.process)) for rank in ranks)
