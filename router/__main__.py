"""`python -m router --control HOST:PORT --config cluster.yaml --listen HOST:PORT`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys

import uvloop

from baton.config.cluster import ClusterConfig, load_config
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.errors import ConfigError
from baton.identity.identity import open_identity
from baton.native_build import NativeBuildError
from baton.process.interpreter import freeze_heap, share_interpreter
from baton.process.log import LogSettings, set_up_logging
from kv_transfer.block_hash import native_chain
from router.door.connections.acceptor import split_address
from router.door.connections.credentials import Callers
from router.door.operators.page import OperatorPort
from router.door.server import RouterServer
from router.index import prefix_index
from router.placement import choice
from router.units.units import Units

log = logging.getLogger("router")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description="Baton's router")
    parser.add_argument("--control", required=True, metavar="HOST:PORT", help="the control service")
    parser.add_argument("--config", metavar="FILE", help="cluster.yaml; without it, the defaults")
    parser.add_argument("--listen", metavar="HOST:PORT", help="overrides the configuration")
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, help="overrides the configuration")
    return parser.parse_args()


def build_native() -> None:
    """Compile what a router needs, if this machine never did: not while requests wait. Raises
    NativeBuildError."""
    native_chain()
    prefix_index.native_library()
    choice.native_library()


async def serve(config: ClusterConfig, control: str, listen: str) -> int:
    """Run a router until SIGTERM or SIGINT, or a fault of its own; then drain it.

    A second signal cuts the drain short. Returns the exit status: 1 after a fault.
    """
    share_interpreter()
    own = open_identity(config.internal, "router")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # clients' connections are files
    traces_to = config.router.traces.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    routing = changed(config.router, traces={"endpoint": traces_to or None})
    units = Units(routing, control, config.model_names, own)
    server = RouterServer(units, config.router, listen)
    operators = operator_port(config.router, units, server.api.callers)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await server.start()
    if operators is not None:
        await operators.start()
    freeze_heap()
    print(f"router listening on {server.address}", flush=True)
    if server.http_address is not None:
        log.info("OpenAI's API is served at %s", server.http_address)
    units.fault.add_done_callback(lambda _: signals.put_nowait(signal.SIGTERM))
    await signals.get()
    log.info("draining %d requests", units.num_active)
    stopping = asyncio.create_task(server.stop(config.router.drain_timeout_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        log.warning("drain cut short: %d requests are left to another router", units.num_active)
        units.leave_requests()
    await stopping
    again.cancel()
    if operators is not None:
        await operators.stop()
    return 1 if units.fault.done() else 0


def operator_port(
    config: RouterConfig, units: Units, callers: Callers | None = None
) -> OperatorPort | None:
    """Return operators' port; None where none is wanted. Raises ConfigError if it is taken."""
    if config.metrics.port is None:
        return None
    return OperatorPort(units, config, config.metrics.port, callers)


def main() -> int:
    arguments = _arguments()
    try:
        config = load_config(arguments.config) if arguments.config else ClusterConfig()
        usual = LogSettings(arguments.log_level or config.log_level, config.log_format)
        set_up_logging(usual, os.environ, model=config.model_name)
        listen = arguments.listen or f"{config.router.host}:{config.router.port}"
        split_address(arguments.control)
        build_native()
        return uvloop.run(serve(config, arguments.control, listen))
    except (ConfigError, NativeBuildError) as error:
        print(f"router: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
