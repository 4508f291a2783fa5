"""Drains its own pod: a container's `preStop` runs it before Kubernetes ends the container.

`python -m cluster.node.pod_drain --timeout 600` calls nothing outside the pod but Ray's GCS:

1. It drains the pod's Ray node, so that Ray starts nothing new there. If the GCS does not answer,
   it places nothing either; the drain asks again while the workers drain.
2. It asks each worker that serves here to drain. The worker takes nothing new and exits when its
   requests have ended. A worker that still loads runs nothing. If the container survives the drain,
   as on a preempted machine, `--close-for` makes that worker exit before it serves.
3. It waits until the workers' processes are gone and logs once a second what still runs. The exit
   status is 0 then, or 1 after the timeout.

Ray's `drain-node` command runs in its own process, because Ray's client waits long for a missing
GCS and then ends its process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from baton.errors import ConfigError
from baton.identity.identity import Identity, find_identity
from baton.link.frames import LinkError, Method, link_name
from baton.link.router_end import ask_once
from baton.process.log import LogSettings, set_up_logging
from baton.v1 import control_pb2, worker_pb2
from cluster.node.pod import Pod, PodWorkers, is_over
from kv_transfer.process import identity_of

log = logging.getLogger("pod_drain")

_CLOSE_WITHIN_S = 15.0  # most of it is for Python and Ray to be loaded
_ASK_AGAIN_S = 2.0
_COMMAND = (sys.executable, "-m", "ray.scripts.scripts", "drain-node")
# Ray's other reason, idle termination, is refused for a node that is in use.
_REASON = "DRAIN_NODE_REASON_PREEMPTION"


@dataclass(frozen=True)
class RayNode:
    node_id: str
    gcs_address: str


def ray_nodes(pod: Pod) -> list[RayNode]:
    """The Ray nodes of this pod's raylets. The environment tells them from other pods' raylets."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # just ended, or another user's
            if (entry / "comm").read_text() == "raylet\n":
                environment = (entry / "environ").read_bytes().split(b"\0")
                arguments = (entry / "cmdline").read_text(errors="replace").split("\0")
                if f"POD_NAME={pod.name}".encode() in environment:
                    found.append(_described(arguments))
    return found


def _described(raylet: list[str]) -> RayNode:
    options = dict(argument.lstrip("-").split("=", 1) for argument in raylet if "=" in argument)
    return RayNode(options["node_id"], options["gcs-address"])


