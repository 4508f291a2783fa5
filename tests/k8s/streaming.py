"""Streams on a thread of their own, while a test changes what serves them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from baton.client import AsyncClient
from baton.client.events import Event, Migrated, Routed, Tokens
from baton.config.cluster import parse_config
from baton.control.client import ControlClient
from baton.errors import BatonError
from baton.link.frames import LinkError
from deploy.api.naming import respelt, snake
from deploy.controller.manifests.common import POOL_LABEL
from engine.request import RequestId, RequestSpec, SamplingParams
from tests.cluster.whole_cluster import books_of, engine_tokens, holds_nothing, live_workers
from tests.k8s.installed import FAKE, HEAD, MODEL, control_address, router_addresses
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually

NUM_STREAMS = 50
_ROUND_S = 120.0
_END_S = 600.0
_IDLE_WITHIN_S = 120.0


class Asking:
    """Own a thread that asks all the time, until it is enough."""

    def __init__(self, run: Callable[[Callable[[], bool]], Coroutine[Any, Any, None]]) -> None:
        """`run` gets what says whether it is enough."""
        self._is_enough = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asking")
        self._running = self._thread.submit(asyncio.run, run(self._is_enough.is_set))

    def check(self) -> None:
        """Raises what has failed until now."""
        if self._running.done():
            self._running.result()

    def enough(self) -> None:
        """Nothing is begun any more; what runs goes on."""
        self._is_enough.set()

    def end(self) -> None:
        """After what runs. Raises what failed in any of it."""
        self.enough()
        self._running.result(_END_S)
        self._thread.shutdown()


def asking(num_at_once: int, ask: Callable[[int], Awaitable[None]]) -> Asking:
    """`num_at_once` askers, each of which asks one request after the other. `ask` gets a number: an
    asker begins with its own and counts up."""

    async def run(is_enough: Callable[[], bool]) -> None:
        async def ask_on(first: int) -> None:
            for number in itertools.count(first):
                if is_enough():
                    return
                await ask(number)

        async with asyncio.TaskGroup() as group:
            for first in range(num_at_once):
                group.create_task(ask_on(first))

    return Asking(run)


class Streaming(Asking):
    """Rounds of `NUM_STREAMS` streams, one round after the other. Each stream must say what one
    fake engine alone says, to its last token, and stay where it began."""

    def __init__(self, addresses: Sequence[str], num_tokens: int) -> None:
        """Streams take turns between the routers. The first round is over on return."""
        self._addresses, self._num_tokens = addresses, num_tokens
        self._oracle = said_alone(map(prompt_of, range(NUM_STREAMS)), num_tokens)
        self.num_rounds = 0
        self.num_running = 0
        """Streams of the present round that have begun and not ended."""
        asyncio.run(self._rounds(lambda: True))
        super().__init__(self._rounds)

    def wait_all_run(self) -> None:
        """Until all streams of a round run."""
        is_full = lambda: self.num_running == NUM_STREAMS  # noqa: E731
        self.wait(is_full, "all streams of a round run", _ROUND_S)

    def wait_round(self) -> None:
        """Until a round has begun, and all of its streams run: they have most of their tokens to
        come."""
        self.wait_rounds(1)
        self.wait_all_run()

    def wait_rounds(self, num_rounds: int) -> None:
        """Until `num_rounds` more are over."""
        enough = self.num_rounds + num_rounds
        self.wait(lambda: self.num_rounds >= enough, f"{num_rounds} more rounds of streams", 180)

    def wait(self, holds: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """As `eventually`. Raises also what fails of the streams meanwhile."""

        def holds_and_streams() -> Any:
            self.check()
            return holds()

        return eventually(holds_and_streams, what, timeout_s)

    async def _rounds(self, is_enough: Callable[[], bool]) -> None:
        async with clients_of(self._addresses) as clients:
            while True:
                async with asyncio.timeout(_ROUND_S):
                    asked = zip(itertools.cycle(clients), range(NUM_STREAMS), strict=False)
                    found = await asyncio.gather(*(self._stream(*each) for each in asked))
                assert found == self._oracle
                self.num_rounds += 1
                if is_enough():
                    return

    async def _stream(self, client: AsyncClient, number: int) -> list[int]:
        stream = _Stream()
        async for event in client.generate(
            token_ids=prompt_of(number),
            max_tokens=self._num_tokens,
            ignore_eos=True,
            temperature=0.0,
        ):
            self.num_running += not stream.ids and isinstance(event, Tokens)
            stream.take(event)
        self.num_running -= 1
        return stream.ids


class _Stream:
    """Own what one stream has said. Raises AssertionError where its client had to ask again, which
    a client hides from its user."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._attempt = 0

    def take(self, event: Event) -> None:
        assert not isinstance(event, Migrated), "it was begun again elsewhere"
        if isinstance(event, Routed):
            assert not self.ids, f"it was cut off after {len(self.ids)} tokens"
            assert event.attempt > self._attempt, "its router ended it, and its client asked anew"
            self._attempt = event.attempt
        if isinstance(event, Tokens):
            assert event.index == len(self.ids), "no token twice, none missing"
            self.ids += event.ids


