"""One rank's process under Ray: a thread with the rank, and an actor that answers calls about it.

Only the actor's calls import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop

from baton.process.interpreter import share_interpreter
from baton.process.log import LogSettings, set_up_logging
from cluster.errors import one_line
from cluster.node.pod import Pod
from cluster.worker.config import (
    RankPosition,
    WorkerConfig,
    with_node_settings,
)
from cluster.worker.rank import OnFatal, build_rank, follow_rank0
from cluster.worker.worker import EngineStuckError, Worker
from engine.run import compute_threads
from kv_transfer.process import ProcessIdentity, own_identity

log = logging.getLogger(__name__)


_OURS = frozenset({"cluster", "prefill_worker", "decode_worker", "kv_transfer", "engine"})
_REPORT_S = 2.0


def log_as_rank(config: WorkerConfig, position: RankPosition) -> None:
    """Log in a rank's name: to its file, or its pod's log."""
    named = {"worker": config.worker_id, "pool": config.pool, "model": config.cluster.model_name}
    if position.rank:
        named["rank"] = str(position.rank)
    settings = LogSettings.of(config.cluster)
    set_up_logging(settings, os.environ, config.log_file(position.rank), **named)


async def serve_worker(
    config: WorkerConfig,
    position: RankPosition,
    on_ready: Callable[[Worker], None],
    on_fatal: OnFatal,
) -> None:
    """Rank 0: load, then serve until drained or stopped. Raises what `build_rank` and `serve`
    raise.

    The worker owns the event loop: an error in a callback of Baton's code fails the worker.
    """
    share_interpreter()
    rank = await asyncio.to_thread(build_rank, config, position, on_fatal)
    try:
        worker = Worker(config, rank)
        asyncio.get_running_loop().set_exception_handler(partial(_callback_failed, worker))
        on_ready(worker)
        await worker.serve()
    except EngineStuckError as error:
        on_fatal(error)
    finally:
        await asyncio.to_thread(rank.close)


def _callback_failed(
    worker: Worker, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Fail the worker on an error in a callback: a step's events, transfer mail or a timer.

    Errors in gRPC's own callbacks and in a request's task are only logged.
    """
    error = context.get("exception")
    if error is not None and "handle" in context and _is_ours(error):
        worker.fail(context["message"], error)
    else:
        loop.default_exception_handler(context)


def _is_ours(error: BaseException) -> bool:
    """Whether Baton's code is in the traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(f.f_globals.get("__name__", "").partition(".")[0] in _OURS for f, _ in frames)


class WorkerThread:
    """A rank with its own event loop, inside a process that also answers calls.

    The process ends soon after the rank, even if its starter has gone. A process that cannot serve
    must not look alive, and a draining pod waits for it. In between, `wait` returns the failure.
    """

    def __init__(self, config: WorkerConfig, position: RankPosition) -> None:
        self._config = config
        self._position = position
        self._name = f"{config.worker_id} rank {position.rank}"
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop  # once there is a worker
        self._lock = threading.Lock()
        self._ended: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def serves(self) -> bool:
        """Whether rank 0 has loaded and warmed up; False for other ranks."""
        return self._worker is not None and self._worker.ready.is_set()

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the rank's end. Returns its failure, or None if it left in order.

        Raises TimeoutError.
        """
        return self._ended.result(timeout_s)

    def stop(self) -> None:
        """Make rank 0 leave now; the others follow. Does nothing while it loads or after it
        left."""
        if self._worker is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._worker.stop)

    def fail(self, error: BaseException) -> None:
        """Report a fatal error, then end the process. Does not return."""
        log.critical("%s ends: %s", self._name, one_line(error))
        self._end(one_line(error))

    def _end(self, failure: str | None) -> None:
        """End the process; the first failure counts. Does not return."""
        with self._lock:
            if not self._ended.done():
                self._ended.set_result(failure)
        logging.shutdown()
        time.sleep(_REPORT_S)  # the supervisor ends this process as soon as it has the failure
        os._exit(0 if failure is None else 1)

    def _run(self) -> None:
        try:
            if self._position.rank == 0:
                uvloop.run(serve_worker(self._config, self._position, self._ready, self.fail))
            else:
                follow_rank0(self._config, self._position, self.fail)
        except Exception as error:
            log.exception("%s failed", self._name)
            self.fail(error)
        log.info("%s has left", self._name)
        self._end(None)

    def _ready(self, worker: Worker) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = worker


# --- under Ray ----------------------------------------------------------------------------------

MAX_CALLS = 8
"""Calls that a rank answers concurrently."""


@dataclass(frozen=True)
class RankStatus:
    """A rank's status, for a supervisor that finds it."""

    process: ProcessIdentity
    node_id: str
    """Ray's id of its machine or pod."""
    launched: bool
    serves: bool
    """Rank 0 has loaded and warmed up, so a healthy worker is in the registry."""


@dataclass(frozen=True)
class RankExit:
    """A rank has ended. `failure`: why; None: it left in order."""

    failure: str | None


class RankActor:
    """Runs the worker in a thread and answers calls about it.

    No call may last long: Ray lets a call run on after its caller has died.
    """

    def __init__(self) -> None:
        self._worker: WorkerThread | None = None
        self._meeting: socket.socket | None = None

    def status(self) -> RankStatus:
        import ray

        worker, node_id = self._worker, ray.get_runtime_context().get_node_id()
        serves = worker is not None and worker.serves
        return RankStatus(own_identity(), node_id, worker is not None, serves)

    def listen(self, host: str) -> int:
        """Listen for the other ranks, on rank 0 before any launch. Returns the port."""
        self._meeting = socket.create_server((host, 0))
        port: int = self._meeting.getsockname()[1]
        return port

    def launch(self, config: WorkerConfig, position: RankPosition) -> None:
        """Start the rank, which registers itself. This process ends soon after the rank."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        config = with_node_settings(config, Pod.of(os.environ), address)
        log_as_rank(config, position)
        if self._meeting is not None:
            position = dataclasses.replace(position, listen_fd=self._meeting.detach())
        self._worker = WorkerThread(config, position)
        self._worker.start()

    def set_num_threads(self, num_threads: int) -> None:
        """Compute with this many threads from the next step on."""
        compute_threads.want(num_threads)

    def leave(self) -> None:
        """End the rank now, in order; its running requests are lost."""
        if self._worker is not None:
            self._worker.stop()

    def wait_for_exit(self, timeout_s: float) -> RankExit | None:
        """Wait for the rank's end; None after `timeout_s`."""
        assert self._worker is not None, "launch comes first"
        try:
            return RankExit(self._worker.wait(timeout_s))
        except TimeoutError:
            return None
