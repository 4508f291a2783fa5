"""What holds over TCP too, where a put is on its way for a while after it was posted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def over_tcp(check: str) -> dict[str, Any]:
    """Run one check of `over_tcp.py` with nothing but TCP on the loopback device."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("over_tcp.py")), check],
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
