"""Both clients under one interface, and what tests of them share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Iterator
from typing import Any

from baton.client import AsyncClient, Client
from baton.client.events import Event, Tokens
from baton.client.request_stream import build_request
from tests.baton.small_router import SmallRouter


class LoopedClient:
    """An AsyncClient in an event loop that runs while one of its methods is waited for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()

        async def make() -> AsyncClient:
            return AsyncClient(*args, **options)

        self._client = self._runner.run(make())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            return self._runner.run(method(*args, **options))

        return call

    def generate(self, *args: Any, **options: Any) -> Generator[Event, None, None]:
        events = self._client.generate(*args, **options)

        async def take() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self._runner.run(take())) is not None:
                yield event
        finally:
            self._runner.run(events.aclose())

    def __enter__(self) -> LoopedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


Connect = type[Client] | type[LoopedClient]


@contextlib.contextmanager
def routers(*made: SmallRouter) -> Iterator[list[str]]:
    try:
        yield [router.address for router in made]
    finally:
        for router in made:
            router.stop()


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


# Every method but `generate` and what is made of it.
SHORT_CALLS: list[Callable[[Any], Any]] = [
    lambda client: client.abort("any"),
    lambda client: client.models(),
    lambda client: client.tokenize("the fox"),
    lambda client: client.explain(build_request("hello")),
    lambda client: client.fleet(),
]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


def indices_of(events: list[Event]) -> list[int]:
    tokens = [event for event in events if isinstance(event, Tokens)]
    return [event.index + offset for event in tokens for offset in range(len(event.ids))]
