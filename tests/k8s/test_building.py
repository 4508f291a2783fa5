"""Building a control plane: once, whole or not at all, reported and explained; and finding one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.k8s.control_plane import build
from tests.k8s.control_plane.assets import Assets, RunningCluster, find
from tests.k8s.control_plane.build import made_once
from tests.k8s.control_plane.debian import Archive
from tests.k8s.control_plane.errors import BuildError, NotAtHandError, NotBuiltError
from tests.k8s.control_plane.recipe import built_folder
from tests.k8s.control_plane.steps import Steps

DEB822 = """\
# Who made this file
Types: deb
# a snapshot
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://vendor.example/tools
Suites: tools-bookworm
Components: main
"""
ONE_LINE = """\
# deb http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/etc/key.gpg] http://mirror.example/debian bookworm main
deb http://vendor.example/tools tools-bookworm main
deb http://mirror.example/debian trixie main
"""


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "build.log", 30.0, lambda line: None)


@pytest.fixture
def nothing_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_TEST_KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def programs(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch(0o755)
    return folder


def machine(tmp_path: Path, name: str, text: str) -> Path:
    """What /etc/apt is to a machine whose one file of sources is `name`."""
    apt = tmp_path / "etc-apt"
    (apt / name).parent.mkdir(parents=True)
    (apt / name).write_text(text)
    return apt


def test_what_was_made_is_found_again(tmp_path: Path) -> None:
    target = tmp_path / "new" / "made"
    assert made_once(target, lambda folder: (folder / "program").touch(), 1.0)
    assert not made_once(target, lambda folder: pytest.fail("made twice"), 1.0)
    assert [path.name for path in target.iterdir()] == ["program"]


def test_a_maker_that_is_cut_off_leaves_no_half(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def cut_off(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(target, cut_off, 1.0)
    programs(tmp_path / "made.making-killed", "half")  # as a killed one leaves it
    assert made_once(target, lambda folder: None, 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.lock"]


def test_of_two_makers_the_second_waits_for_the_first(tmp_path: Path) -> None:
    target, is_making, may_end = tmp_path / "made", threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        is_making.set()
        assert may_end.wait(30)

    first = threading.Thread(target=made_once, args=(target, slowly, 1.0))
    first.start()
    try:
        assert is_making.wait(30)
        with pytest.raises(BuildError, match="another build"):
            made_once(target, lambda folder: pytest.fail("made twice"), 0.0)
        threading.Timer(0.1, may_end.set).start()
        assert not made_once(target, lambda folder: pytest.fail("made twice"), 30.0)
    finally:
        may_end.set()
        first.join()


def test_a_step_that_fails_is_reported_with_what_it_wrote(steps: Steps, tmp_path: Path) -> None:
    steps.run("writing", ("sh", "-c", "echo of another step"), tmp_path)
    with pytest.raises(BuildError, match=r"failing: sh ended with 3:\nno such thing$"):
        steps.run("failing", ("sh", "-c", "echo no such thing >&2; exit 3"), tmp_path)
    with pytest.raises(BuildError, match=r"looking: .*no-such-command"):
        steps.run("looking", ("no-such-command",), tmp_path)


def test_a_step_ends_with_its_children_when_the_builds_time_is_over(tmp_path: Path) -> None:
    lines: list[str] = []
    steps = Steps(tmp_path / "build.log", 0.5, lines.append)
    started_at = time.monotonic()
    with pytest.raises(BuildError, match="waiting: not done"):
        steps.run("waiting", ("sh", "-c", "sleep 60 & echo $! > child; wait"), tmp_path)
    assert time.monotonic() - started_at < 30
    assert lines[0] == "[0:00] waiting"
    child = int((tmp_path / "child").read_text())
    give_up_at = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up_at, "the step's child lives on"


@pytest.mark.parametrize(
    ("name", "text"), [("sources.list.d/debian.sources", DEB822), ("sources.list", ONE_LINE)]
)
def test_the_machines_own_mirror_is_asked_for_sources_too(
    steps: Steps, tmp_path: Path, name: str, text: str
) -> None:
    Archive(tmp_path / "apt", steps, machine(tmp_path, name, text))
    written = (tmp_path / "apt" / "sources" / Path(name).name).read_text()
    assert "mirror.example" in written
    assert "vendor.example" not in written
    assert "trixie" not in written
    if name.endswith(".list"):
        rest = "[arch=amd64 signed-by=/etc/key.gpg] http://mirror.example/debian bookworm main"
        assert written.splitlines() == [f"deb {rest}", f"deb-src {rest}"]
    else:
        assert "Types: deb deb-src\n" in written
        assert "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg" in written


def test_another_system_is_refused_since_it_lacks_the_release(steps: Steps, tmp_path: Path) -> None:
    apt = machine(tmp_path, "sources.list", "deb http://mirror.example/ubuntu noble main\n")
    with pytest.raises(BuildError, match="do not name Debian bookworm"):
        Archive(tmp_path / "apt", steps, apt)


@pytest.mark.usefixtures("nothing_named")
def test_what_is_named_comes_before_what_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotBuiltError, match="make control-plane"):
        find()
    needed = ("kube-apiserver", "etcd", "kubectl")
    built = programs(built_folder(), *needed, "kube-controller-manager", "helm")
    assert isinstance(found := find(), Assets)
    assert found.kube_controller_manager == built / "kube-controller-manager"
    assert found.clients.helm == built / "helm"

    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(programs(tmp_path / "envtest", *needed)))
    assert isinstance(found := find(), Assets)
    assert (found.etcd, found.kube_controller_manager) == (tmp_path / "envtest/etcd", None)

    monkeypatch.setenv("BATON_TEST_KUBECONFIG", str(kubeconfig := tmp_path / "kubeconfig"))
    with pytest.raises(NotAtHandError, match="is no file"):
        find()
    kubeconfig.touch()
    on_path = programs(tmp_path / "bin", "kubectl")
    monkeypatch.setenv("PATH", str(on_path), prepend=os.pathsep)
    assert isinstance(running := find(), RunningCluster)
    assert (running.kubeconfig, running.clients.kubectl) == (kubeconfig, on_path / "kubectl")


@pytest.mark.usefixtures("nothing_named")
def test_an_incomplete_folder_is_named_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = programs(tmp_path / "envtest", "kube-apiserver", "etcd")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    with pytest.raises(NotAtHandError, match="KUBEBUILDER_ASSETS: no program kubectl"):
        find()


@pytest.mark.usefixtures("nothing_named")
def test_an_error_that_nothing_is_found_says_why_the_last_build_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert build.main() == 1
    missing = "missing on this machine: apt, dpkg, dpkg-dev, npm"
    assert missing in capsys.readouterr().err
    with pytest.raises(NotBuiltError, match=f"the last build failed: {missing}"):
        find()
