"""One run of one container: from its first process to its last one's end."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.local.process_tree import MARK_VARIABLE
from tests.k8s.kubelet.cgroups import Cgroup
from tests.k8s.kubelet.entry import Entry
from tests.k8s.kubelet.errors import ContainerError
from tests.k8s.kubelet.machine import REPOSITORY
from tests.k8s.kubelet.probes import Prober, Target, probes_of

_LEAST_GRACE_S = 2.0
"""Kubernetes waits so long after a SIGTERM, also where `preStop` has used up the grace."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Ended:
    status: int
    """As a shell counts: 128 plus the signal that ended it."""
    started_at: str
    ended_at: str


class ContainerRun:
    """Own the processes of one run; `changed` is called when anything about it has changed."""

    def __init__(
        self, spec: Mapping[str, Any], entry: Entry, log_path: Path, changed: Callable[[], None]
    ) -> None:
        """It makes the group `entry.cgroup` and the folder `entry.root`."""
        self._spec = spec
        self._entry = entry
        self._log_path = log_path
        self._changed = changed
        self._group = Cgroup(Path(entry.cgroup))
        Path(entry.root).mkdir()
        self.started_at = now_text()
        self.ended: Ended | None = None
        self._process = self._start_first(entry)
        self._prober: Prober | None = None
        self._waiter = threading.Thread(target=self._wait, name="container", daemon=True)
        self._waiter.start()

    def probe(self, address: str) -> None:
        """Begin with its probes, if it has any."""
        if probes := probes_of(self._spec):
            ports = {
                port["name"]: int(port["containerPort"])
                for port in self._spec.get("ports") or ()
                if "name" in port
            }
            self._prober = Prober(probes, Target(address, ports, self.run), self._changed)

    @property
    def is_started(self) -> bool:
        return self.ended is None and (self._prober is None or self._prober.is_started)

    @property
    def is_ready(self) -> bool:
        return self.ended is None and (self._prober is None or self._prober.is_ready)

    @property
    def is_alive(self) -> bool:
        """False: its probes say that it hangs."""
        return self._prober is None or self._prober.is_alive

    def run(self, command: tuple[str, ...], timeout_s: float) -> int | None:
        """Run a command beside what runs. Returns its status; None: it took too long, or the
        container is gone."""
        if self.ended is not None:
            return None
        try:
            return self._run_inside(command, timeout_s).returncode
        except subprocess.TimeoutExpired:
            return None

    def output_of(self, *command: str, timeout_s: float = 30.0) -> str:
        """What a command prints, as `kubectl exec` runs it. Raises ContainerError, with its output,
        where it fails or takes longer."""
        try:
            done = self._run_inside(command, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ContainerError(f"{' '.join(command)}: not done in {timeout_s:.0f} s") from error
        if done.returncode:
            raise ContainerError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def _run_inside(
        self, command: tuple[str, ...], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        entry = self._command(self._added(command))
        done: subprocess.CompletedProcess[str] = subprocess.run(
            entry, **self._options(), timeout=timeout_s, check=False, capture_output=True, text=True
        )
        return done

    def stop(self, ends_at: Callable[[], float]) -> None:
        """`preStop`, SIGTERM, and SIGKILL for all of it at `ends_at`, a monotonic time which may
        come nearer meanwhile."""
        if self._prober is not None:
            self._prober.stop()
        if self.ended is None and (command := _pre_stop(self._spec)):
            self._run_until(command, ends_at)
        if self.ended is None:
            self._process.send_signal(signal.SIGTERM)
        least = time.monotonic() + _LEAST_GRACE_S
        while self.ended is None and time.monotonic() < _no_sooner(least, ends_at()):
            self._waiter.join(_POLL_S)
        self.end()

    def kill(self) -> None:
        """Kill its first process, and so all of it, as a node without memory does. The pod goes on
        as its restart policy says."""
        self._process.kill()

    def pids(self, program: str) -> list[int]:
        """Its processes whose name, as `ps -o comm` shows it, begins so."""
        return [pid for pid in self._group.pids if (_name_of(pid) or "").startswith(program)]

    def end(self) -> None:
        """Kill it at once; nothing of it is left on return."""
        if self._prober is not None:
            self._prober.stop()
        self._group.kill()
        self._waiter.join()
        if self._prober is not None:
            self._prober.join()
        self._group.remove()

    def _run_until(self, command: tuple[str, ...], ends_at: Callable[[], float]) -> None:
        process = self._start(self._added(command))
        while process.poll() is None and time.monotonic() < ends_at():
            time.sleep(_POLL_S)
        process.kill()
        process.wait()

    def _wait(self) -> None:
        status = self._process.wait()
        self._group.kill()  # with its first process a container ends
        self.ended = Ended(128 - status if status < 0 else status, self.started_at, now_text())
        self._changed()

    def _added(self, command: tuple[str, ...]) -> Entry:
        pid = self._process.pid
        return replace(self._entry, container_pid=pid, held=None, command=command)

    def _start_first(self, entry: Entry) -> subprocess.Popen[bytes]:
        """On return its namespaces are made, and others may go into them."""
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as ends_with_exec:
            try:
                process = self._start(replace(entry, held=writer), (writer,))
            finally:
                os.close(writer)
            ends_with_exec.read()
        return process

    def _start(self, entry: Entry, held: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            os.fchown(log.fileno(), entry.user.uid, -1)  # as a runtime does: its user may open it
            return subprocess.Popen(
                self._command(entry),
                **self._options(),
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=held,
            )

    def _command(self, entry: Entry) -> list[str]:
        file = Path(self._entry.root).with_suffix(f".{secrets.token_hex(4)}.json")
        file.touch(0o600)
        file.write_text(json.dumps(asdict(entry)))
        return [sys.executable, "-S", "-E", "-m", "tests.k8s.kubelet.entry", str(file)]

    def _options(self) -> dict[str, Any]:
        return {
            "cwd": REPOSITORY,
            "env": {MARK_VARIABLE: self._entry.environment[MARK_VARIABLE]},
            "stdin": subprocess.DEVNULL,
            "start_new_session": True,
        }


def _name_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().removesuffix("\n")
    except OSError:  # gone since
        return None


def _no_sooner(least: float, ends_at: float) -> float:
    """Not so where all is to end at once."""
    return ends_at if ends_at == -math.inf else max(least, ends_at)


def now_text() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _pre_stop(spec: Mapping[str, Any]) -> tuple[str, ...]:
    hook = (spec.get("lifecycle") or {}).get("preStop") or {}
    return tuple((hook.get("exec") or {}).get("command") or ())
