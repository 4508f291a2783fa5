"""A whole cluster on this machine: Ray, supervisor, pools, router. What `baton up` runs.

1. `up` starts its own Ray and the supervisor in it. It waits until every pool is live, then starts
   the router as a child process, which is started again when it dies.
2. `RunningCluster` has the addresses. `wait` raises once Ray has ended; then only the router is
   left.
3. `close` ends router, replicas, supervisor and Ray, in this order, and waits until none of their
   processes is left. The router lets its streams finish first, for its `drain_timeout_s` at most,
   unless that is `cut_short`.
4. If this process is killed instead, the reaper ends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config.cluster import ClusterConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.control.client import ControlClient
from baton.errors import ConfigError, DeadlineError, UnavailableError
from baton.grpc_options import DIRECT
from baton.identity.identity import Identity, make_keys, open_identity, recorded
from baton.native_build import NativeBuildError, build
from baton.pacing import Backoff
from baton.secret_files import open_to_others, write_secret
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
from cluster.pools.pool_settings import choose_auto_settings, own_settings
from cluster.worker.rank import free_port
from engine.kernels.native.recipe import KERNELS

log = logging.getLogger(__name__)

OnProgress = Callable[[str], None]

_CONFIG_FILE = "cluster.yaml"  # in the run directory
_FAILED_STARTS = 2  # a first one may be bad luck
_ROUTER_TIMEOUT_S = 60.0
_RAY_GONE_S = 8.0
_RAY_HEART = ("gcs_server", "raylet")  # without either of them Ray ends the rest
_LOOK_S = 1.0
_OBJECT_STORE_BYTES = 80 << 20  # the data plane never uses it


@dataclass(frozen=True)
class RunningCluster(contextlib.AbstractContextManager["RunningCluster"]):
    """A cluster that `up` started; a context manager that closes it."""

    router: RouterProcess
    control_address: str
    """host:port of the control service."""
    stack: contextlib.ExitStack
    ray_heart: frozenset[Process]
    run_dir: Path
    http_address: str | None
    """host:port of OpenAI's API; None: not served."""

    @property
    def router_address(self) -> str:
        """host:port of the router's gRPC server."""
        return self.router.address

    def wait(self) -> None:
        """Wait while Ray runs. Raises UnavailableError once it has ended."""
        while not (lost := self.ray_heart - still_alive(self.ray_heart)):
            time.sleep(_LOOK_S)
        named = ", ".join(f"{process.name} ({process.pid})" for process in lost)
        raise UnavailableError(
            f"Ray's {named} has ended, and with it every worker (logs: {self.run_dir})"
        )

    def close(self) -> None:
        """End everything; returns when no process is left. Idempotent."""
        self.stack.close()

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


def up(
    config: ClusterConfig,
    on_progress: OnProgress = lambda text: None,
    run_dir: Path | None = None,
) -> RunningCluster:
    """Start everything and wait until it serves. Raises BatonError; nothing is left then.

    Logs and the configuration are in `run_dir`, or in a temporary folder. `close` removes that
    folder, unless the cluster could not be started or ended by an error.
    """
    _check_runs_here(config)
    config = config.with_absolute_folders()
    config = dataclasses.replace(config, router=with_own_ports(config.router))
    with contextlib.ExitStack() as stack:
        if run_dir is None:
            run_dir = Path(tempfile.mkdtemp(prefix="baton-"))
            stack.push(partial(_clear_away, run_dir))
        _close_to_others(run_dir)
        keys = [] if config.internal.folder is None else config.internal.path.glob("*/*.key")
        for warning in open_to_others([*config.router.secret_files, *keys]):
            on_progress(f"warning: {warning}")
        config = with_own_keys(config, run_dir)
        own = open_identity(config.internal, "operator")
        threads = stack.enter_context(ThreadPoolExecutor(1))
        reaper = stack.enter_context(watched_over())
        auto = threads.submit(choose_auto_settings, config, reaper.variables)
        on_progress("starting Ray")
        ray_processes = start_ray(stack, reaper, run_dir)
        _check_gpus(config)  # for pools with device cuda; `auto` takes no more than there are
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
        stack.enter_context(recorded(control, config.internal))
        _wait_for_pools(control, own, on_progress, config.supervisor.start_timeout_s)
        on_progress("starting the router")
        for process in ray_processes:
            reaper.name(descendants(process.pid))
        router = RouterProcess(config.router, control, run_dir, reaper.variables)
        stack.callback(router.close)
        router.start(_ROUTER_TIMEOUT_S)
        heart = frozenset(process for process in ray_processes if process.name in _RAY_HEART)
        http, host = config.router.http.port, config.router.host
        http_address = None if http is None else f"{host}:{http}"
        return RunningCluster(router, control, stack.pop_all(), heart, run_dir, http_address)
    raise AssertionError("unreachable")


