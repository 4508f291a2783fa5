"""A whole cluster on this machine: Ray, supervisor, pools, router. What `baton up` runs.

1. `up` starts a Ray of its own, the supervisor in it, waits until every pool is live, then starts
   the router as a child process.
2. `RunningCluster` tells the addresses and stays until `close`; `wait` tells when Ray has ended
   under it, after which only the router is left.
3. `close` ends router, replicas, supervisor and Ray, in this order, and waits until none of their
   processes is left. The router lets its streams finish first, for its `drain_timeout_s` at most,
   unless it is `cut_short`.
4. When this process is killed instead, the reaper does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from baton.config.cluster import ClusterConfig
from baton.control_client import ControlClient
from baton.errors import BatonError, ConfigError, DeadlineError, UnavailableError
from baton.native_build import NativeBuildError, build
from baton.v1 import control_pb2
from cluster.errors import one_line
from cluster.local.process_tree import (
    Process,
    Reaper,
    descendants,
    inherited,
    still_alive,
    wait_until_gone,
    watched_over,
)
from cluster.local.router_process import RouterProcess, with_health_port
from cluster.pools.pool_settings import AutoSettings, num_gpus_wanted, own_settings
from engine.attention.native_library import KERNELS

log = logging.getLogger(__name__)

OnProgress = Callable[[str], None]

_CONFIG_FILE = "cluster.yaml"  # in the run directory
_FAILED_STARTS = 2  # a first one may be bad luck
_ROUTER_TIMEOUT_S = 60.0
_RAY_GONE_S = 8.0
_RAY_HEART = ("gcs_server", "raylet")  # without either of them Ray ends the rest
_LOOK_S = 1.0
_OBJECT_STORE_BYTES = 80 << 20  # the data plane never uses it


class RunningCluster:
    """A cluster that `up` started; a context manager that closes it."""

    def __init__(
        self,
        router: RouterProcess,
        control_address: str,
        supervisor_pid: Callable[[], int],
        stack: contextlib.ExitStack,
        ray_heart: frozenset[Process],
        run_dir: Path,
    ) -> None:
        self._router = router
        self._run_dir = run_dir
        self._ray_heart = ray_heart
        self.control_address = control_address
        """host:port of the control service."""
        self.supervisor_pid = supervisor_pid
        """Of the supervisor that runs now. Raises ray.exceptions.RayError while there is none."""
        self._stack = stack

    @property
    def router_address(self) -> str:
        """host:port of the router's gRPC server."""
        return self._router.address

    @property
    def router_pid(self) -> int | None:
        return self._router.pid

    def wait(self) -> None:
        """Stay for as long as Ray runs. Raises UnavailableError when it does not any more."""
        while not (lost := self._ray_heart - still_alive(self._ray_heart)):
            time.sleep(_LOOK_S)
        named = ", ".join(f"{process.name} ({process.pid})" for process in lost)
        raise UnavailableError(
            f"Ray's {named} has ended, and with it every worker (logs: {self._run_dir})"
        )

    def cut_short(self) -> None:
        """`close`, under way or to come, does not wait for streams. For signal handlers too."""
        self._router.cut_short()

    def close(self) -> None:
        """End everything; returns when no process is left. Idempotent."""
        self._stack.close()

    def __enter__(self) -> RunningCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def up(
    config: ClusterConfig,
    on_progress: OnProgress = lambda text: None,
    run_dir: Path | None = None,
) -> RunningCluster:
    """Start everything and wait until it serves. Raises BatonError; nothing is left then.

    Logs and the configuration lie in `run_dir`, or in a temporary folder that goes with the
    cluster, but stays when it cannot be started or is left because of an error.
    """
    _check_runs_here(config)
    config = config.with_absolute_folders()
    config = dataclasses.replace(config, router=with_health_port(config.router))
    with contextlib.ExitStack() as stack:
        if run_dir is None:
            run_dir = Path(tempfile.mkdtemp(prefix="baton-"))
            stack.push(partial(_clear_away, run_dir))
        reaper = stack.enter_context(watched_over())
        auto = stack.enter_context(AutoSettings(config, reaper.variables))
        on_progress("starting Ray")
        ray_processes = start_ray(stack, reaper)
        _check_gpus(config)  # of pools that say cuda; `auto` takes no more than there are
        config, choices = auto.result()
        for choice in choices:
            on_progress(choice)
        _build_kernels(config, on_progress)
        (run_dir / _CONFIG_FILE).write_text(config.to_yaml())
        on_progress("starting the supervisor")
        from cluster.supervisor.supervisor import SupervisorHandle

        supervisor = SupervisorHandle.start(config, run_dir)
        stack.callback(supervisor.stop)
        control = supervisor.address()
        _wait_for_pools(control, on_progress, config.supervisor.start_timeout_s)
        on_progress("starting the router")
        for process in ray_processes:
            reaper.name(descendants(process.pid))
        router = _start_router(stack, config, control, run_dir, reaper)
        heart = frozenset(process for process in ray_processes if process.name in _RAY_HEART)
        return RunningCluster(router, control, supervisor.pid, stack.pop_all(), heart, run_dir)
    raise AssertionError("unreachable")


