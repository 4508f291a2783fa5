"""Who reaches the router, and how: TLS and bearer tokens, as their files say now."""

from __future__ import annotations

import asyncio

import grpc.aio

from baton.config.router import RouterConfig
from router.callers import Callers
from router.tls import ServerTls

_LOOK_S = 1.0


class Access:
    """Own certificate and tokens; `follow` keeps them up to date."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ConfigError when their files cannot be read."""
        self._tls = None if config.tls is None else ServerTls(config.tls)
        self.callers = None if config.auth is None else Callers(config.auth)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """The port. Raises RuntimeError when it is taken."""
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.credentials())

    async def follow(self) -> None:
        """Read what has changed, again and again."""
        looks = [part.look for part in (self._tls, self.callers) if part is not None]
        while True:
            await asyncio.sleep(_LOOK_S)
            for look in looks:
                await asyncio.to_thread(look)
