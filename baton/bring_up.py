"""`baton up`: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import socket
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from baton import render
from baton.config import ClusterConfig, load_config, parse_config
from baton.errors import BatonError, ConfigError
from baton.process_tree import Process, descendants, wait_until_gone
from baton.progress import Steps

if TYPE_CHECKING:
    from cluster.local import RunningCluster

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


def _check_ports(config: ClusterConfig) -> None:
    """Raises ConfigError naming the setting whose port is taken."""
    wanted = [("control.port", config.control.host, config.control.port)]
    if not config.router.reuse_port:
        wanted.append(("router.port", config.router.host, config.router.port))
    for key, host, port in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {host}:{port}: {error.strerror}. Is a cluster up already? "
                    f"Otherwise choose another {key}; 0 is any free port",
                    field=key,
                ) from error


class Startup:
    """Start a cluster so that SIGTERM, like ctrl-C, ends it cleanly at any time.

    Ray puts its own SIGTERM handler in place while it starts: ours is put back at every step.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._before: Any = None

    def start(self, config: ClusterConfig) -> RunningCluster:
        from cluster.local import up as start_cluster
        from router.text import TextModel

        _check_ports(config)
        self._announce("reading the tokenizer")
        TextModel.load(config.model)  # a wrong folder is told before anything is started
        cluster = start_cluster(config, on_progress=self._announce)
        self._catch()
        return cluster

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGTERM)
        self._catch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _announce(self, message: str) -> None:
        self._catch()
        self._steps(message)

    def _catch(self) -> None:
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def check_all_gone(processes: set[Process]) -> None:
    """Raises BatonError naming the processes of a cluster that outlive it."""
    left = wait_until_gone(processes, _GONE_WITHIN_S)
    if left:
        named = ", ".join(f"{process.name} ({process.pid})" for process in left)
        raise BatonError(f"still running after {_GONE_WITHIN_S:g} s: {named}")


def up(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.file, arguments.model)
    out = render.out()
    processes: set[Process] = set()
    with Steps(render.err()) as steps, Startup(steps) as startup:
        with startup.start(config) as cluster:
            steps.done()
            out.print(f"[bold]{config.model_name}[/bold] is served at {cluster.router_address}")
            out.print(f"control service at {cluster.control_address}; ctrl-C ends the cluster")
            out.print("try: baton generate 'Tell me a story.'", style="dim")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
            processes = descendants()
            steps("stopping")
        check_all_gone(processes)
    return 0
