"""A pod, from when it is bound to when nothing of it is left:

1. It gets a network with an address, and its volumes.
2. Init containers run, one after the other, until each has succeeded; then its containers do, all
   together, each started again when it ends, as the restart policy says.
3. Its deletion begins (a person, its owner, an eviction): it is not ready any more; each
   container's `preStop` runs, then SIGTERM, then, when the grace is over, SIGKILL for all of it.
4. The object is deleted for good. A report that the API server does not take is repeated. Where
   the object has gone by itself (`--force`), the processes are killed at once.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.controller.kit.errors import KubeError
from deploy.controller.kit.objects import Object
from tests.k8s.kubelet.api_gate import ENVIRONMENT, open_gate_in
from tests.k8s.kubelet.cgroups import Cgroup
from tests.k8s.kubelet.container import ContainerRun, now_text
from tests.k8s.kubelet.container_runs import ContainerRuns
from tests.k8s.kubelet.entry import Entry, VolumeMount
from tests.k8s.kubelet.environment import PodFacts, command_of, environment_of, user_of
from tests.k8s.kubelet.hosts import hosts_of
from tests.k8s.kubelet.machine import Image, Machine
from tests.k8s.kubelet.network import PodNetwork
from tests.k8s.kubelet.pod_api import PodApi
from tests.k8s.kubelet.pod_status import PodState
from tests.k8s.kubelet.volumes import Volumes
from tests.k8s.tcp_proxy import TcpProxy

log = logging.getLogger(__name__)

_REPORT_AGAIN_S = 0.5
_NO_RESOLVER = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
"""Nobody answers there: a name that /etc/hosts lacks is unknown at once."""


@dataclass(frozen=True)
class Surroundings:
    """What all pods of a kubelet share."""

    machine: Machine
    api: PodApi
    gate: TcpProxy
    service_hosts: Callable[[], str]


class PodRun:
    """Own one pod's processes and the thread that sees to them."""

    def __init__(self, pod: Object, around: Surroundings) -> None:
        self._pod = pod
        self._around = around
        self._lock, self._hosts_lock = threading.Lock(), threading.Lock()
        self._changed = threading.Event()
        self._deletion_seen_at: float | None = None
        self._is_forced = False
        spec = pod["spec"]
        self._inits = [ContainerRuns(spec, each, True) for each in spec.get("initContainers") or ()]
        self._containers = [ContainerRuns(spec, each, False) for each in spec["containers"]]
        self._sandbox: _Sandbox | None = None
        self._reported: PodState | None = None
        self._status: Mapping[str, Any] = pod.get("status") or {}
        self.update(pod)
        self._thread = threading.Thread(target=self._run, name=f"pod-{self.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return str(self._pod["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self._pod["metadata"]["uid"])

    def update(self, pod: Object) -> None:
        """The object has changed."""
        with self._lock:
            self._pod = pod
            if "deletionTimestamp" in pod["metadata"] and self._deletion_seen_at is None:
                self._deletion_seen_at = time.monotonic()
        self._changed.set()

    def force(self) -> None:
        """Its processes are killed, now; `join` waits for that."""
        self._is_forced = True
        self._changed.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def container(self, name: str | None = None) -> ContainerRun:
        """The newest run of a container, the first one's if none is named."""
        found = [container for container in self._containers if name in (None, container.name)]
        run = found[0].run if found else None
        assert run is not None, f"no container {name} runs in {self.name}"
        return run

    def refresh_hosts(self) -> None:
        """In place: the file is mounted in containers."""
        with self._hosts_lock:  # the last to write is the last to have read
            if self._sandbox is not None:
                self._sandbox.write_hosts(self._around.service_hosts())

    def refresh_volumes(self) -> None:
        with self._hosts_lock:
            if self._sandbox is not None:
                self._sandbox.volumes.refresh(self._around.api.values)

    # --- its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            sandbox = _Sandbox(self._pod, self._around, self._changed.set)
            try:
                self._sandbox = sandbox
                self.refresh_hosts()
                self._live(sandbox)
                self._leave(sandbox)
            finally:
                with self._hosts_lock:
                    self._sandbox = None
                sandbox.remove()
        except Exception:
            log.exception("pod %s failed", self.name)

    def _live(self, sandbox: _Sandbox) -> None:
        self._report(sandbox)
        while not self._is_going:
            self._changed.clear()
            self._look(sandbox)
            self._wait(is_reported=self._report(sandbox))

    def _look(self, sandbox: _Sandbox) -> None:
        for container in self._inits:
            container.look(sandbox.start, self._ends_at)
            if not container.has_succeeded:
                return
        for container in self._containers:
            if not self._is_going:
                container.look(sandbox.start, self._ends_at)

    def _wait(self, *, is_reported: bool) -> None:
        due = [at for container in self._all if (at := container.next_look_at()) is not None]
        if not is_reported:
            due.append(time.monotonic() + _REPORT_AGAIN_S)
        wait_s = None if not due else max(0.0, min(due) - time.monotonic())
        if not self._is_going:
            self._changed.wait(wait_s)

    def _leave(self, sandbox: _Sandbox) -> None:
        self._report(sandbox)
        runs = [container.run for container in self._all if container.run is not None]
        stopping = [
            threading.Thread(target=run.stop, args=(self._ends_at,), name="stop", daemon=True)
            for run in runs
        ]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        while not self._is_forced and not self._delete():
            self._changed.clear()
            self._changed.wait(_REPORT_AGAIN_S)

    @property
    def _all(self) -> list[ContainerRuns]:
        return [*self._inits, *self._containers]

    @property
    def _is_going(self) -> bool:
        return self._is_forced or self._deletion_seen_at is not None

    def _ends_at(self) -> float:
        """When the grace is over: an owner or a person may shorten it meanwhile."""
        with self._lock:
            if self._is_forced:
                return -math.inf
            if self._deletion_seen_at is None:
                return math.inf
            grace_s = float(self._pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            return self._deletion_seen_at + grace_s

    # --- what is reported to the API server -----------------------------------------------------

    def _report(self, sandbox: _Sandbox) -> bool:
        """Whether the API server knows how it is."""
        state = PodState(
            sandbox.address,
            sandbox.host_address,
            sandbox.made_at,
            tuple(container.state() for container in self._inits),
            tuple(container.state() for container in self._containers),
            self._is_going,
        )
        if state == self._reported:
            return True
        status = state.status(self._status)
        try:
            self._around.api.put_status(self._pod, status)
        except KubeError as error:
            log.warning("pod %s: its status is reported again: %s", self.name, error)
            return False
        self._reported, self._status = state, status
        return True

    def _delete(self) -> bool:
        try:
            self._around.api.delete_now(self._pod)
        except KubeError as error:
            log.warning("pod %s: it is deleted again: %s", self.name, error)
            return False
        return True


class _Sandbox:
    """Own what a pod's containers live in."""

    def __init__(self, pod: Object, around: Surroundings, changed: Callable[[], None]) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self._pod = pod
        self._around = around
        self._changed = changed
        self.made_at = now_text()
        machine = around.machine
        self._folder, self._memory = machine.folder / uid, machine.memory / uid
        self._logs = machine.logs / name
        for folder in (self._folder, self._memory, self._logs):
            folder.mkdir(parents=True, exist_ok=True)
        self._network: PodNetwork = machine.network.join(name)
        self._group: Cgroup = machine.group.child(uid)
        open_gate_in(self._network.pid, around.gate)
        self.address, self.host_address = self._network.address, machine.network.gateway
        self._facts = PodFacts(pod, self.address, self.host_address)
        volumes = self._folder / "volumes"
        self.volumes = Volumes(self._facts, volumes, self._memory, machine.folder)
        (self._folder / "resolv.conf").write_text(_NO_RESOLVER)
        self.write_hosts("")

    def write_hosts(self, services: str) -> None:
        text = hosts_of(self._pod["metadata"]["name"], self._network.address, services).encode()
        path = self._folder / "hosts"
        path.touch(0o644)
        with path.open("r+b", buffering=0) as file:
            file.write(text)
            file.truncate()

    def start(self, spec: Mapping[str, Any], number: int) -> ContainerRun:
        """Raises ContainerError, KubeError."""
        api, network = self._around.api, self._network
        self.volumes.make(api.values, api.token)
        user = user_of(self._pod, spec)
        home = {"HOME": "/root" if user.uid == 0 else "/"}
        image = self._around.machine.image(str(spec.get("image")))
        base = {**image.environment, **home, **ENVIRONMENT}
        environment = environment_of(spec, self._facts, api.values, base)
        environment |= self._around.machine.mark
        called = f"{spec['name']}-{number}"
        entry = Entry(
            cgroup=str(self._group.path / called),
            pod_pid=network.pid,
            container_pid=None,
            root=str(self._folder / called),
            image=str(image.root),
            is_read_only=bool((spec.get("securityContext") or {}).get("readOnlyRootFilesystem")),
            shares_memory=bool(self._pod["spec"].get("hostIPC")),
            mounts=(*self._own_mounts(image), *self.volumes.mounts_of(spec)),
            opened=image.opened,
            user=user,
            folder=spec.get("workingDir") or "/",
            command=command_of(spec, environment),
            environment=environment,
        )
        run = ContainerRun(spec, entry, self._logs / f"{called}.log", self._changed)
        run.probe(self.address)
        return run

    def _own_mounts(self, image: Image) -> tuple[VolumeMount, ...]:
        files = [(self._folder / name, f"/etc/{name}") for name in ("hosts", "resolv.conf")]
        mounts = [VolumeMount(str(source), target, read_only=True) for source, target in files]
        return (*mounts, *(VolumeMount(path, path, read_only=True) for path in image.folders))

    def remove(self) -> None:
        self._group.remove()
        self._network.leave()
        shutil.rmtree(self._folder)
        shutil.rmtree(self._memory)
