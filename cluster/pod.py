"""The pod that this process runs in, and the workers that serve there.

Each worker tells in a file where it serves, for whoever drains the pod: by then the supervisor, its
registry and Ray's head may all be gone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from baton.v1 import control_pb2
from cluster.config import PORT_VARIABLE
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
    """The workers that serve in a pod: one file each, until it serves no more."""

    def __init__(self, pod: Pod) -> None:
        self._folder = pod.folder

    def enter(self, worker: control_pb2.WorkerInfo) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(worker)
        fresh = path.with_suffix(".new")
        fresh.write_text(json_format.MessageToJson(worker))
        os.replace(fresh, path)

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

    def _path(self, worker: control_pb2.WorkerInfo) -> Path:
        return self._folder / f"{worker.ref.worker_id}.{worker.ref.incarnation}.json"


def is_over(worker: control_pb2.WorkerInfo) -> bool:
    """Whether all of its processes, which are of this pod, have ended."""
    ranks = worker.ref.ranks
    return all(is_gone(ProcessIdentity.from_proto(rank.process)) for rank in ranks)
