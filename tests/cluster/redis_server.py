"""A Redis for the state of Ray's GCS, and what KubeRay tells Ray's processes of it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.worker.rank import free_port

_UP_WITHIN_S = 10.0
WAITS_FOR_THE_GCS = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""The environment of workers' pods, whose raylets would give up after 60 s."""


@dataclass(frozen=True)
class Redis:
    address: str
    password: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    namespace: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of one Ray cluster's keys."""

    def keeps(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """The command and environment of a head whose state lies here."""
        reported = {
            "RAY_REDIS_ADDRESS": self.address,
            "RAY_external_storage_namespace": self.namespace,
        }
        return [*command, f"--redis-password={self.password}"], {**environment, **reported}


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[Redis]:
    """Afterwards it is gone. Skips the test where no redis-server is installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on PATH")
    port = free_port("127.0.0.1")
    redis = Redis(f"127.0.0.1:{port}")
    options = ["--bind", "127.0.0.1", "--port", str(port), "--requirepass", redis.password]
    options += ["--dir", str(folder), "--appendonly", "yes", "--save", ""]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_listens(port)
        yield redis
    finally:
        process.terminate()
        process.wait(10)


def _wait_until_listens(port: int) -> None:
    give_up_at = time.monotonic() + _UP_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < give_up_at, "redis-server does not listen"
            time.sleep(0.05)
