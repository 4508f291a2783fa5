"""However a test run ends, its servers end with it."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from cluster.local.process_tree import descendants, wait_until_gone
from tests.k8s.control_plane.plane import ControlPlane

pytestmark = pytest.mark.full

RUN = """
import signal

from tests.k8s.control_plane.assets import find
from tests.k8s.control_plane.plane import control_plane_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in background
with control_plane_of(find()) as control_plane:
    print(control_plane.folder, flush=True)
    input()
"""


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