def _check_runs_here(config: ClusterConfig) -> None:
    """Raises ConfigError."""
    if config.runs_on != "machine":
        raise ConfigError(
            f"`baton up` starts everything on this machine: runs_on must be machine, not "
            f"{config.runs_on}",
            field="runs_on",
        )


def _build_kernels(config: ClusterConfig, on_progress: OnProgress) -> None:
    """Before the ranks start, each of which would build them beside the others. Where they cannot
    be built the ranks do without, which is told."""
    engines = [config.pool_engine(pool) for pool in config.pools]
    if not any(engine.backend == "torch" and engine.device == "cpu" for engine in engines):
        return
    on_progress("building the CPU kernels")
    try:
        build(KERNELS)
    except NativeBuildError as error:
        on_progress(f"torch's kernels have to do, several times slower ({one_line(error)})")


def _start_router(
    stack: contextlib.ExitStack,
    config: ClusterConfig,
    control_address: str,
    run_dir: Path,
    reaper: Reaper,
) -> RouterProcess:
    """Returns once it serves; the stack closes it."""
    router = RouterProcess(
        control_address,
        run_dir / _CONFIG_FILE,
        f"{config.router.host}:{config.router.port}",
        run_dir / "router.log",
        config.router.drain_timeout_s,
        reaper.variables,
    )
    stack.callback(router.close)
    router.start(_ROUTER_TIMEOUT_S, config.router.health_port)
    return router


def _clear_away(
    run_dir: Path,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Unless the logs in it are needed: not after an interrupt."""
    if not isinstance(error, Exception):
        shutil.rmtree(run_dir, ignore_errors=True)


def _check_gpus(config: ClusterConfig) -> None:
    """Raises ConfigError when Ray has found fewer GPUs than the pools take."""
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    first_sizes = {name: pool.replicas for name, pool in config.pools.items()}
    wanted = num_gpus_wanted(own_settings(config), first_sizes)
    found = int(resources.get("GPU", 0))
    if wanted > found:
        raise ConfigError(
            f"the pools need {wanted} GPUs (one for each rank of each replica on cuda); "
            f"this machine has {found}. Make the pools smaller, or one pool of role mixed, or set "
            "engine.device: cpu",
            field="pools",
        )


def start_ray(
    stack: contextlib.ExitStack, reaper: Reaper, num_gpus: int | None = None
) -> set[Process]:
    """Returns the processes that all others of Ray's descend from. Raises UnavailableError.

    `num_gpus`: how many Ray is told there are; None: as many as it finds.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.exceptions import RayError

    logging.getLogger("ray").setLevel(logging.ERROR)
    before = descendants()
    stack.callback(_stop_ray, before)
    with inherited(reaper.variables):
        try:
            ray.init(
                address="local",
                num_cpus=max(4, len(os.sched_getaffinity(0))),
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                namespace="baton",
                object_store_memory=_OBJECT_STORE_BYTES,
            )
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise UnavailableError(f"Ray does not start: {one_line(error)}") from error
    started = descendants() - before
    reaper.name(started)
    return started


def _stop_ray(before: set[Process]) -> None:
    """Ray's processes outlive its shutdown by seconds: wait for them, then end them by pid."""
    import ray

    ours = descendants() - before
    ray.shutdown()
    for process in wait_until_gone(ours, _RAY_GONE_S):
        log.warning("killing %s (%d), which outlived Ray", process.name, process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(ours, _RAY_GONE_S)


def _give_up_on_failing(pools: list[control_pb2.PoolStatus]) -> None:
    """Raises UnavailableError for a pool whose replicas fail again and again."""
    for pool in pools:
        if pool.num_failed_starts >= _FAILED_STARTS:
            raise UnavailableError(f"the {pool.name} pool does not start: {pool.last_error}")


def _wait_for_pools(control: str, on_progress: OnProgress, timeout_s: float) -> None:
    """Until every pool has its replicas live; tells which are missing as that changes."""
    told = ""
    with ControlClient(control) as client:
        fleets = client.watch_fleet(timeout_s)
        while True:
            try:
                fleet = next(fleets, None)
            except DeadlineError as error:
                limit = f"{timeout_s:g} s (supervisor.start_timeout_s)"
                raise UnavailableError(f"the pools are not live after {limit}: {told}") from error
            except BatonError as error:
                lost = f"the control service at {control} is lost: {error.message}"
                raise UnavailableError(lost) from error
            if fleet is None:
                raise UnavailableError(f"the control service at {control} has closed")
            missing = [p for p in fleet.pools if p.live_replicas < p.desired_replicas]
            if not missing:
                return
            _give_up_on_failing(missing)
            live = ", ".join(
                f"{p.name} {p.live_replicas}/{p.desired_replicas}" for p in fleet.pools
            )
            if live != told:
                told = live
                on_progress(f"loading the model: {live}")
