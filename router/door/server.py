"""The router's servers: RouterService, health and reflection on one port, and OpenAI's API over
HTTP on another.

TLS and bearer tokens protect it where the configuration says so. Kubernetes' gRPC probes speak no
TLS, so health may have a plain port of its own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import ExitStack
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from baton.config.router import RouterConfig
from baton.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc
from router.door.api.api import Api
from router.door.connections.acceptor import listening, split_address
from router.door.connections.credentials import Contexts, Credentials
from router.door.connections.sharing import Sharing
from router.door.grpc.call_policy import CallPolicy
from router.door.grpc.h2_server import GrpcServer
from router.door.grpc.service import RouterService
from router.door.http.app import OpenAiApp
from router.door.http.server.http_server import HttpServer
from router.units.units import Units

log = logging.getLogger(__name__)

_GRACE_S = 1.0
_MAX_PROBES, _MAX_PROBE_BYTES = 64, 1 << 16
SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
_FLEET_SERVICE = control_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name
_REFLECTION_V1 = reflection.SERVICE_NAME.replace("v1alpha", "v1")


class RouterServer:
    """Own the servers and the units behind them."""

    def __init__(self, units: Units, config: RouterConfig, listen: str) -> None:
        """`listen` is host:port, port 0 for any free one. Raises ConfigError when it is taken, or
        the files for TLS or tokens cannot be read."""
        self.units, self._config = units, config
        files_each = 1 if config.tls is None else 2
        self._sharing = Sharing(
            config.clients.max_connections, config.clients.max_unfinished_bytes, files_each
        )
        self._health = health.aio.HealthServicer()
        self._credentials = Credentials(config)
        self.api = Api(units, self._credentials.callers)
        self._following: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        host, port = split_address(listen)
        with ExitStack() as opened:
            self._server = self._make_grpc(
                opened.enter_context(listening(host, port, config.reuse_port))
            )
            self._health_server = self._make_health(opened, config)
            self.http_app = OpenAiApp(self.api, self._sharing.unfinished)
            self.http = self._make_http(opened, config)
            opened.pop_all()
        self.address = f"{listen.rpartition(':')[0]}:{self._server.port}"

    def _make_grpc(self, listener: socket.socket) -> GrpcServer:
        max_bytes = self._config.clients.max_message_bytes
        policy = CallPolicy(max_bytes, self._credentials.callers, self.api)
        server = GrpcServer(policy, listener, self._sharing)
        methods: Any = server
        service: Any = RouterService(self.api)
        router_pb2_grpc.add_RouterServiceServicer_to_server(service, methods)
        control_pb2_grpc.add_FleetServiceServicer_to_server(service, methods)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, methods)
        _add_reflection(methods)
        return server

    def _make_health(self, opened: ExitStack, config: RouterConfig) -> GrpcServer | None:
        """Make a server of health alone, in plain text, where the configuration names its port."""
        if config.health_port is None:
            return None
        listener = opened.enter_context(
            listening(config.host, config.health_port, config.reuse_port)
        )
        sharing = Sharing(_MAX_PROBES, _MAX_PROBES * _MAX_PROBE_BYTES)
        server = GrpcServer(CallPolicy(_MAX_PROBE_BYTES), listener, sharing)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    def _make_http(self, opened: ExitStack, config: RouterConfig) -> HttpServer | None:
        if config.http.port is None:
            return None
        listener = opened.enter_context(listening(config.host, config.http.port, config.reuse_port))
        contexts = self._credentials.contexts
        context = None if contexts is None else contexts.of_http
        read_s = config.http.read_timeout_s
        return HttpServer(self.http_app.asgi, listener, context, self._sharing, read_s)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def health_port(self) -> int | None:
        return None if self._health_server is None else self._health_server.port

    @property
    def http_address(self) -> str | None:
        """Return where OpenAI's API is served; None: nowhere."""
        return None if self.http is None else f"{self._config.host}:{self.http.port}"

    async def start(self) -> None:
        await self.units.start()
        contexts = self._credentials.contexts
        self._server.start(None if contexts is None else contexts.of_grpc)
        if self._health_server is not None:
            self._health_server.start(None)
        if self.http is not None:
            self.http.start(self.units.report_fault)
        self._following = asyncio.create_task(self._credentials.follow(self._renew))
        self._following.add_done_callback(self.units.report_fault)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._starting = asyncio.create_task(self._report_serving())
        log.info("the router listens on %s", self.address)

    def _renew(self, contexts: Contexts) -> None:
        self._server.acceptor.context = contexts.of_grpc
        if self.http is not None:
            self.http.acceptor.context = contexts.of_http

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
        await self.units.close(drain_s)
        if self.http is not None:
            await self.http.stop()
        await self._server.stop(_GRACE_S)
        if self._health_server is not None:
            await self._health_server.stop(0.0)
        self.api.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    async def _report_serving(self) -> None:
        """Report health once the units can serve. Earlier requests are served all the same."""
        await self.units.can_serve()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.http_app.is_ready = True

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)


def _add_reflection(server: Any) -> None:
    """Serve reflection as v1alpha, which the library has, and as v1: it differs in name alone."""
    names = (SERVICE, _FLEET_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME, _REFLECTION_V1)
    alpha, v1 = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    json_format.Parse(json_format.MessageToJson(alpha).replace("v1alpha", "v1"), v1)
    descriptor_pool.Default().AddSerializedFile(v1.SerializeToString())
    reflected: Any = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, server)
    handler = server.methods[f"/{reflection.SERVICE_NAME}/ServerReflectionInfo".encode()]
    server.add_registered_method_handlers(_REFLECTION_V1, {"ServerReflectionInfo": handler})
