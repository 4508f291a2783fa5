"""Tests that are killed leave no process and no network, and, once others run, no file behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.kubelet.errors import NotPossibleError
from tests.k8s.kubelet.network import links
from tests.k8s.kubelet.objects import until
from tests.k8s.kubelet.place import REPOSITORY, place
from tests.k8s.kubelet.possible import check_possible

_HOLDS_A_POD = """
import sys, time
from pathlib import Path
from tests.k8s.kubelet.container import ContainerRun
from tests.k8s.kubelet.entry import Entry, User
from tests.k8s.kubelet.place import image_environment, place

with place(Path(sys.argv[1])) as made:
    pod = made.network.join("pod")
    made.logs.mkdir()
    entry = Entry(
        cgroup=str(made.group.path / "sleeps"), pod_pid=pod.pid, container_pid=None,
        root=str(made.folder / "sleeps"), shares_memory=False, mounts=(), opened=(),
        user=User(0, 0), folder="/", command=("sleep", "600"),
        environment={**image_environment(), **made.mark},
    )
    ContainerRun({"name": "sleeps"}, entry, made.logs / "log", lambda: None)
    print(made.network.link, made.group.path, made.folder, made.memory, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def possible() -> None:
    try:
        check_possible()
    except NotPossibleError as error:
        pytest.skip(f"NO PODS HERE: {error}")


@pytest.mark.usefixtures("possible")
def test_nothing_is_left_of_a_kubelet_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS_A_POD, str(tmp_path / "logs")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        link, *folders = killed.stdout.readline().split()
        assert link in links()
        processes = Path(folders[0]) / "sleeps" / "cgroup.procs"
        assert processes.read_text()
        killed.kill()
    until(lambda: processes.read_text() == "", "its processes have ended")
    until(lambda: link not in links(), "its network has gone")
    assert all(Path(folder).exists() for folder in folders)
    with place(tmp_path / "other-logs"):
        assert not any(Path(folder).exists() for folder in folders)
