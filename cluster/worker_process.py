"""One worker process, with Ray around it or without.

`python -m cluster.worker_process --config cluster.yaml --pool decode --control 127.0.0.1:7101`
runs one replica: this process is its rank 0 and starts the others. SIGTERM drains it, SIGINT ends
it at once. Under Ray, `WorkerThread` runs the same in an actor's process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import uvloop

from baton.config import load_config
from cluster.rank import build_rank, follow_rank0, free_port
from cluster.worker import Worker
from cluster.worker_config import RankPlace, WorkerConfig, worker_config

log = logging.getLogger(__name__)

_LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format=_LOG_FORMAT, force=True)


async def serve_worker(
    config: WorkerConfig, place: RankPlace, on_ready: Callable[[Worker], None]
) -> None:
    """Rank 0: load, serve until drained or stopped. Raises what `build_rank` and `serve` raise."""
    rank = await asyncio.to_thread(build_rank, config, place)
    try:
        worker = Worker(config, rank)
        on_ready(worker)
        await worker.serve()
    finally:
        await asyncio.to_thread(rank.close)


class WorkerThread:
    """A rank with an event loop of its own, inside a process that has other things to do.

    The process ends with it: a rank that cannot serve must not look alive.
    """

    def __init__(self, config: WorkerConfig, place: RankPlace) -> None:
        self._config = config
        self._place = place
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Until the rank has left in good order; on an error the process is gone by then."""
        self._ended.wait()

    def stop(self) -> None:
        """Have rank 0 leave now; the others follow it. One that still loads is not disturbed."""
        if self._loop is not None and self._worker is not None:
            self._loop.call_soon_threadsafe(self._worker.stop)

    def _run(self) -> None:
        try:
            if self._place.rank == 0:
                uvloop.run(serve_worker(self._config, self._place, self._ready))
            else:
                follow_rank0(self._config, self._place)
        except Exception:
            log.exception("%s rank %d ends", self._config.worker_id, self._place.rank)
            logging.shutdown()
            os._exit(1)
        log.info("%s rank %d has left", self._config.worker_id, self._place.rank)
        self._ended.set()

    def _ready(self, worker: Worker) -> None:
        self._loop, self._worker = asyncio.get_running_loop(), worker


# --- the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    cluster = load_config(options.config)
    worker_id = options.worker_id or f"{options.pool}-0"
    config = worker_config(cluster, options.pool, worker_id, options.control)
    set_up_logging(config.log_level)
    meeting = options.meet
    if config.tp_size > 1 and not meeting:
        meeting = f"{config.host}:{free_port(config.host)}"
    place = RankPlace(options.rank, config.tp_size, meeting)
    try:
        if place.rank > 0:
            follow_rank0(config, place)
        else:
            with _other_ranks(place, options):
                uvloop.run(_serve_until_signalled(config, place))
    except Exception:
        log.exception("%s rank %d ends", worker_id, place.rank)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.worker_process")
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

    await serve_worker(config, place, ready)


@contextlib.contextmanager
def _other_ranks(place: RankPlace, options: argparse.Namespace) -> Iterator[None]:
    """Ranks > 0 as child processes; one that ends early takes this process down."""
    command = [sys.executable, "-m", "cluster.worker_process"]
    command += ["--config", options.config, "--pool", options.pool, "--control", options.control]
    command += ["--worker-id", options.worker_id or "", "--meet", place.meeting]
    children = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, place.size)]
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
