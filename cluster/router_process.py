"""The router as a child process that is started again when it dies."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import UnavailableError
from cluster.rank import free_port

log = logging.getLogger(__name__)

_RESTART_AFTER_S = 0.2
_LONGEST_RESTART_S = 5.0
_DRAIN_S = 5.0


class RouterError(UnavailableError):
    """The router could not be started."""


class RouterProcess:
    """Owns `python -m router`; it keeps its port over restarts. Its output goes to `log_path`.

    `variables` are added to its environment.
    """

    def __init__(
        self,
        control: str,
        config_path: Path,
        listen: str,
        log_path: Path,
        variables: Mapping[str, str],
    ) -> None:
        host, _, port = listen.rpartition(":")
        self.address = f"{host}:{int(port) or free_port(host)}"
        self._command = [sys.executable, "-m", "router"]
        self._command += ["--control", control, "--config", str(config_path)]
        self._command += ["--listen", self.address]
        self._log_path = log_path
        self._environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(variables)
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._keeper = threading.Thread(target=self._keep, name="router-keeper", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the router that runs now."""
        return None if self._process is None else self._process.pid

    def start(self, timeout_s: float) -> None:
        """Start it and wait until it serves. Raises RouterError with the end of its log."""
        self._keeper.start()
        give_up_at = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._closing.is_set():
                try:
                    answer = stub.Check(
                        health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True
                    )
                except grpc.RpcError:
                    answer = None
                if answer is not None and answer.status == answer.SERVING:
                    return
                if time.monotonic() > give_up_at or self._num_starts > 3:
                    break
                time.sleep(0.02)
        raise RouterError(f"the router does not serve at {self.address}: {self._log_end()}")

    def close(self) -> None:
        """End it, gently at first; returns when it is gone. Idempotent."""
        self._closing.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_DRAIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._keeper.ident is not None:
            self._keeper.join()

    def _keep(self) -> None:
        backoff_s = _RESTART_AFTER_S
        with self._log_path.open("ab") as output:
            while not self._closing.is_set():
                started_at = time.monotonic()
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # ctrl-C is for the cluster to handle, in its order
                    env=self._environment,
                )
                self._num_starts += 1
                if self._closing.is_set():
                    self._process.terminate()
                status = self._process.wait()
                if self._closing.is_set():
                    return
                log.error("the router ended with status %d; starting it again", status)
                lived_s = time.monotonic() - started_at
                backoff_s = (
                    _RESTART_AFTER_S if lived_s > 10 else min(_LONGEST_RESTART_S, 2 * backoff_s)
                )
                self._closing.wait(backoff_s)

    def _log_end(self) -> str:
        if not self._log_path.exists():
            return "it never ran"
        lines = self._log_path.read_text(errors="replace").splitlines()
        return " | ".join(lines[-5:]) or "it said nothing"