@contextlib.asynccontextmanager
async def clients_of(addresses: Sequence[str]) -> AsyncIterator[list[AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(AsyncClient(address)) for address in addresses]


async def tokens_of(
    client: AsyncClient, prompt: list[int], num_tokens: int, **more: Any
) -> list[int]:
    """What one stream says: no token twice, none missing."""
    ids: list[int] = []
    async for event in client.generate(
        token_ids=prompt, max_tokens=num_tokens, ignore_eos=True, temperature=0.0, **more
    ):
        if isinstance(event, Tokens):
            assert event.index == len(ids)
            ids += event.ids
    return ids


def prompt_of(number: int) -> list[int]:
    return [5 + number, *(5 + (7 * number + index) % 200 for index in range(20))]


def said_alone(
    prompts: Iterable[list[int]],
    num_tokens: int,
    engine: dict[str, Any] = FAKE,
    model: Path = MODEL,
) -> list[list[int]]:
    """To each prompt, by one engine in this process. What a fake engine says does not depend on its
    speed and its blocks."""
    pools = {"mixed": {"role": "mixed"}}
    config = parse_config({"model": str(model), "engine": respelt(engine, snake), "pools": pools})
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
    specs = [
        RequestSpec(RequestId(str(number)), np.array(prompt, np.uint32), len(prompt), sampling)
        for number, prompt in enumerate(prompts)
    ]
    return engine_tokens(config, specs)


@contextlib.contextmanager
def streaming(kubelet: Kubelet, num_tokens: int) -> Iterator[Streaming]:
    """Through the whole block. At its end the streams are checked, and that no worker holds
    anything of them."""
    streams = Streaming(router_addresses(kubelet), num_tokens)
    try:
        yield streams
    finally:
        streams.end()
    wait_nothing_held(kubelet)


def wait_nothing_held(kubelet: Kubelet) -> None:
    what = "workers hold nothing any more"
    eventually(lambda: _holds_nothing_more(kubelet), what, _IDLE_WITHIN_S)


def _holds_nothing_more(kubelet: Kubelet) -> bool:
    """Whether every live worker holds nothing: no lease, no block. A deleted cluster has no pods
    any more."""
    if not kubelet.pods(HEAD) and not kubelet.pods(POOL_LABEL):
        return True
    try:
        control = control_address(kubelet)
        with ControlClient(control) as client:
            workers = live_workers(client.fleet())
        books = {name: books_of(control, worker.address) for name, worker in workers.items()}
    except (BatonError, LinkError, OSError, KeyError, ValueError):  # one comes or goes just now
        return False
    if not books:
        return False
    for name, found in books.items():
        assert not found.problems, (name, list(found.problems))
    return all(map(holds_nothing, books.values()))
