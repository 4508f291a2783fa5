"""One server of a control plane: a child process, its log and its port."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.k8s.control_plane.errors import ServerEndedError

# Below what Linux gives to outgoing connections: a client that calls a server which is down could
# otherwise be given that very port, and keep the server from coming back. Ray's end at 19999.
_PORTS = range(20_000, 32_000)
_POLL_S = 0.05
_TAIL_BYTES = 2000


class PortTakenError(ServerEndedError):
    """Somebody else has the port by now: another one will do."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class Server:
    """Own one program's process; it may be started again after it was killed."""

    def __init__(
        self, command: tuple[str | Path, ...], folder: Path, environment: Mapping[str, str]
    ) -> None:
        """`environment` is added to this process's own."""
        self.name = Path(command[0]).name
        self._command = command
        self._log = folder / f"{self.name}.log"
        self._environment = {**os.environ, **environment}
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Raises ServerEndedError when it ends, or is not ready in time."""
        assert self._process is None, self.name
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            process = self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ctrl-C is for the tests to handle
            )
        give_up_at = time.monotonic() + timeout_s
        while not is_ready():
            if process.poll() is not None:
                raise self._ended(f"ended with {process.returncode}")
            if time.monotonic() > give_up_at:
                raise self._ended(f"not ready after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """At once: nothing in it must outlive it. Nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def listens(self, port: int) -> bool:
        """Whether this process does: another's server may have come by the port."""
        assert self._process is not None, self.name
        try:
            open_here = psutil.Process(self._process.pid).net_connections(kind="tcp4")
        except psutil.Error:  # it has just ended
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in open_here)

    def _ended(self, how: str) -> ServerEndedError:
        written = self._log.read_bytes()[self._log_start :]
        tail = written[-_TAIL_BYTES:].decode(errors="replace")
        kind = PortTakenError if "address already in use" in tail else ServerEndedError
        return kind(f"{self.name} {how}; its log ends with:\n{tail}")