class NodeDrain:
    """Drains a Ray node: asks until the GCS agrees."""

    def __init__(self, node: RayNode, reason: str, within_s: float) -> None:
        """`within_s`: the drain's deadline in seconds; Ray only passes it on."""
        self._command = [*_COMMAND, f"--address={node.gcs_address}", f"--node-id={node.node_id}"]
        self._command += [f"--reason={_REASON}", f"--reason-message={reason}"]
        self._command += [f"--deadline-remaining-seconds={round(within_s)}"]
        self.is_closed = False
        self.problem: str | None = None
        """Why the last attempt failed; None: it has not failed."""

    async def run(self) -> None:
        while not self.is_closed:
            self.problem = await self._ask()
            self.is_closed = self.problem is None
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _ask(self) -> str | None:
        """Ask once. Returns why that failed; None: the node is closed."""
        asking = await asyncio.create_subprocess_exec(
            *self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                said, _ = await asking.communicate()
        except TimeoutError:
            return f"no answer within {_CLOSE_WITHIN_S:g} s"
        finally:
            if asking.returncode is None:
                asking.kill()
        lines = said.decode(errors="replace").strip().splitlines() or ["no output"]
        return lines[-1] if asking.returncode else None


_FAILED_STATUS, _USAGE_STATUS = 1, 2
_LOOK_S = 0.2
_PRINT_S = 1.0
_ANSWER_WITHIN_S = 1.0
_CLOSED_WITHIN_S = 5.0  # workers wait for the node's drain no longer than this, or this share
_CLOSED_WITHIN_SHARE = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    pod = Pod.of(os.environ)
    if pod is None:
        problem = "POD_NAME is not set: run this in a pod whose container sets it from the"
        print(f"pod_drain: {problem} downward API (metadata.name)", file=sys.stderr)
        return _USAGE_STATUS
    set_up_logging(LogSettings(), os.environ)
    if options.close_for and (container := identity_of(options.close_for)) is not None:
        PodWorkers(pod).close(container)
    return asyncio.run(PodDrain(pod, options.timeout, options.leave).run())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.node.pod_drain")
    parser.add_argument(
        "--timeout",
        type=float,
        required=True,
        metavar="SECONDS",
        help="how long requests may take to end; below the pod's terminationGracePeriodSeconds",
    )
    parser.add_argument(
        "--leave",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of that, the time for workers to exit after they gave up their requests",
    )
    parser.add_argument(
        "--close-for",
        type=int,
        metavar="PID",
        help="the container's main process: while it lives no worker begins to serve here",
    )
    return parser.parse_args(arguments)


def _own_identity() -> Identity:
    """Return the identity of the pod's worker, or a bare one, which the worker then refuses."""
    try:
        return find_identity("worker")
    except ConfigError:
        return Identity("worker")


class WorkerDrain:
    """One worker's drain: the request for it, and its progress."""

    def __init__(self, worker: control_pb2.WorkerInfo, own: Identity) -> None:
        self.name = worker.ref.worker_id
        self._worker, self._own = worker, own
        self._is_asked = False
        self._ran = ""  # what it ran at its last answer

    @property
    def is_over(self) -> bool:
        return is_over(self._worker)

    async def ask(self, timeout_s: float) -> None:
        """Ask it to drain, until it has answered once."""
        if not self._is_asked:
            request = worker_pb2.DrainRequest(timeout_ms=max(1, round(timeout_s * 1e3)))
            with contextlib.suppress(LinkError, OSError, TimeoutError):
                await self._call(Method.DRAIN, request)
                self._is_asked = True

    async def _call(self, method: Method, request: Message) -> Any:
        """Ask the worker once. Raises LinkError, OSError, TimeoutError."""
        address, name = self._worker.address, link_name(self._worker.ref)
        return await ask_once(address, self._own, method, request, _ANSWER_WITHIN_S, name)

    async def runs(self) -> str:
        """Describe what it runs."""
        try:
            load = (await self._call(Method.LOAD, worker_pb2.LoadRequest())).load
        except ConnectionRefusedError:
            return f"its process ends (before: {self._ran})" if self._ran else "it ends"
        except (LinkError, OSError, TimeoutError) as error:
            return f"no answer: {error}" if str(error) else "no answer"
        self._ran = (
            f"{load.num_running} running, {load.num_waiting} waiting, "
            f"{load.num_reserved} whose KV is in transfer"
        )
        if not load.num_running + load.num_waiting + load.num_reserved:
            self._ran += ": routers are taking its last handoffs and tokens"
        return self._ran


class PodDrain:
    """One drain of one pod."""

    def __init__(self, pod: Pod, timeout_s: float, leave_s: float) -> None:
        self._pod = pod
        self._leave_s = leave_s
        self._own = _own_identity()
        self._began_at = time.monotonic()
        self._timeout_s = timeout_s
        self._workers = PodWorkers(pod)
        self._closings = [
            NodeDrain(node, f"{pod.name} drains", timeout_s) for node in ray_nodes(pod)
        ]
        self._drainings: dict[tuple[str, int], WorkerDrain] = {}
        self._printed: set[str] = set()

    async def run(self) -> int:
        """Run the drain and return the exit status."""
        printed_at, asking = self._began_at, [asyncio.create_task(c.run()) for c in self._closings]
        log.info(f"draining pod {self._pod.name}, within {self._timeout_s:g} s")
        while self._left_s() > 0:
            for task in asking:
                if task.done():
                    task.result()
            self._say_how_closed()
            if self._may_ask():
                await self._ask_workers()
                if not self._drainings and self._has_closed_or_cannot():
                    log.info(f"pod {self._pod.name} is drained after {self._waited_s():.1f} s")
                    return 0
            if time.monotonic() - printed_at >= _PRINT_S:
                printed_at = time.monotonic()
                log.info(f"{await self._holds()}; {max(0.0, self._left_s()):.0f} s left")
            await asyncio.sleep(_LOOK_S)
        late = f"pod {self._pod.name} is not drained after {self._timeout_s:g} s"
        log.error(f"{late}: {await self._holds()}")
        return _FAILED_STATUS

    # --- Ray ------------------------------------------------------------------------------------

    def _say_how_closed(self) -> None:
        for closing in self._closings:
            if closing.is_closed:
                self._say_once("closed to Ray: it places nothing new here")
            elif closing.problem is not None:
                self._say_once(f"not closed to Ray, trying again: {closing.problem}")

    def _has_closed_or_cannot(self) -> bool:
        return all(each.is_closed or each.problem is not None for each in self._closings)

    def _may_ask(self) -> bool:
        """Whether workers may be asked: before the node is closed, Ray could start one anew
        here."""
        limit_s = min(_CLOSED_WITHIN_S, _CLOSED_WITHIN_SHARE * self._timeout_s)
        return self._has_closed_or_cannot() or self._waited_s() > limit_s

    # --- workers --------------------------------------------------------------------------------

    async def _ask_workers(self) -> None:
        for worker in self._workers.live():
            key = (worker.ref.worker_id, worker.ref.incarnation)
            if key not in self._drainings:
                self._drainings[key] = WorkerDrain(worker, self._own)
        for key, draining in list(self._drainings.items()):
            if draining.is_over:
                log.info(f"{draining.name} has left")
                del self._drainings[key]
            else:
                await draining.ask(self._left_s() - self._leave_s)

    async def _holds(self) -> str:
        """Describe what the drain still waits for."""
        held = [f"{each.name}: {await each.runs()}" for each in self._drainings.values()]
        return "; ".join(held) or "Ray has not answered"

    # --- time and output ------------------------------------------------------------------------

    def _waited_s(self) -> float:
        return time.monotonic() - self._began_at

    def _left_s(self) -> float:
        return self._timeout_s - self._waited_s()

    def _say_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            log.info(text)


if __name__ == "__main__":
    sys.exit(main())
