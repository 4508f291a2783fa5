"""The router's servers: RouterService, health and reflection on one port, and OpenAI's API over
HTTP on another.

TLS and bearer tokens protect it where the configuration says so. Kubernetes' gRPC probes speak no
TLS, so health may have a plain port of its own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.grpc_options import accepts_pings, sends_pings
from baton.v1 import router_pb2, router_pb2_grpc
from router.door.access import Access
from router.door.door import Door
from router.door.gate import Gate
from router.door.intake import Intake
from router.door.openai.app import OpenAiApp
from router.door.openai.http_server import HttpServer
from router.door.service import RouterService


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address: host:port is expected")
    return host.strip("[]"), int(port)


def check_can_listen(address: str, reuse_port: bool) -> None:
    """Raises ConfigError, with the reason that gRPC would leave out, when the port is taken or the
    host is not this machine's.

    `reuse_port`: other processes may listen there that allow it too.
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
            probe.bind(target)
    except OSError as error:
        raise cannot_listen(address, error) from error


def cannot_listen(address: str, error: Exception) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"cannot listen on {address}: {why}")


log = logging.getLogger(__name__)

_CLIENT_KEEPALIVE_S = 7.5
SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


class RouterServer:
    """Own the servers and the door behind them."""

    def __init__(self, door: Door, config: RouterConfig, listen: str) -> None:
        """`listen` is host:port, port 0 for any free one. Raises ConfigError when it is taken, or
        the files for TLS or tokens cannot be read."""
        check_can_listen(listen, config.reuse_port)
        self.door, self._config = door, config
        self.intake = Intake(door)
        self._health = health.aio.HealthServicer()
        self._access = Access(config)
        self._following: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=(Gate(SERVICE, self._access.callers),),
            options=(
                ("grpc.so_reuseport", int(config.reuse_port)),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                *accepts_pings(min_interval_s=0.5, max_strikes=2),
                *sends_pings(_CLIENT_KEEPALIVE_S),
            ),
        )
        router_pb2_grpc.add_RouterServiceServicer_to_server(
            RouterService(self.intake), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        host, _, _ = listen.rpartition(":")
        self.port = _bound(lambda: self._access.listen(self._server, listen), listen)
        self.address = f"{host}:{self.port}"
        self._serve_health(config)
        self.http_app = OpenAiApp(self.intake, self._access.callers, config)
        self.http = self._make_http(config)

    def _make_http(self, config: RouterConfig) -> HttpServer | None:
        if config.http_port is None:
            return None
        check_can_listen(f"{config.host}:{config.http_port}", config.reuse_port)
        try:
            return HttpServer(
                self.http_app.asgi, config, config.host, config.http_port, self._access.context
            )
        except OSError as error:
            raise cannot_listen(f"{config.host}:{config.http_port}", error) from error

    @property
    def http_address(self) -> str | None:
        """Where OpenAI's API is served; None: nowhere."""
        return None if self.http is None else f"{self._config.host}:{self.http.port}"

    def _serve_health(self, config: RouterConfig) -> None:
        """On a port of its own, in plain text, where the configuration names one."""
        self.health_port: int | None = None
        self._health_server: grpc.aio.Server | None = None
        if config.health_port is None:
            return
        listen = f"{config.host}:{config.health_port}"
        check_can_listen(listen, config.reuse_port)
        server = self._health_server = grpc.aio.server(
            options=(("grpc.so_reuseport", int(config.reuse_port)), *accepts_pings())
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.health_port = _bound(lambda: server.add_insecure_port(listen), listen)

    async def start(self) -> None:
        await self.door.start()
        await self._server.start()
        if self._health_server is not None:
            await self._health_server.start()
        if self.http is not None:
            await self.http.start(self.door.report_fault)
        self._following = asyncio.create_task(self._access.follow(self._renew))
        self._following.add_done_callback(self.door.report_fault)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._starting = asyncio.create_task(self._report_serving())
        log.info("the router listens on %s", self.address)

    async def _renew(self, context: ssl.SSLContext) -> None:
        if self.http is not None:
            await self.http.renew(context)

    async def stop(self, drain_s: float) -> None:
        """Finish what runs within `drain_s`, and leave the rest to another router. gRPC's server
        runs until then, so that Abort can reach the requests that still run. New requests are
        refused by name.
        """
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.http_app.is_ready = False
        await self.door.close(drain_s)
        if self.http is not None:
            await self.http.stop()
        await self._server.stop(grace=1.0)
        if self._health_server is not None:
            await self._health_server.stop(grace=None)
        self.intake.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    async def _report_serving(self) -> None:
        """Report health once the door can serve. Earlier requests are served all the same."""
        await self.door.can_serve()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.http_app.is_ready = True

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)


def _bound(listen: Callable[[], int], address: str) -> int:
    """The port. Raises ConfigError when it was taken since it was checked."""
    try:
        return listen()
    except RuntimeError as error:
        raise cannot_listen(address, error) from error
