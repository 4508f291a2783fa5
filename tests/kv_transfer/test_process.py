"""A process is gone when its memory is: stopped, zombie, reaped, another with its pid."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.process import ProcessIdentity, is_gone, own_identity


def stat_fields(pid: int) -> list[str]:
    """What /proc says of a process after its name: state first, start time twentieth."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    code = (
        "import sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('up', flush=True); time.sleep(60)"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    ticks = int(stat_fields(running.pid)[19])
    yield running, replace(own_identity(), pid=running.pid, start_time_ticks=ticks)
    running.kill()
    running.wait()
    running.stdout.close()


def wait_until_gone(identity: ProcessIdentity) -> None:
    deadline_s = time.monotonic() + 10
    while not is_gone(identity):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_this_process_is_here() -> None:
    assert is_gone(own_identity()) is False
    assert ProcessIdentity.from_proto(own_identity().to_proto()) == own_identity()


def test_a_stopped_process_may_wake_and_is_not_gone(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity],
) -> None:
    running, identity = child
    os.kill(running.pid, signal.SIGSTOP)
    assert is_gone(identity) is False


def test_a_zombie_has_released_its_memory_and_is_gone(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity],
) -> None:
    running, identity = child
    running.kill()
    wait_until_gone(identity)
    fields = stat_fields(running.pid)
    assert fields[0] == "Z"


def test_a_reaped_process_is_not_mistaken_for_one_with_its_pid(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity],
) -> None:
    running, identity = child
    assert is_gone(replace(identity, start_time_ticks=identity.start_time_ticks - 1)) is True
    running.kill()
    running.wait()
    assert is_gone(identity) is True


def test_nothing_is_known_of_another_machine_or_pid_namespace() -> None:
    assert is_gone(replace(own_identity(), boot_id="another")) is None
    assert is_gone(replace(own_identity(), pid_namespace=1)) is None


def test_a_process_whose_name_the_kernel_cuts_inside_a_letter_is_judged_like_any_other(
    tmp_path: Path,
) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    command = shutil.copy(sleep, tmp_path / ("a" * 14 + "\u00e9"))  # the kernel keeps 15 bytes
    with subprocess.Popen([command, "100"]) as running:
        try:
            ticks = int(stat_fields(running.pid)[19])
            identity = replace(own_identity(), pid=running.pid, start_time_ticks=ticks)
            assert is_gone(identity) is False
        finally:
            running.kill()
