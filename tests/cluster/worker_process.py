"""One replica without Ray: `python -m tests.cluster.worker_process --config cluster.yaml ...`.

This process is rank 0 and starts the others. SIGTERM drains the worker, SIGINT ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import uvloop

from baton.config.cluster import load_config
from baton.process.log import LogSettings, set_up_logging
from cluster.node.pod import Pod
from cluster.worker.config import RankPosition, WorkerConfig, with_node_settings, worker_config
from cluster.worker.process import serve_worker
from cluster.worker.rank import follow_rank0
from cluster.worker.worker import Worker

ROOT = Path(__file__).parents[2]
log = logging.getLogger(__name__)


def command(config: Path, pool: str, control: str, worker_id: str) -> list[str]:
    """The command of one worker; run it in `ROOT`."""
    options = ["--config", str(config), "--pool", pool, "--control", control]
    return [sys.executable, "-m", "tests.cluster.worker_process", *options, "--id", worker_id]


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("config", "pool", "control", "id"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meet", default="")
    options = parser.parse_args()
    cluster = load_config(options.config)
    config = worker_config(cluster, options.pool, options.id, options.control)
    config = with_node_settings(config, Pod.of(os.environ), config.host)
    set_up_logging(LogSettings.of(cluster), {})
    position = RankPosition(options.rank, config.shape.tensor_parallel, options.meet)
    try:
        if position.rank > 0:
            follow_rank0(config, position, _end_process)
        else:
            with _other_ranks(config, position) as meeting:
                uvloop.run(_serve(config, meeting))
    except Exception:
        log.exception("%s rank %d ends", options.id, position.rank)
        return 1
    return 0


async def _serve(config: WorkerConfig, position: RankPosition) -> None:
    loop = asyncio.get_running_loop()

    def ready(worker: Worker) -> None:
        loop.add_signal_handler(signal.SIGTERM, worker.drain)
        loop.add_signal_handler(signal.SIGINT, worker.stop)

    await serve_worker(config, position, ready, _end_process)


def _end_process(error: BaseException) -> None:
    log.critical("this rank failed", exc_info=error)
    os._exit(1)


@contextlib.contextmanager
def _other_ranks(config: WorkerConfig, position: RankPosition) -> Iterator[RankPosition]:
    """Run ranks > 0 as child processes. If one ends early, this process ends too."""
    if position.size > 1:
        listening = socket.create_server((config.host, 0))
        meeting = f"{config.host}:{listening.getsockname()[1]}"
        position = dataclasses.replace(position, meeting=meeting, listen_fd=listening.detach())
    again = [sys.executable, "-m", "tests.cluster.worker_process", *sys.argv[1:]]
    children = [
        subprocess.Popen([*again, "--meet", position.meeting, "--rank", str(rank)], cwd=ROOT)
        for rank in range(1, position.size)
    ]
    leaving = threading.Event()

    def watch(child: subprocess.Popen[bytes]) -> None:
        if child.wait() and not leaving.is_set():
            for other in children:
                other.kill()
            os._exit(1)

    watchers = [threading.Thread(target=watch, args=(c,), daemon=True) for c in children]
    for watcher in watchers:
        watcher.start()
    try:
        yield position
    finally:
        leaving.set()
        for child, watcher in zip(children, watchers, strict=True):
            watcher.join(10.0)
            child.kill()
            watcher.join()


if __name__ == "__main__":
    sys.exit(main())
