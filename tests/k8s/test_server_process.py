"""A server that ends, or whose port is another's, is told with the end of its log."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.control_plane.errors import ServerEndedError
from tests.k8s.control_plane.process import PortTakenError, Server, free_port
from tests.k8s.control_plane.scratch import scratch_folder

LISTEN = """
import socket, sys, time
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    s.bind(("127.0.0.1", int(sys.argv[1])))
except OSError:
    sys.exit("bind: address already in use")
s.listen()
time.sleep(60)
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def listener(tmp_path: Path, port: int) -> Iterator[Server]:
    server = Server((sys.executable, "-c", LISTEN, str(port)), tmp_path, {})
    yield server
    server.kill()


def test_a_killed_server_comes_back_on_its_port(listener: Server, port: int) -> None:
    for _ in range(2):
        listener.start(lambda: listener.listens(port), 30.0)
        socket.create_connection(("127.0.0.1", port)).close()
        listener.kill()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_port_that_is_anothers_is_told_apart_from_a_server_that_failed(
    listener: Server, port: int, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTakenError):
        listener.start(lambda: listener.listens(port), 30.0)
    failing = Server((sys.executable, "-c", "raise SystemExit('no disk')"), tmp_path, {})
    with pytest.raises(ServerEndedError, match=r"ended with 1; .*:\nno disk") as error:
        failing.start(lambda: False, 30.0)
    failing.kill()
    assert not isinstance(error.value, PortTakenError)


def test_a_server_that_never_gets_ready_is_told_of_in_time(listener: Server) -> None:
    with pytest.raises(ServerEndedError, match="not ready after 0 s"):
        listener.start(lambda: False, 0.2)


def test_a_folder_of_a_killed_process_goes_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"baton-control-plane.{over.pid}.x").mkdir()
    no_memory = tmp_path / "none"
    with scratch_folder(no_memory) as first, scratch_folder(no_memory) as second:
        assert {first, second} == set(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
