"""Finding what a cluster left behind."""

from __future__ import annotations

import subprocess
import sys

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
