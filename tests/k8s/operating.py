"""The operator as a process of its own, and how tests wait for what others do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.control_plane.process import free_port

_END_WITHIN_S = 30.0


@dataclass
class Operator:
    """`python -m deploy.controller` for one namespace."""

    process: subprocess.Popen[bytes]
    log: Path
    health_port: int

    def is_ready(self) -> bool:
        """As a kubelet's probe sees it."""
        url = f"http://127.0.0.1:{self.health_port}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except OSError:  # it does not listen yet, or says that it is not
            return False

    def kill(self) -> None:
        """As a node that fails: the lease stays."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(_END_WITHIN_S)


@contextlib.contextmanager
def operator_of(
    control_plane: ControlPlane, namespace: str, folder: Path, kubeconfig: Path | None = None
) -> Iterator[Operator]:
    """Started, not waited for; ended at the latest with the block."""
    log = folder / f"operator-{time.monotonic_ns()}.log"
    health_port = free_port()
    command = [
        *(sys.executable, "-m", "deploy.controller"),
        *("--kubeconfig", str(kubeconfig or control_plane.kubeconfig)),
        *("--namespace", namespace, "--lease-namespace", namespace),
        *("--worker-image", "baton-worker", "--router-image", "baton-router"),
        *("--ray-version", "2.60.0", "--health-port", str(health_port)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(os.environ))
    try:
        yield Operator(process, log, health_port)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def eventually(holds: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first answer that is true; AssertionError with the last one when none comes in time."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        answer = holds()
        if answer:
            return answer
        assert time.monotonic() < give_up_at, f"{what}: {answer!r} after {timeout_s:g} s"
        time.sleep(0.05)


def condition(obj: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A condition of an object's status; empty where there is none."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})
