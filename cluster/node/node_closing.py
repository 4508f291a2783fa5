"""Closes a pod's Ray node: nothing new is placed there, what runs there goes on.

Ray's command for it runs in a process of its own: Ray's client waits for long for a GCS that stays
away, and then ends the process that it is in.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.node.pod import Pod

_ANSWER_WITHIN_S = 15.0  # most of it is for Python and Ray to be loaded
_ASK_AGAIN_S = 2.0
_COMMAND = (sys.executable, "-m", "ray.scripts.scripts", "drain-node")
# The other reason there is, idle termination, is refused for a node that anything runs on.
_REASON = "DRAIN_NODE_REASON_PREEMPTION"


@dataclass(frozen=True)
class RayNode:
    node_id: str
    gcs_address: str


def ray_nodes(pod: Pod) -> list[RayNode]:
    """Of this pod's raylets; where pods share a machine, the environment says which they are."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # gone since, or another user's
            if (entry / "comm").read_text() == "raylet\n":
                environment = (entry / "environ").read_bytes().split(b"\0")
                arguments = (entry / "cmdline").read_text(errors="replace").split("\0")
                if f"POD_NAME={pod.name}".encode() in environment:
                    found.append(_described(arguments))
    return found


def _described(raylet: list[str]) -> RayNode:
    options = dict(argument.lstrip("-").split("=", 1) for argument in raylet if "=" in argument)
    return RayNode(options["node_id"], options["gcs-address"])


class NodeClosing:
    """Asks until the GCS agrees; `look` now and then."""

    def __init__(self, node: RayNode, reason: str, within_s: float) -> None:
        """`within_s`: when whoever closes it means to be done; Ray only passes it on."""
        self._command = [*_COMMAND, f"--address={node.gcs_address}", f"--node-id={node.node_id}"]
        self._command += [f"--reason={_REASON}", f"--reason-message={reason}"]
        self._command += [f"--deadline-remaining-seconds={round(within_s)}"]
        self._asking: subprocess.Popen[str] | None = None
        self._asked_at = -_ASK_AGAIN_S
        self.is_closed = False
        self.problem: str | None = None
        """Why it was not closed when it was last asked; None: that is not known yet."""

    def look(self) -> None:
        """Does not wait."""
        now = time.monotonic()
        if self._asking is None:
            if not self.is_closed and now - self._asked_at >= _ASK_AGAIN_S:
                self._asked_at = now
                self._asking = subprocess.Popen(
                    self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
        elif self._asking.poll() is not None:
            self._take(self._asking)
        elif now - self._asked_at > _ANSWER_WITHIN_S:
            self._asking.kill()
            self._take(self._asking, f"no answer within {_ANSWER_WITHIN_S:g} s")

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.kill()
            self._asking.communicate()

    def _take(self, ended: subprocess.Popen[str], problem: str = "") -> None:
        said, _ = ended.communicate()
        self._asking = None
        self._asked_at = time.monotonic()
        self.is_closed = ended.returncode == 0
        words = said.strip().splitlines() or ["it said nothing"]
        self.problem = None if self.is_closed else problem or words[-1]
