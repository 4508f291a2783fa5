"""What pods of one node must share for KV to cross in shared memory: cluster.nodes.sharedMemory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces"),
]


def two_sides(folder: Path, flags: tuple[str, ...], **settings: str) -> tuple[set[str], str]:
    """The transports that UCX took, and what the first of two processes said in the end; each is in
    namespaces of its own, as the flags of `unshare` say. Their pids differ, as pods' do."""
    environment = {**os.environ, "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", **settings}
    environment["UCX_LOG_FILE"] = str(folder / "ucx-%p.log")
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    python = f"{sys.executable} -m tests.deploy.chart.ucx_side; exit $?"
    wasted = "for _ in 1 2 3 4 5 6 7 8 9; do /bin/true; done; "
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(_side(["unshare", *flags, "sh", "-c", text], environment, folder))
            for text in (python, wasted + python)
        ]
        addresses = [_told(side) for side in sides]
        for side, address in zip(sides, reversed(addresses), strict=True):
            _tell(side, address)
        ends = [_told(side) for side in sides]
    logs = [line for log in folder.glob("ucx-*.log") for line in log.read_text().splitlines()]
    took = {name for name in ("sysv", "posix", "tcp") for line in logs
            if f"{name}/" in line and "remote memory" not in line}  # fmt: skip
    return took, ends[0]


@contextlib.contextmanager
def _side(
    command: list[str], environment: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """Its errors are in `folder`; ended with the block."""
    name = f"{time.monotonic_ns()}.log"
    with (
        (folder / name).open("w") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                         text=True, env=environment, start_new_session=True) as side,
    ):  # fmt: skip
        try:
            yield side
        finally:
            os.killpg(side.pid, signal.SIGKILL)


def _told(side: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert side.stdout is not None
    line = side.stdout.readline()
    assert line, "a side ended without a word"
    return line.strip()


def _tell(side: subprocess.Popen[str], text: str) -> None:
    assert side.stdin is not None
    side.stdin.write(text + "\n")
    side.stdin.flush()


def test_with_the_nodes_ipc_and_process_ids_kv_crosses_in_shared_memory(tmp_path: Path) -> None:
    took, end = two_sides(tmp_path, ("--mount",))
    assert end == "wrote"
    assert "sysv" in took
    assert "tcp" not in took


def test_with_its_ipc_alone_ucx_gives_up_its_peer(tmp_path: Path) -> None:
    _, end = two_sides(tmp_path, ("--mount", "--pid", "--fork", "--mount-proc"))
    assert end == "lost the peer"


def test_a_shared_folder_alone_leaves_it_to_tcp(tmp_path: Path) -> None:
    flags = ("--mount", "--ipc", "--pid", "--fork", "--mount-proc")
    with tempfile.TemporaryDirectory() as shared:  # a long path would not fit an address
        settings = {"UCX_POSIX_DIR": shared, "UCX_POSIX_USE_PROC_LINK": "n"}
        took, end = two_sides(tmp_path, flags, **settings)
    assert end == "wrote"
    assert took == {"tcp"}
