"""One worker process, with Ray around it or without.

`python -m cluster.worker.process --config cluster.yaml --pool decode --control 127.0.0.1:7101`
runs one replica: this process is its rank 0 and starts the others. SIGTERM drains it, SIGINT ends
it at once. Under Ray, `WorkerThread` runs the same in an actor's process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from baton.config.cluster import load_config
from baton.errors import ConfigError
from cluster.error_text import one_line
from cluster.loop_door import LoopDoor
from cluster.node.pod import Pod
from cluster.worker.config import RankPlace, WorkerConfig, settled, worker_config
from cluster.worker.rank import OnFatal, build_rank, follow_rank0, listen
from cluster.worker.rank_gpus import VISIBLE, rank_environments
from cluster.worker.worker import EngineStuckError, Worker

log = logging.getLogger(__name__)

_OURS = frozenset({"cluster", "prefill_worker", "decode_worker", "kv_transfer", "engine"})
_TELL_WHY_S = 2.0
_CONFIG_STATUS = 2
_LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def set_up_logging(level: str, file: Path | None = None) -> None:
    """To standard error, or to a file where its folder exists (on another machine it may not)."""
    if file is not None and not file.parent.is_dir():
        file = None
    logging.basicConfig(level=level.upper(), format=_LOG_FORMAT, force=True, filename=file)


# The engine's thread, the event loop and gRPC's threads share the GIL; a token crosses all three,
# and each crossing may cost one interval. The default of 5 ms would be several decode steps.
_SWITCH_INTERVAL_S = 0.0002


async def serve_worker(
    config: WorkerConfig,
    place: RankPlace,
    on_ready: Callable[[Worker], None],
    on_fatal: OnFatal,
) -> None:
    """Rank 0: load, serve until drained or stopped. Raises what `build_rank` and `serve` raise.

    The event loop is the worker's own: an error in a callback of Baton's code fails the worker.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    rank = await asyncio.to_thread(build_rank, config, place, on_fatal)
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
    """Steps' events, transfer mail and timers come in as callbacks, which nobody awaits.

    What gRPC stumbles over in callbacks of its own is only logged, and so is a request's task.
    """
    error = context.get("exception")
    if error is not None and "handle" in context and _is_ours(error):
        worker.fail(context["message"], error)
    else:
        loop.default_exception_handler(context)


