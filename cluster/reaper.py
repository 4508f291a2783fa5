"""Ends a cluster whose `baton up` was killed: nobody else is left to do it.

`python -m cluster.reaper MARK` lives as long as its standard input, whose other end only the
process that calls `local.up` holds. At its end every process that carries MARK in its environment
is ended: Ray's own parts would follow their parent by themselves (the kernel sees to it), their
agents and the router would not.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

MARK_VARIABLE = "BATON_CLUSTER_MARK"
_LEAVE_S = 3.0
_PATIENCE_S = 30.0
_POLL_S = 0.1


@contextlib.contextmanager
def watched_over() -> Iterator[dict[str, str]]:
    """Yields the environment variable to start processes with that must not outlive this one.

    Nor the block: what is left at its end is ended too.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    reaper = subprocess.Popen(
        [sys.executable, "-m", "cluster.reaper", mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # ctrl-C is for the cluster to handle, in its order
    )
    assert reaper.stdin is not None
    try:
        yield {MARK_VARIABLE: mark}
    finally:
        reaper.stdin.close()
        if reaper.wait() != 0:
            log.error("processes of the cluster are left that cannot be ended")


@contextlib.contextmanager
def inherited(variables: dict[str, str]) -> Iterator[None]:
    """For what takes its environment from this process: set the variables inside."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def marked(mark: str) -> set[int]:
    """Pids of the living processes that carry the mark, except this one."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone since, or another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def reap(mark: str) -> set[int]:
    """Ask them to leave, then make them; returns those that are left after all patience."""
    started_at = time.monotonic()
    asked: set[int] = set()
    while left := marked(mark):
        waited_s = time.monotonic() - started_at
        if waited_s > _PATIENCE_S:
            return left
        for pid in left if waited_s > _LEAVE_S else left - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if waited_s > _LEAVE_S else signal.SIGTERM)
        asked |= left
        time.sleep(_POLL_S)
    return set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.reaper")
    parser.add_argument("mark")
    mark = parser.parse_args().mark
    while sys.stdin.buffer.read(1):
        pass
    return 1 if reap(mark) else 0


if __name__ == "__main__":
    sys.exit(main())
