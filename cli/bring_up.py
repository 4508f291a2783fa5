"""`baton up`: a whole cluster on this machine, in the foreground.

Ports are checked before minutes of loading.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from baton import render
from baton.config.cluster import ClusterConfig, load_config, parse_config
from baton.config.router import RouterConfig
from baton.errors import BatonError, ConfigError
from baton.model_folder import Report, fetch_from_hub, find_text_files, is_hub_name
from cli.progress import Steps
from cluster.local.process_tree import Process, descendants, wait_until_gone

# --- the ports that a configuration takes ---------------------------------------------------------


_WORKERS_HOST = "127.0.0.1"


@dataclass(frozen=True)
class _Wanted:
    """A port that is needed. `key` is the setting that names it; 0: any free one."""

    key: str
    host: str
    port: int
    may_share: bool


def check_ports(config: ClusterConfig) -> None:
    """Check that every port is free. Raises ConfigError naming the setting whose port is taken, or
    two settings that name one port, on whichever hosts."""
    wanted, named = _wanted(config), dict[int, str]()
    for each in wanted:
        if each.port and (other := named.setdefault(each.port, each.key)) != each.key:
            raise ConfigError(
                f"{other} and {each.key} are both {each.port}: choose another for one of them; "
                "0 is any free port",
                field=each.key,
            )
    for each in wanted:
        _check_free(each)


def _wanted(config: ClusterConfig) -> list[_Wanted]:
    """List the ports that are needed. Raises ConfigError when workers would have to share one."""
    router, control, worker = config.router, config.control, config.worker
    num_workers = sum(pool.replicas for pool in config.pools.values())
    of_workers = (
        ("worker.port", _WORKERS_HOST, worker.port),
        ("worker.metrics_port", worker.metrics_host or _WORKERS_HOST, worker.metrics_port),
        ("worker.health_port", _WORKERS_HOST, worker.health_port),
    )
    for key, _, port in of_workers:
        if port and num_workers > 1:
            raise ConfigError(
                f"{key}: {num_workers} workers on one machine cannot share port {port}; "
                "0 gives each a free one",
                field=key,
            )
    wanted = (
        ("control.port", control.host, control.port, False),
        ("router.port", router.host, router.port, router.reuse_port),
        ("router.http.port", router.host, router.http.port, router.reuse_port),
        ("router.metrics.port", router.metrics.host, router.metrics.port, False),
        ("router.health_port", router.host, router.health_port, router.reuse_port),
        *((*each, False) for each in of_workers),
    )
    return [
        _Wanted(key, host, port, may_share)
        for key, host, port, may_share in wanted
        if port is not None
    ]


def _check_free(wanted: _Wanted) -> None:
    from router.door.connections.acceptor import check_can_listen

    try:
        check_can_listen(f"{wanted.host}:{wanted.port}", wanted.may_share)
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}. Is a cluster up already? "
            f"Otherwise choose another {wanted.key}; 0 is any free port",
            field=wanted.key,
        ) from error


# --- the cluster ----------------------------------------------------------------------------------


if TYPE_CHECKING:
    from cli.autoscale import Autoscaler
    from cluster.local.bring_up import RunningCluster

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GONE_WITHIN_S = 15.0


def read_config(file: str | None, model: str | None = None) -> ClusterConfig:
    """Read the cluster file, or take the defaults. The shipped model is found from any folder."""
    config = load_config(file) if file else parse_config(None)
    if model is not None:
        config = dataclasses.replace(config, model=os.path.expanduser(model))
    shipped = Path(__file__).resolve().parent.parent / config.model
    if not Path(config.model).is_dir() and shipped.is_dir():
        config = dataclasses.replace(config, model=str(shipped))
    return config


def with_model_folder(config: ClusterConfig, announce: Report, detail: Report) -> ClusterConfig:
    """Return the cluster with its model as a folder. A model named on the hub is fetched, once for
    all.

    If ranks fetched it they would be killed for not registering in time. A model that is neither a
    folder nor such a name stays. Raises ConfigError.
    """
    if Path(config.model).is_dir() or not is_hub_name(config.model):
        if config.model_revision is not None:
            raise ConfigError(
                f"model_revision is of a model on the hub; {config.model} is none",
                field="model_revision",
            )
        return config
    folder = fetch_from_hub(config.model, config.model_revision, announce, detail)
    return dataclasses.replace(
        config, model=folder, model_revision=None, served_model_name=config.model_names
    )


class Startup:
    """Start a cluster so that SIGINT and SIGTERM end it cleanly at any time, in any shell.

    The first raises KeyboardInterrupt, which closes the cluster. The second cuts the waits of
    closing short; further ones change nothing. Shells let background commands ignore SIGINT, and
    Ray sets its own SIGTERM handler while it starts. So every step sets our handlers again.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._before: dict[int, Any] = {}
        self._num_signals = 0
        self._cluster: RunningCluster | None = None

    @property
    def was_cut_short(self) -> bool:
        return self._num_signals > 1

    def start(self, config: ClusterConfig) -> RunningCluster:
        from cluster.local.bring_up import up as start_cluster
        from router.door.connections.credentials import Credentials
        from router.text import TextModel

        check_ports(config)
        Credentials(config.router)  # reads its files before anything starts
        config = with_model_folder(config, self._announce, self._steps.detail)
        self._announce("reading the tokenizer")
        # A wrong folder is reported before anything starts.
        TextModel(find_text_files(config.model, tokenizer=config.tokenizer))
        self._cluster = start_cluster(config, on_progress=self._announce)
        self._catch()
        return self._cluster

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._catch()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _announce(self, message: str) -> None:
        self._catch()
        self._steps(message)

    def _catch(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            raise KeyboardInterrupt
        if self._cluster is not None:
            self._cluster.router.cut_short()


def check_all_gone(processes: set[Process]) -> None:
    """Check that no process is left. Raises BatonError naming those that outlive their cluster."""
    left = wait_until_gone(processes, _GONE_WITHIN_S)
    if left:
        named = ", ".join(f"{process.name} ({process.pid})" for process in left)
        raise BatonError(f"still running after {_GONE_WITHIN_S:g} s: {named}")


def _autoscaler(config: ClusterConfig, cluster: RunningCluster) -> Autoscaler:
    """Let the pools follow the load, and print every change with its reason."""
    from cli.autoscale import Autoscaler
    from cluster.planner.fleet_signals import PoolBounds

    bounds = {
        name: PoolBounds(pool.min_replicas, pool.max_replicas)
        for name, pool in config.pools.items()
    }
    report = partial(render.out().print, markup=False)
    return Autoscaler(cluster.control_address, bounds, config.planner, report)


def _first_question(router: RouterConfig) -> str:
    """Return the command to try first, with TLS and a token if the router wants them."""
    parts = ["baton generate"]
    if router.tls is not None:
        parts.append("--tls-ca FILE")
    if router.tls is not None and router.tls.client_ca_file is not None:
        parts.append("--tls-cert FILE --tls-key FILE")
    if router.auth is not None:
        parts.append("--token-file FILE")
    return " ".join([*parts, "'Tell me a story.'"])


def up(arguments: argparse.Namespace) -> int:
    """Run a cluster until it is interrupted. Raises KeyboardInterrupt after a second interrupt,
    since requests were lost, and UnavailableError when Ray has ended under the cluster."""
    config = read_config(arguments.file, arguments.model)
    out = render.out()
    with Steps(render.err()) as steps, Startup(steps) as startup:
        with startup.start(config) as cluster:
            with contextlib.suppress(KeyboardInterrupt):
                steps.done()
                out.print(f"[bold]{config.model_name}[/bold] is served at {cluster.router_address}")
                out.print(f"control service at {cluster.control_address}; ctrl-C ends the cluster")
                if cluster.http_address is not None:
                    scheme = "http" if config.router.tls is None else "https"
                    out.print(f"OpenAI's API at {scheme}://{cluster.http_address}/v1")
                out.print(f"logs in {cluster.run_dir}", style="dim", markup=False)
                out.print(f"try: {_first_question(config.router)}", style="dim", markup=False)
                wanted = arguments.autoscale
                with _autoscaler(config, cluster) if wanted else contextlib.nullcontext():
                    cluster.wait()
            processes = descendants()
            drain_s = config.router.drain_timeout_s
            steps("stopping")
            steps.detail(f"requests have {drain_s:g} s to finish, ctrl-C again ends them now")
        check_all_gone(processes)
        if startup.was_cut_short:
            raise KeyboardInterrupt
    return 0
