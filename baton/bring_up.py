"""`baton up`: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from baton import render
from baton.config import ClusterConfig, load_config, parse_config
from baton.errors import BatonError
from baton.process_tree import Process, descendants, wait_until_gone
from baton.progress import Steps

_GONE_WITHIN_S = 15.0


def read_config(file: str | None, model: str | None = None) -> ClusterConfig:
    """The cluster file, or the defaults; the shipped model is found from any folder."""
    config = load_config(file) if file else parse_config(None)
    if model is not None:
        config = dataclasses.replace(config, model=model)
    shipped = Path(__file__).resolve().parent.parent / config.model
    if not Path(config.model).is_dir() and shipped.is_dir():
        config = dataclasses.replace(config, model=str(shipped))
    return config


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, inside the block; a second one interrupts."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_all_gone(processes: set[Process]) -> None:
    """Raises BatonError naming the processes of a cluster that outlive it."""
    left = wait_until_gone(processes, _GONE_WITHIN_S)
    if left:
        named = ", ".join(f"{process.name} ({process.pid})" for process in left)
        raise BatonError(f"still running after {_GONE_WITHIN_S:g} s: {named}")


def up(arguments: argparse.Namespace) -> int:
    from cluster.local import up as start_cluster

    config = read_config(arguments.file, arguments.model)
    out = render.out()
    with Steps(render.err()) as steps:
        steps("starting")
        with start_cluster(config, on_progress=steps) as cluster:
            steps.done()
            out.print(f"[bold]{config.model_name}[/bold] is served at {cluster.router_address}")
            out.print(f"control service at {cluster.control_address}; ctrl-C ends the cluster")
            out.print("try: baton generate 'Tell me a story.'", style="dim")
            with stop_on_signals() as stop:
                stop.wait()
            processes = descendants()
            steps("stopping")
        check_all_gone(processes)
    return 0
