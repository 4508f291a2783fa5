"""How many tasks, futures and callbacks a request and its tokens make in a router: no times.

The router is alone on the event loop; workers are a process, the client is a thread. gRPC's and
HTTP's servers count too. What follows the fleet adds a few now and then, so the least of several
tries counts. Tokens that came together are one message.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from baton.config.settings import changed
from baton.v1 import common_pb2, router_pb2, router_pb2_grpc
from router.door.server import RouterServer
from router.units.units import Units
from tests.identities import ROUTER
from tests.router.deployment import QUICK
from tests.router.scripted_worker import MODEL

TRIES = 7
STEP_MS = 5
FEW, MANY = 4, 36  # tokens
TEXT = "the fox sang to the moon"
IDS = list(TEXT.encode())


@dataclass
class Work:
    """What an event loop was asked for, and messages with tokens that a client got."""

    tasks: int = 0
    futures: int = 0
    callbacks: int = 0
    messages: int = 0

    def less(self, other: Work) -> Work:
        return Work(**{name: value - getattr(other, name) for name, value in vars(self).items()})


OF_THE_REST = 10  # the handoff's message, and a report on the fleet
KINDS = ("tasks", "futures", "callbacks")
OF_THE_CLIENTS_THREAD = Work(futures=1, callbacks=2)


def count_work(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()

    def counting(name: str, what: str) -> None:
        method = getattr(loop, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            setattr(work, what, getattr(work, what) + 1)
            return method(*args, **kwargs)

        monkeypatch.setattr(loop, name, counted)

    counting("create_task", "tasks")
    counting("create_future", "futures")
    counting("call_soon", "callbacks")
    return work


@pytest.fixture(scope="module")
def control() -> Iterator[str]:
    """The address of a registry with workers."""
    command = (sys.executable, "-m", "bench.free_worker")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as workers:
        assert workers.stdout is not None
        yield workers.stdout.readline().split()[0]
        workers.terminate()


@asynccontextmanager
async def router_at(control: str) -> AsyncIterator[RouterServer]:
    config = changed(QUICK, http={"port": 0}, links={"keepalive_s": 2.0})
    server = RouterServer(Units(config, control, (MODEL,), ROUTER), config, "127.0.0.1:0")
    await server.start()
    try:
        router = await server.units.main_router()
        async with asyncio.timeout(20):
            while sum(entry.usable for entry in router.fleet) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield server
    finally:
        await server.stop(0.0)


Ask = Callable[[int], int]
"""Asks for tokens; the number of messages that had some."""
Prompt = str | list[int]
Connect = Callable[[RouterServer, Prompt], AbstractContextManager[Ask]]


@contextmanager
def over_grpc(server: RouterServer, prompt: Prompt) -> Iterator[Ask]:
    channel = grpc.insecure_channel(server.address)
    stub = router_pb2_grpc.RouterServiceStub(channel)  # type: ignore[arg-type]

    def ask(num_tokens: int) -> int:
        request = router_pb2.GenerateRequest(
            model=MODEL,
            sampling=common_pb2.SamplingParams(max_tokens=num_tokens),
            seed=STEP_MS,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        responses: Any = stub.Generate(request, timeout=20)
        return sum(response.HasField("tokens") for response in responses)

    with channel:
        yield ask


@contextmanager
def over_http(server: RouterServer, prompt: Prompt) -> Iterator[Ask]:
    connection = http.client.HTTPConnection(server.http_address or "", timeout=20)

    def ask(num_tokens: int) -> int:
        body = {"prompt": prompt, "max_tokens": num_tokens, "seed": STEP_MS, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        lines = connection.getresponse().read().splitlines()
        events = [json.loads(line[6:]) for line in lines if line[6:7] == b"{"]
        return sum(bool(event["choices"][0]["text"]) for event in events)

    with closing(connection):
        yield ask


async def tries_of(work: Work, ask: Ask, num_tokens: int) -> list[Work]:
    tries = []
    for _ in range(TRIES):
        before = replace(work)
        work.messages += await asyncio.to_thread(ask, num_tokens)
        tries.append(work.less(before).less(OF_THE_CLIENTS_THREAD))
    return tries


@pytest.mark.parametrize(
    ("connect", "prompt", "limit"),
    [
        (over_grpc, IDS, Work(tasks=1, futures=1, callbacks=7)),
        (over_grpc, TEXT, Work(tasks=1, futures=1, callbacks=7)),
        (over_http, IDS, Work(tasks=3, futures=5, callbacks=12)),
        (over_http, TEXT, Work(tasks=3, futures=5, callbacks=12)),
    ],
)
async def test_a_request_makes_no_more_than_it_did(
    monkeypatch: pytest.MonkeyPatch, control: str, connect: Connect, prompt: Prompt, limit: Work
) -> None:
    async with router_at(control) as server:
        work = count_work(asyncio.get_running_loop(), monkeypatch)
        with connect(server, prompt) as ask:
            await tries_of(work, ask, FEW)  # connects
            tries = await tries_of(work, ask, 1)
            for name in KINDS:
                assert min(getattr(one, name) for one in tries) <= getattr(limit, name), tries


@pytest.mark.parametrize(
    ("connect", "each"),
    [(over_grpc, Work(callbacks=1)), (over_http, Work(futures=1, callbacks=1))],
)
async def test_a_further_token_makes_no_task_and_no_more_futures_than_it_did(
    monkeypatch: pytest.MonkeyPatch, control: str, connect: Connect, each: Work
) -> None:
    """`each`: of a further message with tokens."""
    async with router_at(control) as server:
        work = count_work(asyncio.get_running_loop(), monkeypatch)
        with connect(server, IDS) as ask:
            await tries_of(work, ask, FEW)  # connects
            first = min(await tries_of(work, ask, 1), key=lambda one: one.futures)
            further = [one.less(first) for one in await tries_of(work, ask, MANY)]
            for name in KINDS:
                most = getattr(each, name)
                least = min(getattr(one, name) - most * one.messages for one in further)
                assert least <= (0 if name == "tasks" else OF_THE_REST), further