def with_own_keys(config: ClusterConfig, run_dir: Path) -> ClusterConfig:
    """Make the cluster's keys in the run directory, unless the configuration names a folder."""
    internal = config.internal
    if internal.identity != "keys" or internal.folder is not None:
        return config
    folder = run_dir / "identity"
    make_keys(folder)
    internal = dataclasses.replace(internal, folder=str(folder.resolve()))
    return dataclasses.replace(config, internal=internal)


def _close_to_others(run_dir: Path) -> None:
    """Close the run directory to other users. Raises ConfigError if it is not the user's own."""
    found = run_dir.stat()
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:
        raise ConfigError(f"{run_dir} is not yours alone: name a folder of your own")
    run_dir.chmod(0o700)


def _check_runs_here(config: ClusterConfig) -> None:
    """Raise ConfigError for a cluster on pods."""
    if config.runs_on != "machine":
        raise ConfigError(
            f"`baton up` starts everything on this machine: runs_on must be machine, not "
            f"{config.runs_on}",
            field="runs_on",
        )


def _build_kernels(config: ClusterConfig, on_progress: OnProgress) -> None:
    """Build the CPU kernels once, or each rank would. If that fails, report that the ranks compute
    without them."""
    engines = [config.pool_engine(pool) for pool in config.pools]
    if not any(engine.reads_model and engine.device == "cpu" for engine in engines):
        return
    on_progress("building the CPU kernels")
    try:
        build(KERNELS)
    except NativeBuildError as error:
        on_progress(f"using torch's kernels, several times slower ({one_line(error)})")


def _clear_away(run_dir: Path, kind: object, error: object, traceback: object) -> None:
    """Remove the run directory, unless an error makes its logs useful. An interrupt does not."""
    if not isinstance(error, Exception):
        shutil.rmtree(run_dir, ignore_errors=True)


def _check_gpus(config: ClusterConfig) -> None:
    """Raise ConfigError if Ray has found fewer GPUs than the pools need."""
    from cluster.supervisor.bundles import lacking_gpus

    first_sizes = {name: pool.replicas for name, pool in config.pools.items()}
    if lack := lacking_gpus(own_settings(config), first_sizes):
        raise ConfigError(lack, field="pools")


def start_ray(
    stack: contextlib.ExitStack, reaper: Reaper, run_dir: Path, num_gpus: int | None = None
) -> set[Process]:
    """Start Ray and return its root processes. Its session, and the token without which nobody is
    served there, are in `run_dir`. Raises UnavailableError.

    `num_gpus`: the number of GPUs that Ray offers; None: as many as it finds.
    """
    # Ray listens on all addresses but where its node's is the loopback.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 puts engines behind all else
    import ray
    from ray.exceptions import RayError

    raylet: Any = ray._raylet
    logging.getLogger("ray").setLevel(logging.ERROR)
    before = descendants()
    stack.callback(_stop_ray, before)
    with inherited(reaper.variables | _own_token(run_dir / "ray.token")):
        raylet.Config.initialize("")  # this process may have had a cluster with another token
        raylet.AuthenticationTokenLoader.instance().reset_cache()
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
                _temp_dir=str(run_dir / "ray"),
            )
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise UnavailableError(f"Ray does not start: {one_line(error)}") from error
    started = descendants() - before
    reaper.name(started)
    return started


