"""What holds over TCP too, where a put is on its way for a while after it was posted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from handoff_pairs import needs_system_ucx


def over_tcp(check: str, ucx_library: str = "wheel") -> dict[str, Any]:
    """Run one check of `over_tcp.py` with nothing but TCP on the loopback device."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("over_tcp.py")), check, ucx_library],
        env={**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def test_a_flush_to_a_lost_peer_answers_only_when_its_connection_is_closed() -> None:
    found = over_tcp("flush")
    assert found["working"] == [False, None]
    for is_closed, error in found["answers"]:
        assert error is not None
        assert is_closed, found


def test_connections_that_come_and_go_leave_nothing_behind() -> None:
    found = over_tcp("connections")
    assert found["last"] == found["first"]


@pytest.mark.parametrize("ucx_library", ["wheel", pytest.param("system", marks=needs_system_ucx)])
def test_a_killed_writers_blocks_stay_in_quarantine_while_its_bytes_are_unread(
    ucx_library: str,
) -> None:
    found = over_tcp("killed", ucx_library)
    assert found["num_unread_bytes"] > 1000
    assert not found["freed"]
    assert found["num_quarantined_blocks"] == 4
