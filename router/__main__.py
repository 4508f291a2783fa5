"""`python -m router --control HOST:PORT --config cluster.yaml --listen HOST:PORT`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys

import uvloop
from prometheus_client import start_http_server

from baton.config import ClusterConfig, load_config
from baton.errors import ConfigError
from router.router import Router
from router.server import RouterServer
from router.text import TextModel

log = logging.getLogger("router")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description="Baton's router")
    parser.add_argument("--control", required=True, metavar="HOST:PORT", help="the registry")
    parser.add_argument("--config", metavar="FILE", help="cluster.yaml; without it, the defaults")
    parser.add_argument("--listen", metavar="HOST:PORT", help="overrides the configuration")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    return parser.parse_args()


async def serve(config: ClusterConfig, control: str, listen: str) -> None:
    """Run a router until SIGTERM or SIGINT, then drain it; a second signal cuts the drain short."""
    text_model = await asyncio.to_thread(TextModel.load, config.model)
    router = Router(config.router, control, config.model_name, text_model)
    server = RouterServer(router, config.router, listen)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await server.start()
    metrics = None
    if config.router.metrics_port is not None:
        metrics = start_http_server(
            config.router.metrics_port, config.router.host, router.metrics.registry
        )
    print(f"router listening on {server.address}", flush=True)
    await signals.get()
    log.info("draining %d requests", router.num_active)
    stopping = asyncio.create_task(server.stop(config.router.drain_timeout_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        log.warning("drain cut short: %d requests are left to another router", router.num_active)
        router.leave_requests()
    await stopping
    again.cancel()
    if metrics is not None:
        metrics[0].shutdown()


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        config = load_config(arguments.config) if arguments.config else ClusterConfig()
        listen = arguments.listen or f"{config.router.host}:{config.router.port}"
        uvloop.run(serve(config, arguments.control, listen))
    except ConfigError as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
