"""The control plane that tests run on: its servers start, fail with their log, and end with the
tests however these end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.local.process_tree import descendants, wait_until_gone
from tests.k8s.control_plane.errors import ServerEndedError
from tests.k8s.control_plane.plane import ControlPlane, scratch_folder
from tests.k8s.control_plane.process import PortTakenError, Server, free_port

RUN = """
import signal

from tests.k8s.control_plane.assets import find
from tests.k8s.control_plane.plane import control_plane_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in background
with control_plane_of(find()) as control_plane:
    print(control_plane.folder, flush=True)
    input()
"""
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


def test_a_taken_port_is_another_error_than_a_server_that_failed(
    listener: Server, port: int, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTakenError):
        listener.start(lambda: listener.listens(port), 30.0)
    failing = Server((sys.executable, "-c", "raise SystemExit('no disk')"), tmp_path, {})
    with pytest.raises(ServerEndedError, match=r"ended with 1; .*:\nno disk") as error:
        failing.start(lambda: False, 30.0)
    failing.kill()
    assert not isinstance(error.value, PortTakenError)


def test_a_server_that_never_gets_ready_fails_in_time(listener: Server) -> None:
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


def test_the_server_answers_under_the_version_it_was_built_as(control_plane: ControlPlane) -> None:
    assert control_plane.version() >= (1, 20)
    assert control_plane.has_cel() == (control_plane.version() >= (1, 25))
    assert control_plane.kubectl("get", "--raw", "/readyz") == "ok"


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_server_outlives_a_run_that_was_ended(
    control_plane: ControlPlane, how: signal.Signals
) -> None:
    if control_plane.servers is None:
        pytest.skip("somebody else's cluster: nothing was started")
    run = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with run:
        assert run.stdout is not None
        assert run.stdout.readline(), "it did not start"
        started = descendants(run.pid)
        names = {psutil.Process(process.pid).name() for process in started}
        assert {"etcd", "kube-apiserver"} <= names
        run.send_signal(how)
        left = wait_until_gone(started, 60.0)
        assert not left
    assert run.returncode
