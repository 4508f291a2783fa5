"""Drains the pod that it runs in: what a container's `preStop` runs before Kubernetes ends it.

`python -m cluster.node.pod_drain --timeout 600` asks nobody outside the pod but Ray's GCS:

1. Closes the pod to Ray, so that nothing new is placed here. A GCS that does not answer places
   nothing either: it is asked again while the pod drains.
2. Asks each worker that serves here to drain: it takes nothing new, and leaves when what it runs
   has ended. One that is still loading runs nothing; where the container goes on after the drain,
   as on a machine that is called back, `--close-for` has that one leave before it serves.
3. Waits until their processes are gone, and tells once a second what still runs. Status 0 then, 1
   when the time is over, with what held it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import grpc

from baton.grpc_options import DIRECT
from baton.v1 import control_pb2, worker_pb2, worker_pb2_grpc
from cluster.node.node_closing import NodeClosing, ray_nodes
from cluster.node.pod import Pod, PodWorkers, is_over
from kv_transfer.process import identity_of

_FAILED_STATUS, _USAGE_STATUS = 1, 2
_LOOK_S = 0.2
_TELL_S = 1.0
_ANSWER_WITHIN_S = 1.0
_CLOSED_WITHIN_S = 5.0  # usually; workers wait no longer, nor for more of the time that there is
_CLOSED_WITHIN_SHARE = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    pod = Pod.of(os.environ)
    if pod is None:
        problem = "POD_NAME is not set: this runs in a pod, whose container has it from the"
        print(f"pod_drain: {problem} downward API (metadata.name)", file=sys.stderr)
        return _USAGE_STATUS
    with contextlib.ExitStack() as stack:
        if options.close_for and (container := identity_of(options.close_for)) is not None:
            PodWorkers(pod).close(container)
        return PodDrain(pod, options.timeout, options.leave, stack).run()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.node.pod_drain")
    parser.add_argument(
        "--timeout",
        type=float,
        required=True,
        metavar="SECONDS",
        help="how long what runs may take to end; below the pod's terminationGracePeriodSeconds",
    )
    parser.add_argument(
        "--leave",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of that, what is left for workers to end that have given up what they ran",
    )
    parser.add_argument(
        "--close-for",
        type=int,
        metavar="PID",
        help="the container's own process: while it lives no worker begins to serve here",
    )
    return parser.parse_args(arguments)


class Draining:
    """One worker's drain, as it is asked for and watched from here."""

    def __init__(self, worker: control_pb2.WorkerInfo, stack: contextlib.ExitStack) -> None:
        self.name = worker.ref.worker_id
        self._worker = worker
        channel = stack.enter_context(grpc.insecure_channel(worker.address, options=DIRECT))
        # The generated types know grpc.aio only.
        self._stub: Any = worker_pb2_grpc.WorkerServiceStub(cast(Any, channel))
        self._is_asked = False
        self._ran = ""  # when it last said so

    @property
    def is_over(self) -> bool:
        return is_over(self._worker)

    def ask(self, timeout_s: float) -> None:
        """Until it has answered: then it drains, and is asked no more."""
        if not self._is_asked:
            request = worker_pb2.DrainRequest(timeout_ms=max(1, round(timeout_s * 1e3)))
            with contextlib.suppress(grpc.RpcError):
                self._stub.Drain(request, timeout=_ANSWER_WITHIN_S)
                self._is_asked = True

    def runs(self) -> str:
        """What it runs, in words."""
        try:
            load = self._stub.Load(worker_pb2.LoadRequest(), timeout=_ANSWER_WITHIN_S).load
        except grpc.RpcError as error:
            if cast(grpc.Call, error).code() is grpc.StatusCode.UNAVAILABLE:
                return f"its process ends (before: {self._ran})" if self._ran else "it ends"
            return "no answer"
        self._ran = (
            f"{load.num_running} running, {load.num_waiting} waiting, "
            f"{load.num_reserved} whose KV is on its way"
        )
        if not load.num_running + load.num_waiting + load.num_reserved:
            self._ran += ": its last handoffs and tokens are being taken"
        return self._ran


class PodDrain:
    """One drain of one pod; `stack` closes what it opens."""

    def __init__(
        self, pod: Pod, timeout_s: float, leave_s: float, stack: contextlib.ExitStack
    ) -> None:
        self._pod = pod
        self._stack = stack
        self._leave_s = leave_s
        self._began_at = time.monotonic()
        self._timeout_s = timeout_s
        self._workers = PodWorkers(pod)
        self._closings = [
            NodeClosing(node, f"{pod.name} drains", timeout_s) for node in ray_nodes(pod)
        ]
        for closing in self._closings:
            stack.callback(closing.close)
        self._drainings: dict[tuple[str, int], Draining] = {}
        self._told: set[str] = set()

    def run(self) -> int:
        """Returns the process's status."""
        told_at = self._began_at
        _say(f"draining pod {self._pod.name}, within {self._timeout_s:g} s")
        while self._left_s() > 0:
            self._close_node()
            if self._may_ask():
                self._ask_workers()
                if not self._drainings and self._has_closed_or_cannot():
                    _say(f"pod {self._pod.name} is drained after {self._waited_s():.1f} s")
                    return 0
            if time.monotonic() - told_at >= _TELL_S:
                told_at = time.monotonic()
                _say(f"{self._holds()}; {max(0.0, self._left_s()):.0f} s left")
            time.sleep(_LOOK_S)
        problem = (
            f"pod {self._pod.name} is not drained after {self._timeout_s:g} s: {self._holds()}"
        )
        print(f"pod_drain: {problem}", file=sys.stderr, flush=True)
        return _FAILED_STATUS

    # --- Ray ------------------------------------------------------------------------------------

    def _close_node(self) -> None:
        for closing in self._closings:
            closing.look()
            if closing.is_closed:
                self._say_once("closed to Ray: nothing new is placed here")
            elif closing.problem is not None:
                self._say_once(f"not closed to Ray, which is asked again: {closing.problem}")

    def _has_closed_or_cannot(self) -> bool:
        return all(each.is_closed or each.problem is not None for each in self._closings)

    def _may_ask(self) -> bool:
        """A worker that left before could be placed here again."""
        limit_s = min(_CLOSED_WITHIN_S, _CLOSED_WITHIN_SHARE * self._timeout_s)
        return self._has_closed_or_cannot() or self._waited_s() > limit_s

    # --- workers --------------------------------------------------------------------------------

    def _ask_workers(self) -> None:
        for worker in self._workers.read():
            key = (worker.ref.worker_id, worker.ref.incarnation)
            if key not in self._drainings:
                self._drainings[key] = Draining(worker, self._stack)
        for key, draining in list(self._drainings.items()):
            if draining.is_over:
                _say(f"{draining.name} has left")
                del self._drainings[key]
            else:
                draining.ask(self._left_s() - self._leave_s)

    def _holds(self) -> str:
        """What the drain still waits for."""
        held = [f"{each.name}: {each.runs()}" for each in self._drainings.values()]
        return "; ".join(held) or "Ray has not answered"

    # --- time and words -------------------------------------------------------------------------

    def _waited_s(self) -> float:
        return time.monotonic() - self._began_at

    def _left_s(self) -> float:
        return self._timeout_s - self._waited_s()

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _say(text)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
