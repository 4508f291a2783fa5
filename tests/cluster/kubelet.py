"""What Kubernetes does about pods whose processes end: a container is started anew with its pod's
volumes, a head's pod that is lost is made anew without them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from typing import Self

from cluster.local.process_tree import Process, still_alive, wait_until_gone
from cluster.supervisor.run_dir import state_file
from tests.cluster.pods import PodCluster
from tests.cluster.ray_nodes import NodeProcess

_LOOK_S = 0.5


class Kubelet:
    """Owns the head's container, Ray and what runs beside it, and restarts the pools' containers.
    A thread looks which have ended."""

    def __init__(self, pods: PodCluster) -> None:
        self._pods = pods
        self._serving = self._beside_ray()
        self._seen: dict[int, set[Process]] = {}  # what containers' main processes had started
        self._over = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def lose_head(self) -> None:
        """The head's pod is killed with all that is in it; another one is made at once."""
        with self._busy:
            self._end_head()
            shutil.rmtree(self._pods.folder / "head", ignore_errors=True)
            shutil.rmtree(self._pods.run_dir / "processes", ignore_errors=True)
            state_file(self._pods.run_dir).unlink(missing_ok=True)
            self._start_head()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with self._busy:
                self._look()

    def _look(self) -> None:
        self._runs(self._pods.head)
        if not self._runs(self._serving):  # the container's main process
            self._end_head()
            self._start_head()
        for pod in self._pods.pods.values():
            if not self._runs(pod.node):
                self._end(pod.node)
                self._pods.start_again(pod)

    def _runs(self, node: NodeProcess) -> bool:
        """Also sees what it has started: at its end nobody can tell any more."""
        pid = node.process.pid
        self._seen[pid] = self._seen.get(pid, set()) | node.tree()
        return node.process.poll() is None

    def _end(self, node: NodeProcess) -> None:
        """As the kernel does with a container's processes when its first one ends."""
        node.kill()
        started = self._seen.pop(node.process.pid, set())
        for process in still_alive(started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        assert wait_until_gone(started, 10.0) == set()

    def _start_head(self) -> None:
        # Ray takes a raylet that names this head in its command line for the head's own; a
        # container sees no processes of others.
        (self._pods.folder / "head" / "ray_current_cluster").unlink(missing_ok=True)
        self._pods.start_ray()
        self._serving = self._beside_ray()

    def _end_head(self) -> None:
        for node in (self._serving, self._pods.head):
            self._end(node)

    def _beside_ray(self) -> NodeProcess:
        pods, log = self._pods, f"serving-{os.urandom(3).hex()}.log"
        serving = NodeProcess(pods.head_command(), pods.environment, pods.run_dir / log)
        pods.stack.callback(serving.kill)
        return serving
