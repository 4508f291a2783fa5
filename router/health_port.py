"""The health service on a port of its own, in plain text: Kubernetes' gRPC probes speak no TLS."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from baton.config.router import RouterConfig
from baton.grpc_options import accepts_pings
from router.listening import cannot_listen, check_can_listen


class HealthPort:
    """Own its server. The servicer knows the health."""

    def __init__(self, servicer: health.aio.HealthServicer, config: RouterConfig) -> None:
        """Raises ConfigError when the port is taken."""
        listen = f"{config.host}:{config.health_port}"
        check_can_listen(listen, config.reuse_port)
        self._server = grpc.aio.server(
            options=(("grpc.so_reuseport", int(config.reuse_port)), *accepts_pings())
        )
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        try:
            self.port = self._server.add_insecure_port(listen)
        except RuntimeError as error:  # taken since it was checked
            raise cannot_listen(listen, error) from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)
