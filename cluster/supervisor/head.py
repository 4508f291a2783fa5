"""Ensures that a supervisor runs: the main process of the head container, beside `ray start
--head`.

`python -m cluster.supervisor.head --config cluster.yaml --run-dir /run/baton`:

1. It waits for this pod's Ray and connects to it.
2. It adopts the supervisor that runs there, or starts one.
3. It stays until SIGTERM and then ends nothing: supervisor and replicas belong to Ray, and this
   process may be replaced. If Ray's head has ended, it exits with an error, so that the container
   restarts with both. Ray itself would notice only after a minute.

`python -m cluster.supervisor.head --end` ends every replica, then the supervisor. This is not
needed before the whole Ray cluster is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.config.cluster import ClusterConfig, load_config
from baton.errors import BatonError, ConfigError, UnavailableError
from baton.process.log import LogSettings, set_up_logging
from cluster.errors import one_line
from cluster.pools.pool_settings import choose_auto_settings

log = logging.getLogger("head")

_CONFIG_STATUS = 2
_UNAVAILABLE_STATUS = 3
_CONNECT_S = 1.0
_LOOK_S = 1.0
_END_WITHIN_S = 120.0
# Ray may be restarting it on a machine whose disk cache is cold. Giving up ends this container and
# with it Ray's head, so the next head starts from scratch.
_RESTARTED_WITHIN_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        config = None if options.end else _read(options.config)
        set_up_logging(LogSettings.of(config or ClusterConfig()), os.environ)
        with _connected(options.ray_address, options.ray_within):
            if config is None:
                _end()
            else:
                _serve(config, options)
    except BatonError as error:
        print(f"head: {error.message}", file=sys.stderr, flush=True)
        return _CONFIG_STATUS if isinstance(error, ConfigError) else _UNAVAILABLE_STATUS
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.supervisor.head")
    parser.add_argument("--config", type=Path, help="the cluster's YAML file")
    parser.add_argument("--run-dir", type=Path, help="folder of the supervisor's state")
    parser.add_argument("--end", action="store_true", help="end every replica and the supervisor")
    parser.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS", "127.0.0.1:6379"),
        metavar="HOST:PORT",
        help="address of Ray's GCS (default: RAY_ADDRESS, or %(default)s)",
    )
    parser.add_argument(
        "--ray-within",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for Ray (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    if not options.end and (options.config is None or options.run_dir is None):
        parser.error("give --config and --run-dir, or --end")
    return options


def _read(path: Path) -> ClusterConfig:
    """Read the cluster file. Raises ConfigError."""
    config = load_config(path)
    if config.runs_on != "pods":
        raise ConfigError(
            f"{path}: runs_on: must be pods for an existing Ray, not {config.runs_on}; "
            "`baton up` starts its own Ray",
            field="runs_on",
        )
    return config


# --- Ray ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected(address: str, within_s: float) -> Iterator[None]:
    """Connect to Ray. Raises UnavailableError, which says what to do."""
    _wait_until_listens(address, within_s)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.exceptions import RayError

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address=address,
            namespace="baton",
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise UnavailableError(
            f"Ray at {address} refuses this process: {one_line(error)}. Run it in the container of "
            "`ray start --head`, where it sees Ray's processes and /tmp/ray, and with the same "
            "token (RAY_AUTH_TOKEN)"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _wait_until_listens(address: str, within_s: float) -> None:
    """Wait for the GCS. Ray's own client would end this process if nothing listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--ray-address must be HOST:PORT, like 127.0.0.1:6379, not {address!r}")
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            return _connect(address)
        except OSError as error:
            if time.monotonic() > give_up_at:
                raise UnavailableError(
                    f"no Ray answers at {address} within {within_s:g} s: {error}. "
                    "Start one here with `ray start --head`, or name another with --ray-address "
                    "or RAY_ADDRESS"
                ) from error
            time.sleep(min(_LOOK_S, within_s))


def _has_ended(address: str) -> bool:
    """Whether nothing listens there any more. A slow GCS still listens."""
    try:
        _connect(address)
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _connect(address: str) -> None:
    """Open a connection to the GCS, and close it. Raises OSError."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


# --- the supervisor -----------------------------------------------------------------------------


def _serve(config: ClusterConfig, options: argparse.Namespace) -> None:
    """Find or start the supervisor and stay. Raises BatonError if it or Ray has ended."""
    from cluster.supervisor.supervisor import SupervisorHandle

    leaving = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: leaving.set())
    supervisor = SupervisorHandle.find()
    if supervisor is not None:
        address = supervisor.address(_RESTARTED_WITHIN_S)
        log.info("adopted the supervisor: control service at %s", address)
    else:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        config, choices = choose_auto_settings(config.with_absolute_folders())
        for choice in choices:
            log.info(choice)
        supervisor = SupervisorHandle.start(config, options.run_dir.resolve())
        try:
            address = supervisor.address()
        except UnavailableError:
            supervisor.stop()  # else the next head would adopt one that never served
            raise
        log.info("started the supervisor: control service at %s", address)
    while not leaving.wait(_LOOK_S):
        if _has_ended(options.ray_address):
            raise UnavailableError(
                f"Ray's head at {options.ray_address} has ended, and the supervisor with it: "
                "exiting, so that this container restarts"
            )
    log.info("leaving: supervisor and replicas stay")


def _end() -> None:
    """End every replica and the supervisor. Raises UnavailableError."""
    from cluster.supervisor.supervisor import SupervisorHandle

    supervisor = SupervisorHandle.find()
    if supervisor is None:
        log.info("no supervisor is running, so there are no replicas")
    elif not supervisor.stop(_END_WITHIN_S):
        raise UnavailableError(
            f"the supervisor did not end every replica within {_END_WITHIN_S:g} s: delete the "
            "Ray cluster's pods"
        )


if __name__ == "__main__":
    sys.exit(main())
