"""Ray nodes as processes of `ray start`, any number on one machine, as pods have one each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.config.workers import POD_LABEL
from cluster.local.process_tree import Process, descendants, still_alive, wait_until_gone
from cluster.worker.rank import free_port

_UP_WITHIN_S = 60.0
_LEAVE_S = 5.0
_OBJECT_STORE_BYTES = 80 << 20
_UP = "Ray runtime started"


def start_head(port: int, folder: Path) -> list[str]:
    """The command of a head whose GCS listens on `port`. `folder`: this node's alone, as in a pod,
    and with a short name, for Ray has its sockets in it."""
    return [
        *_ray_start(folder),
        "--head",
        f"--port={port}",
        "--include-dashboard=false",
        f"--ray-client-server-port={free_port('0.0.0.0')}",
        "--no-monitor",
        "--disable-usage-stats",
    ]


def start_worker(
    address: str, resources: Mapping[str, float], folder: Path, pod_name: str
) -> list[str]:
    """The command of a node that joins the GCS at `address`, offers `resources` and tells which pod
    it is."""
    return [
        *_ray_start(folder),
        f"--address={address}",
        f"--resources={json.dumps(resources)}",
        f"--labels={POD_LABEL}={pod_name}",
    ]


def _ray_start(folder: Path) -> list[str]:
    """What lets several nodes share a machine: no port that Ray would choose the same for each."""
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--num-cpus=1",
        f"--temp-dir={folder}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--dashboard-agent-listen-port={free_port('0.0.0.0')}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--include-log-monitor=false",
    ]


class NodeProcess:
    """A container's main process, and all that it starts. Its output goes to `log_path`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        """`environment` is added to this process's."""
        self._command, self._environment, self._log_path = command, environment, log_path
        self._tree: set[Process] = set()  # what it had started when it was asked to end
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment),
                start_new_session=True,
            )

    def again(self) -> NodeProcess:
        """Another start of the same; the log begins anew."""
        return NodeProcess(self._command, self._environment, self._log_path)

    def tree(self) -> set[Process]:
        """What lives of it now, itself left out."""
        return descendants(self.process.pid)

    def wait_until_up(self) -> None:
        """Until its node is one of the cluster's."""
        give_up_at = time.monotonic() + _UP_WITHIN_S
        while _UP not in (said := self._log_path.read_text(errors="replace")):
            assert self.process.poll() is None, said
            assert time.monotonic() < give_up_at, said
            time.sleep(0.05)

    def ask_to_end(self) -> None:
        """SIGTERM, as Kubernetes sends it."""
        self._tree |= self.tree()
        self.process.terminate()

    def end(self) -> None:
        """SIGTERM, and SIGKILL for what is left after a while. Idempotent."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LEAVE_S)
        self.kill()

    def kill(self) -> None:
        """As when its machine is lost: no process has time for anything."""
        self._tree |= self.tree()
        self.process.kill()
        self.process.wait()
        for process in still_alive(self._tree):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        assert wait_until_gone(self._tree, 10.0) == set()
