"""A stream from a registry that is followed through any number of the registry's restarts."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import grpc.aio

from baton.config.router import RouterConfig
from baton.v1 import control_pb2_grpc
from router.backoff import Backoff
from router.worker_link import channel_options

log = logging.getLogger(__name__)

M_co = TypeVar("M_co", covariant=True)
M = TypeVar("M")


class Call(Protocol[M_co]):
    def __aiter__(self) -> AsyncIterator[M_co]: ...
    def cancel(self) -> bool: ...


class Following(Generic[M]):
    """Own the stream. `take` gets each message, `on_lost` hears once that no more come."""

    def __init__(
        self,
        address: str,
        config: RouterConfig,
        silence_s: float,
        call: Callable[[control_pb2_grpc.ControlServiceStub], Call[M]],
        take: Callable[[M], Awaitable[None]],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`silence_s`: the registry is asked anew after this long without a message."""
        self._address, self._config, self._silence_s = address, config, silence_s
        self._call, self._take, self._on_lost = call, take, on_lost
        self.is_connected = False
        self._told_lost = False  # warned of once, until it is back

    async def run(self) -> None:
        """Until cancelled."""
        config = self._config
        backoff = Backoff(config.reconnect_min_s, config.reconnect_max_s, random.Random())
        options = channel_options(config)
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            while True:
                why = "it ended the stream"
                try:
                    await self._follow(stub, backoff)
                except grpc.aio.AioRpcError as error:
                    why = f"{error.code().name}: {error.details()}"
                except TimeoutError:
                    why = f"silent for {self._silence_s:g} s"
                self._lose(why)
                await asyncio.sleep(backoff.next_s())

    async def _follow(self, stub: control_pb2_grpc.ControlServiceStub, backoff: Backoff) -> None:
        """One stream, until it ends or falls silent."""
        call = self._call(stub)
        messages = aiter(call)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await anext(messages, None)
                if message is None:
                    return
                backoff.reset()
                if self._told_lost:
                    self._told_lost = False
                    log.info("registry %s: connected", self._address)
                self.is_connected = True
                await self._take(message)
        finally:
            call.cancel()

    def _lose(self, why: str) -> None:
        if not self._told_lost:
            self._told_lost = True
            log.warning("registry %s: %s", self._address, why)
        if self.is_connected:
            self.is_connected = False
            self._on_lost()
