"""Rounds of streams on a thread of their own, while a test changes what serves them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from baton.client import AsyncClient
from baton.events import Event, Migrated, Tokens
from tests.k8s.operating import eventually

NUM_STREAMS = 50
_ROUND_S = 120.0


class Streaming:
    """Own the thread: one round of `NUM_STREAMS` streams after the other, each of which has to say
    what it said in the first round, to its last token, and to stay where it began."""

    def __init__(self, address: str, num_tokens: int) -> None:
        """The first round is over on return: the oracle of a cluster that stands still."""
        self._address, self._num_tokens = address, num_tokens
        self._oracle: list[list[int]] = []
        self._is_enough = threading.Event()
        self.num_rounds = 0
        self.num_running = 0
        """Streams of the round that runs that have begun and not ended."""
        asyncio.run(self._rounds(lambda: True))
        assert all(len(ids) == num_tokens for ids in self._oracle)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="streams")
        self._running = self._thread.submit(asyncio.run, self._rounds(self._is_enough.is_set))

    def check(self) -> None:
        """Raises what has failed until now."""
        if self._running.done():
            self._running.result()

    def wait_round(self) -> None:
        """Until a round has begun, and all of its streams run: they have most of their tokens to
        come. Raises what has failed until then."""
        rounds = self.num_rounds

        def all_run() -> bool:
            self.check()
            return self.num_rounds > rounds and self.num_running == NUM_STREAMS

        eventually(all_run, "all streams of a new round run", 2 * _ROUND_S)

    def enough(self) -> None:
        """No round begins any more; the one that runs goes on."""
        self._is_enough.set()

    def end(self) -> None:
        """After the round that runs. Raises what failed in any of them."""
        self.enough()
        self._running.result(_ROUND_S)
        self._thread.shutdown()

    async def _rounds(self, is_enough: Callable[[], bool]) -> None:
        async with AsyncClient(self._address) as client:
            while True:
                async with asyncio.timeout(_ROUND_S):
                    asked = (self._stream(client, number) for number in range(NUM_STREAMS))
                    found = await asyncio.gather(*asked)
                self._oracle = self._oracle or found
                assert found == self._oracle
                self.num_rounds += 1
                if is_enough():
                    return

    async def _stream(self, client: AsyncClient, number: int) -> list[int]:
        ids: list[int] = []
        tokens, prompt = self._num_tokens, f"stream number {number}"
        async for event in client.generate(
            prompt, max_tokens=tokens, min_tokens=tokens, temperature=0.0
        ):
            self.num_running += not ids and isinstance(event, Tokens)
            ids += _ids(event, len(ids))
        self.num_running -= 1
        return ids


def _ids(event: Event, index: int) -> tuple[int, ...]:
    assert not isinstance(event, Migrated), "it was begun again elsewhere"
    if not isinstance(event, Tokens):
        return ()
    assert event.index == index, "no token twice, none missing"
    return tuple(event.ids)


@contextlib.contextmanager
def streaming(address: str, num_tokens: int) -> Iterator[Streaming]:
    """Through the whole block, and checked at its end."""
    streams = Streaming(address, num_tokens)
    try:
        yield streams
    finally:
        streams.end()