def _is_ours(error: BaseException) -> bool:
    """Whether Baton's code was at work when it was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(f.f_globals.get("__name__", "").partition(".")[0] in _OURS for f, _ in frames)


class WorkerThread:
    """A rank with an event loop of its own, inside a process that has other things to do.

    The process ends soon after the rank, whatever becomes of who started it: one that cannot serve
    must not look alive, and a pod that drains waits for it. In between, whoever waits is told why.
    """

    def __init__(self, config: WorkerConfig, place: RankPlace) -> None:
        self._config = config
        self._place = place
        self._name = f"{config.worker_id} rank {place.rank}"
        self._worker: Worker | None = None
        self._door = LoopDoor()
        self._lock = threading.Lock()
        self._ended: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def serves(self) -> bool:
        """Whether it has loaded and warmed up; of rank 0 only."""
        return self._worker is not None and self._worker.ready.is_set()

    def wait(self, timeout_s: float) -> str | None:
        """Until the rank is over: why it failed, or None when it has left in good order.

        Raises TimeoutError.
        """
        return self._ended.result(timeout_s)

    def stop(self) -> None:
        """Have rank 0 leave now; the others follow it. One that still loads is not disturbed, one
        that has left is not called back."""
        if self._worker is not None:
            self._door.call(self._worker.stop)

    def fail(self, error: BaseException) -> None:
        """The rank cannot go on: tell why, then end the process. Does not return."""
        log.critical("%s ends: %s", self._name, one_line(error))
        self._end(one_line(error))

    def _end(self, failure: str | None) -> None:
        """The first end counts. Does not return."""
        with self._lock:
            if not self._ended.done():
                self._ended.set_result(failure)
        logging.shutdown()
        time.sleep(_TELL_WHY_S)  # whoever has heard ends this process earlier
        os._exit(0 if failure is None else 1)

    def _run(self) -> None:
        try:
            if self._place.rank == 0:
                uvloop.run(self._serve())
            else:
                follow_rank0(self._config, self._place, self.fail)
        except Exception as error:
            log.exception("%s failed", self._name)
            self.fail(error)
        log.info("%s has left", self._name)
        self._end(None)

    async def _serve(self) -> None:
        with self._door.open():
            await serve_worker(self._config, self._place, self._ready, self.fail)

    def _ready(self, worker: Worker) -> None:
        self._worker = worker


# --- the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    worker_id = options.worker_id or f"{options.pool}-0"
    try:
        cluster = load_config(options.config)
        config = worker_config(cluster, options.pool, worker_id, options.control)
        config = settled(config, Pod.of(os.environ), config.host)
    except ConfigError as error:
        print(f"worker: {error.message}", file=sys.stderr)
        return _CONFIG_STATUS
    set_up_logging(config.log_level)
    place = RankPlace(options.rank, config.tp_size, options.meet)
    if place.size > 1 and place.rank == 0:
        listening = listen(config.host)
        meeting = f"{config.host}:{listening.getsockname()[1]}"
        place = dataclasses.replace(place, meeting=meeting, listen_fd=listening.detach())
    try:
        if place.rank > 0:
            follow_rank0(config, place, _end_process)
        else:
            own, *others = rank_environments(config.engine, place.size, os.environ.get(VISIBLE))
            os.environ.update(own)  # before anything here has looked for GPUs
            with _other_ranks(place, options, others):
                uvloop.run(_serve_until_signalled(config, place))
    except Exception:
        log.exception("%s rank %d ends", worker_id, place.rank)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.worker.process")
    parser.add_argument("--config", required=True, help="the cluster's YAML file")
    parser.add_argument("--pool", required=True, help="the pool this worker belongs to")
    parser.add_argument("--control", required=True, metavar="HOST:PORT", help="the registry")
    parser.add_argument("--worker-id", help="default: the pool's name and -0")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


async def _serve_until_signalled(config: WorkerConfig, place: RankPlace) -> None:
    loop = asyncio.get_running_loop()

    def ready(worker: Worker) -> None:
        loop.add_signal_handler(signal.SIGTERM, worker.drain)
        loop.add_signal_handler(signal.SIGINT, worker.stop)

    await serve_worker(config, place, ready, _end_process)


def _end_process(error: BaseException) -> None:
    log.critical("this rank cannot go on", exc_info=error)
    logging.shutdown()
    os._exit(1)


@contextlib.contextmanager
def _other_ranks(
    place: RankPlace, options: argparse.Namespace, environments: Sequence[dict[str, str]]
) -> Iterator[None]:
    """Ranks > 0 as child processes; one that ends early takes this process down."""
    command = [sys.executable, "-m", "cluster.worker.process"]
    command += ["--config", options.config, "--pool", options.pool, "--control", options.control]
    command += ["--worker-id", options.worker_id or "", "--meet", place.meeting]
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | environment)
        for rank, environment in enumerate(environments, start=1)
    ]
    leaving = threading.Event()

    def watch(child: subprocess.Popen[bytes]) -> None:
        status = child.wait()
        if not leaving.is_set():
            log.error("a rank of this worker ended with status %d: ending too", status)
            for other in children:
                other.kill()
            os._exit(1)

    watchers = [threading.Thread(target=watch, args=(c,), daemon=True) for c in children]
    for watcher in watchers:
        watcher.start()
    try:
        yield
    finally:
        leaving.set()
        for child, watcher in zip(children, watchers):
            watcher.join(10.0)
            if watcher.is_alive():
                child.kill()
                watcher.join()


if __name__ == "__main__":
    sys.exit(main())
