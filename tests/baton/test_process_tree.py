"""Finding what a cluster left behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from cluster.local.process_tree import descendants, still_alive, wait_until_gone

PARENT = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); "
    "print(child.pid, flush=True); input()"
)


def test_children_of_children_are_found_and_their_end_is_noticed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        family = {process for process in descendants() if process.pid in (parent.pid, grandchild)}
        assert {process.pid for process in family} == {parent.pid, grandchild}
        assert still_alive(family) == family
        parent.kill()
        parent.wait()
    assert wait_until_gone(family, 10.0) == set()


def test_a_process_whose_name_the_kernel_cuts_inside_a_letter_is_found_like_any_other(
    tmp_path: Path,
) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    command = shutil.copy(sleep, tmp_path / ("a" * 14 + "\u00e9"))  # the kernel keeps 15 bytes
    with subprocess.Popen([command, "100"]) as child:
        try:
            (found,) = [process for process in descendants() if process.pid == child.pid]
            assert found.name.startswith("a" * 14)
            assert still_alive({found}) == {found}
        finally:
            child.kill()
