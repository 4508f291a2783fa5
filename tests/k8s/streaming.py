"""Rounds of streams on a thread of their own, while a test changes what serves them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

from baton.client import AsyncClient
from baton.client.events import Event, Migrated, Routed, Tokens
from baton.config.cluster import parse_config
from baton.control_client import ControlClient
from baton.errors import BatonError
from deploy.controller.manifests.common import POOL_LABEL
from engine.request import RequestId, RequestSpec, SamplingParams
from tests.cluster.whole_cluster import books_of, engine_tokens, holds_nothing, live_workers
from tests.k8s.addresses import HEAD, control_address, router_addresses
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually

NUM_STREAMS = 50
_ROUND_S = 120.0
_IDLE_WITHIN_S = 120.0
_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
_ORACLE = {
    "model": str(_MODEL),
    "engine": {"backend": "fake", "max_num_seqs": NUM_STREAMS},
    "pools": {"mixed": {"role": "mixed"}},
}
"""What the fake engine says depends on its prompts alone, not on its speed or its blocks."""


class Streaming:
    """Own the thread: one round of `NUM_STREAMS` streams after the other, each of which has to say
    what one fake engine alone says, to its last token, and to stay where it began."""

    def __init__(self, addresses: Sequence[str], num_tokens: int) -> None:
        """Streams take turns between the routers. The first round is over on return."""
        self._addresses, self._num_tokens = addresses, num_tokens
        self._oracle = said_alone(num_tokens)
        self._is_enough = threading.Event()
        self.num_rounds = 0
        self.num_running = 0
        """Streams of the round that runs that have begun and not ended."""
        asyncio.run(self._rounds(lambda: True))
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
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(address)) for address in self._addresses
            ]
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
    """Own what one stream has said; raises AssertionError where its client has had to ask again, of
    which whoever uses it hears nothing."""

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


def prompt_of(number: int) -> list[int]:
    return [5 + number, *(5 + (7 * number + place) % 200 for place in range(20))]


def said_alone(num_tokens: int) -> list[list[int]]:
    """To each prompt, by one engine in this process, with fresh memory."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
    config = parse_config(_ORACLE)
    prompts = [np.array(prompt_of(number), np.uint32) for number in range(NUM_STREAMS)]
    specs = [
        RequestSpec(RequestId(str(number)), prompt, len(prompt), sampling)
        for number, prompt in enumerate(prompts)
    ]
    return engine_tokens(config, specs)


@contextlib.contextmanager
def streaming(kubelet: Kubelet, num_tokens: int) -> Iterator[Streaming]:
    """Through the whole block, and checked at its end: the streams, and that nothing is left of
    them in any worker."""
    streams = Streaming(router_addresses(kubelet), num_tokens)
    try:
        yield streams
    finally:
        streams.end()
    eventually(lambda: holds_nothing_more(kubelet), "workers hold nothing any more", _IDLE_WITHIN_S)


def holds_nothing_more(kubelet: Kubelet) -> bool:
    """Whether every worker that lives holds nothing: no lease, no block. A cluster that is gone has
    no pods any more."""
    if not kubelet.pods(HEAD) and not kubelet.pods(POOL_LABEL):
        return True
    try:
        with ControlClient(control_address(kubelet)) as client:
            workers = live_workers(client.fleet())
        books = {name: books_of(worker.address) for name, worker in workers.items()}
    except (BatonError, grpc.RpcError, KeyError, ValueError):  # one comes or goes just now
        return False
    if not books:
        return False
    for name, found in books.items():
        assert not found.problems, (name, list(found.problems))
    return all(map(holds_nothing, books.values()))
