"""Programs of this machine that make and join namespaces."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.k8s.kubelet.errors import KernelError

_TIMEOUT_S = 20.0


def ip(*lines: str, network_of: int | None = None) -> None:
    """`ip` with each line, in the network of a process. Raises KernelError."""
    command = ["ip", "-batch", "-"]
    if network_of is not None:
        command = ["nsenter", f"--net=/proc/{network_of}/ns/net", *command]
    run(command, "\n".join(lines) + "\n")


def run(command: Sequence[str], stdin: str = "") -> str:
    """Its stdout. Raises KernelError."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise KernelError(f"{' '.join(command)}: {stdin}{done.stderr.strip()}")
    return done.stdout
