"""The operator, killed at every step that it takes: `python -m tests.k8s.dying_operator` instead of
`python -m deploy.controller`, with a folder in $STEPS that outlives the process.

1. A step is a call that tells the API server or the supervisor something else than was told there
   last. Leases and events are none, nor are figures in a status, nor what is only tried to be
   created: nothing new is while a pool is scaled.
2. The process kills itself right before the step. Its successor does it, and is killed right after.
3. The one after that finds the step done and goes on to the next: so each life gets one call
   further, and one that lives has nothing left to do.

What it applies first, before anything was scaled, is how things stand, and no step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from baton.control_client import ControlClient
from deploy.controller import __main__ as operator
from deploy.controller import cluster_reconciler, fleet_watch
from deploy.controller.kit.connection import Call, Connection, Timeouts

FOLDER_VARIABLE = "STEPS"
_TOLD = (
    "replicas",
    "readyReplicas",
    "lastError",
    "endpoints",
    "unit",
    "rollout",
    "pools",
)
_SETTLED_AFTER_S = 2.0
"""Each life waits for so long before it rolls anything. The supervisor lives on, and its workers
have registered long ago: the full time would only be waited for."""
_LOOK_AGAIN_S = 1.0
"""Sooner than an operator does that lives on: most lives would end with waiting for it."""
_PID = os.getpid()

T = TypeVar("T")


class Steps:
    """Own what was told last, and before what a process has died already."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        known = json.loads(file.read_text()) if file.exists() else {"told": {}, "feared": {}}
        self._told: dict[str, str] = known["told"]
        self._feared: dict[str, str] = known["feared"]

    def take(self, target: str, said: Any, may_be_first: bool, call: Callable[[], T]) -> T:
        """`may_be_first`: what is told there for the first time is a step, too."""
        text = json.dumps(said, sort_keys=True)
        with self._lock:
            if target not in self._told and not may_be_first:
                self._told[target] = text
            if self._told.get(target) == text:
                return call()
            if self._feared.get(target) != text:
                self._feared[target] = text
                self._die("before", target, text)
            answer = call()
            self._told[target] = text
            self._die("after", target, text)
            return answer

    def _die(self, moment: str, target: str, text: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"told": self._told, "feared": self._feared}))
        new.rename(self._file)
        print(f"killed {moment} {target}: {text}", file=sys.stderr, flush=True)
        os.kill(_PID, signal.SIGKILL)


def news(target: str, body: Any) -> Any:
    """Of a status what is not a figure; of anything else all of it."""
    if not target.endswith("/status"):
        return body
    status = body["status"]
    conditions = status.get("conditions", ())
    return {
        **{name: status.get(name) for name in _TOLD},
        "draining": sorted(each["worker"] for each in status.get("draining") or ()),
        "conditions": [[each["type"], each["status"], each["reason"]] for each in conditions],
    }


def _is_step(call: Call) -> bool:
    return call.method not in ("GET", "POST") and not {"leases", "events"} & set(
        call.path.split("/")
    )


def main() -> None:
    steps = Steps(Path(os.environ[FOLDER_VARIABLE]) / "steps.json")
    answer, ask = Connection.answer, ControlClient._call

    def dying_answer(self: Connection, call: Call, timeouts: Timeouts) -> dict[str, Any]:
        if not _is_step(call):
            return answer(self, call, timeouts)
        target = f"{call.method} {call.path}"
        body: Mapping[str, Any] = call.body if isinstance(call.body, Mapping) else {}
        is_applied = call.content_type == "application/apply-patch+yaml"
        return steps.take(
            target, news(target, body), not is_applied, lambda: answer(self, call, timeouts)
        )

    def dying_ask(
        self: ControlClient, method: str, request: Any, timeout_s: float | None = None
    ) -> Any:
        target = f"{method} {request.pool}"
        return steps.take(target, str(request), True, lambda: ask(self, method, request, timeout_s))

    Connection.answer = dying_answer  # type: ignore[method-assign]
    ControlClient._call = dying_ask  # type: ignore[method-assign]
    fleet_watch._SETTLED_AFTER_S = _SETTLED_AFTER_S
    cluster_reconciler._LOOK_AGAIN_S = _LOOK_AGAIN_S
    os.getpid = lambda: 1  # as in a container's own namespace: its successor is the same candidate
    operator.main()


if __name__ == "__main__":
    main()