def _own_token(file: Path) -> dict[str, str]:
    """Draw a token; return what makes Ray ask for it."""
    write_secret(file, secrets.token_hex(32).encode())
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def _stop_ray(before: set[Process]) -> None:
    """Shut Ray down. Its processes outlive that by seconds: wait for them, then kill them."""
    import ray

    ours = descendants() - before
    ray.shutdown()
    for process in wait_until_gone(ours, _RAY_GONE_S):
        log.warning("killing %s (%d), which outlived Ray", process.name, process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(ours, _RAY_GONE_S)


def _wait_for_pools(control: str, own: Identity, on_progress: OnProgress, timeout_s: float) -> None:
    """Wait until every pool has its replicas live, and report each change.

    Raises BatonError: UnavailableError for pools that are not live in time, or keep failing to
    start."""
    reported = ""
    with ControlClient(control, identity=own) as client:
        try:
            for fleet in client.watch_fleet(timeout_s):
                missing = [p for p in fleet.pools if p.live_replicas < p.desired_replicas]
                if not missing:
                    return
                for pool in missing:
                    if pool.num_failed_starts >= _FAILED_STARTS:
                        text = f"the {pool.name} pool does not start: {pool.last_error}"
                        raise UnavailableError(text)
                live = ", ".join(
                    f"{p.name} {p.live_replicas}/{p.desired_replicas}" for p in fleet.pools
                )
                if live != reported:
                    reported = live
                    on_progress(f"loading the model: {live}")
        except DeadlineError as error:
            limit = f"{timeout_s:g} s (supervisor.start_timeout_s)"
            raise UnavailableError(f"the pools are not live after {limit}: {reported}") from error
    raise UnavailableError(f"the control service at {control} has closed")


# --- the router ---------------------------------------------------------------------------------

_RESTART_AFTER_S = 0.2
_LONGEST_RESTART_S = 5.0
_DRAIN_MARGIN_S = 5.0  # beyond its own limit, to end its clients' streams
_POLL_S = 0.05
_ASK_AGAIN_MS = 100
_MAX_STARTS = 3
_CONFIG_STATUS = 2
_CHANNEL_OPTIONS = (
    *((f"grpc.{which}_reconnect_backoff_ms", _ASK_AGAIN_MS) for which in ("initial", "min", "max")),
    *DIRECT,
)


def with_own_ports(config: RouterConfig) -> RouterConfig:
    """Choose ports that stay over restarts. The router's health is asked in plain text, so a router
    with TLS gets its own health port."""
    if config.tls is not None and not config.health_port:
        config = dataclasses.replace(config, health_port=free_port(config.host))
    if config.http.port == 0:
        config = changed(config, http={"port": free_port(config.host)})
    return config


class RouterProcess:
    """Owns `python -m router`, which keeps its port over restarts. The cluster's file and the
    router's log are in the run directory.

    A router that ends with status 2 before it has ever served has a wrong configuration: it is not
    tried again, and `start` raises its message. Later ends are accidents. `variables`: added to its
    environment.
    """

    def __init__(
        self, config: RouterConfig, control: str, run_dir: Path, variables: Mapping[str, str]
    ) -> None:
        self.address = f"{config.host}:{config.port or free_port(config.host)}"
        # Asked for its health; a router with TLS answers in plain text at a port of its own.
        self._asked = f"{config.host}:{config.health_port or self.address.rpartition(':')[2]}"
        self._command = [sys.executable, "-m", "router", "--control", control]
        self._command += ["--config", str(run_dir / _CONFIG_FILE), "--listen", self.address]
        self._log_path = run_dir / "router.log"
        self._drain_s = config.drain_timeout_s + _DRAIN_MARGIN_S
        self._environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(variables)
        self._closing = threading.Event()
        self._cut_short = False
        self._has_served = False
        self._misconfigured = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._not_launched = ""  # why the last start gave no process
        self._thread = threading.Thread(target=self._keep, name="router-process", daemon=True)

    @property
    def pid(self) -> int | None:
        """Pid of the current router."""
        return None if self._process is None else self._process.pid

    def start(self, timeout_s: float) -> None:
        """Start it and wait until it serves.

        Raises ConfigError with its message, and UnavailableError with the end of its log.
        """
        self._thread.start()
        give_up_at = time.monotonic() + timeout_s
        with grpc.insecure_channel(self._asked, options=_CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._closing.is_set():
                if self._misconfigured.wait(_POLL_S):
                    raise ConfigError(self._log_lines()[-1].removeprefix("router: "))
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                except grpc.RpcError:
                    answer = None
                if answer is not None and answer.status == answer.SERVING:
                    self._has_served = True
                    return
                if time.monotonic() > give_up_at or self._num_starts > _MAX_STARTS:
                    break
        why = self._not_launched or " | ".join(self._log_lines()[-5:])
        raise UnavailableError(f"the router does not serve at {self.address}: {why}")

    def cut_short(self) -> None:
        """Keep `close` from waiting for requests, also while it runs. Takes no lock, so it is safe
        in signal handlers."""
        self._cut_short = True

    def close(self) -> None:
        """End it, gently at first; returns when it is gone. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep(self) -> None:
        backoff = Backoff(_RESTART_AFTER_S, _LONGEST_RESTART_S)
        while not self._closing.is_set():
            started_at = time.monotonic()
            self._num_starts += 1
            why = self._run_once()
            if self._closing.is_set() or self._misconfigured.is_set():
                return
            log.error("the router %s; starting it again", why)
            if time.monotonic() - started_at > 10:
                backoff.reset()
            self._closing.wait(backoff.next_s())

    def _run_once(self) -> str:
        """Run it once. Returns how it ended."""
        try:
            process = self._process = self._launch()
        except OSError as error:  # no memory, process or file descriptor is left: this may pass
            self._process = None
            self._not_launched = f"could not be started: {error}"
            return self._not_launched
        self._not_launched = ""
        status = self._wait(process)
        if status == _CONFIG_STATUS and not self._has_served:
            self._misconfigured.set()
        return f"ended with status {status}"

    def _launch(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as output:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # on ctrl-C the cluster ends its parts in order
                env=self._environment,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for its end, by itself or by `close`. Returns its status."""
        while process.poll() is None and not self._closing.wait(_POLL_S):
            pass
        process.terminate()
        kill_at = time.monotonic() + self._drain_s
        while process.poll() is None and time.monotonic() < kill_at and not self._cut_short:
            time.sleep(_POLL_S)
        process.kill()
        return process.wait()

    def _log_lines(self) -> list[str]:
        """Return the log's lines, of which there is at least one."""
        if not self._log_path.exists():
            return ["it never ran"]
        return self._log_path.read_text(errors="replace").splitlines() or ["it said nothing"]
