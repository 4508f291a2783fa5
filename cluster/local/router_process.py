"""The router as a child process that is started again when it dies.

One that ends with status 2 before it has ever served cannot be configured so: trying again is in
vain, and whoever starts it is told what it said. Once it has served, every end is an accident.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config.router import RouterConfig
from baton.errors import ConfigError, UnavailableError
from baton.grpc_options import DIRECT
from cluster.worker.rank import free_port

log = logging.getLogger(__name__)

_RESTART_AFTER_S = 0.2
_LONGEST_RESTART_S = 5.0
_DRAIN_MARGIN_S = 5.0  # beyond its own limit: it still tells its clients
_LOOK_S = 0.05
_ASK_AGAIN_MS = 100
_MAX_STARTS = 3
_CONFIG_STATUS = 2
_CHANNEL_OPTIONS = (
    *((f"grpc.{which}_reconnect_backoff_ms", _ASK_AGAIN_MS) for which in ("initial", "min", "max")),
    *DIRECT,
)


def with_health_port(config: RouterConfig) -> RouterConfig:
    """Whoever starts a router asks for its health in plain text: one that serves TLS tells it at a
    port of its own."""
    if config.tls is None or config.health_port:
        return config
    return dataclasses.replace(config, health_port=free_port(config.host))


class RouterError(UnavailableError):
    """The router could not be started."""


class RouterProcess:
    """Owns `python -m router`; it keeps its port over restarts. Its output goes to `log_path`.

    `drain_timeout_s` is how long the router itself lets requests finish; `variables` are added to
    its environment.
    """

    def __init__(
        self,
        control: str,
        config_path: Path,
        listen: str,
        log_path: Path,
        drain_timeout_s: float,
        variables: Mapping[str, str],
    ) -> None:
        host, _, port = listen.rpartition(":")
        self.address = f"{host}:{int(port) or free_port(host)}"
        self._command = [sys.executable, "-m", "router"]
        self._command += ["--control", control, "--config", str(config_path)]
        self._command += ["--listen", self.address]
        self._log_path = log_path
        self._drain_s = drain_timeout_s + _DRAIN_MARGIN_S
        self._environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(variables)
        self._closing = threading.Event()
        self._cut_short = False
        self._has_served = False
        self._misconfigured = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._not_launched = ""  # why the last start gave no process
        self._keeper = threading.Thread(target=self._keep, name="router-keeper", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the router that runs now."""
        return None if self._process is None else self._process.pid

    def start(self, timeout_s: float, health_port: int | None = None) -> None:
        """Start it and wait until it serves. `health_port`: where it tells so in plain text; None:
        where it listens.

        Raises ConfigError in its own words, RouterError with the end of its log.
        """
        self._keeper.start()
        give_up_at = time.monotonic() + timeout_s
        host, _, port = self.address.rpartition(":")
        asked = f"{host}:{health_port or port}"
        with grpc.insecure_channel(asked, options=_CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._closing.is_set():
                if self._misconfigured.wait(_LOOK_S):
                    raise ConfigError(self._last_words())
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                except grpc.RpcError:
                    answer = None
                if answer is not None and answer.status == answer.SERVING:
                    self._has_served = True
                    return
                if time.monotonic() > give_up_at or self._num_starts > _MAX_STARTS:
                    break
        why = self._not_launched or self._log_end()
        raise RouterError(f"the router does not serve at {self.address}: {why}")

    def cut_short(self) -> None:
        """What runs is not waited for, neither now nor in a `close` to come. For signal handlers:
        it takes no lock."""
        self._cut_short = True

    def close(self) -> None:
        """End it, gently at first; returns when it is gone. Idempotent."""
        self._closing.set()
        if self._keeper.ident is not None:
            self._keeper.join()

    def _keep(self) -> None:
        backoff_s = _RESTART_AFTER_S
        while not self._closing.is_set():
            started_at = time.monotonic()
            self._num_starts += 1
            why = self._run_once()
            if self._closing.is_set() or self._misconfigured.is_set():
                return
            log.error("the router %s; starting it again", why)
            lived_s = time.monotonic() - started_at
            backoff_s = _RESTART_AFTER_S if lived_s > 10 else min(_LONGEST_RESTART_S, 2 * backoff_s)
            self._closing.wait(backoff_s)

    def _run_once(self) -> str:
        """From its start to its end; how it ended."""
        try:
            process = self._process = self._launch()
        except OSError as error:  # no memory, no process or no file descriptor left: that may pass
            self._process = None
            self._not_launched = f"could not be started: {error}"
            return self._not_launched
        self._not_launched = ""
        status = self._wait(process)
        if status == _CONFIG_STATUS and not self._has_served:
            self._misconfigured.set()
        return f"ended with status {status}"

    def _launch(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as output:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ctrl-C is for the cluster to handle, in its order
                env=self._environment,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Until it ends, by itself or because of `close`; its status."""
        while process.poll() is None and not self._closing.wait(_LOOK_S):
            pass
        process.terminate()
        kill_at = time.monotonic() + self._drain_s
        while process.poll() is None and time.monotonic() < kill_at and not self._cut_short:
            time.sleep(_LOOK_S)
        process.kill()
        return process.wait()

    def _last_words(self) -> str:
        return self._log_lines()[-1].removeprefix("router: ")

    def _log_end(self) -> str:
        return " | ".join(self._log_lines()[-5:])

    def _log_lines(self) -> list[str]:
        """Never empty."""
        if not self._log_path.exists():
            return ["it never ran"]
        return self._log_path.read_text(errors="replace").splitlines() or ["it said nothing"]
