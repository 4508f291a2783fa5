"""Both clients against one router over real gRPC: events, options, errors.

Every case runs over `Client` and over `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time

import pytest

from baton import errors
from baton.client import AsyncClient, Client
from baton.client.events import Finished, HandedOff, Prefilled, Routed, Tokens
from baton.errors import BatonError, OverloadedError, ShuttingDownError, UnavailableError
from baton.finish_reason import FinishReason
from tests.baton.both_clients import SHORT_CALLS, Connect, routers, text_of
from tests.baton.small_router import Book, SmallRouter, answer


def test_events_come_typed_and_in_order(book: Book, connect: Connect) -> None:
    with routers(SmallRouter(book)) as addresses, connect(addresses) as client:
        events = list(client.generate("hello", max_tokens=3, seed=5))
    assert [type(event) for event in events] == [
        Routed, Prefilled, HandedOff, Tokens, Tokens, Tokens, Finished
    ]  # fmt: skip
    assert text_of(events) == answer(5, 3)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH
    assert finished.usage.num_cached_tokens == 192


def test_every_option_reaches_the_router(book: Book, connect: Connect) -> None:
    with routers(SmallRouter(book)) as addresses, connect(addresses) as client:
        client.text(
            token_ids=[1, 2], temperature=0.0, top_k=3, stop=["x"], stop_token_ids=[7],
            tenant="t", timeout_s=1.5, logprobs=0, ignore_eos=True, request_id="mine",
        )  # fmt: skip
    (request,) = book.requests
    assert list(request.token_ids.ids) == [1, 2]
    assert request.sampling.HasField("temperature")
    assert request.sampling.top_k == 3
    assert request.sampling.HasField("logprobs")
    assert request.sampling.ignore_eos
    assert (list(request.stop), list(request.stop_token_ids)) == (["x"], [7])
    assert (request.tenant, request.request_id) == ("t", "mine")
    assert 0 < request.timeout_ms <= 1500


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {
            name: list(inspect.signature(method).parameters.values())
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert methods(Client) == methods(AsyncClient)
    assert {"abort", "models", "tokenize", "explain", "fleet"} < set(methods(Client))


def test_a_client_that_is_closed_ends_its_streams_and_takes_no_more(
    book: Book, connect: Connect
) -> None:
    hold = threading.Event()
    with routers(SmallRouter(book, hold=hold)) as addresses, connect(addresses) as client:
        events = client.generate("hello", max_tokens=2)
        while not isinstance(next(events), Tokens):
            pass
        client.close()
        with pytest.raises(UnavailableError, match="the client is closed"):
            list(events)
        for ask in SHORT_CALLS:
            with pytest.raises(UnavailableError, match="the client is closed"):
                ask(client)
        hold.set()


def test_a_client_that_is_closed_as_a_call_begins_says_so(book: Book) -> None:
    clients: list[Client] = []

    def token() -> str:
        clients[-1].close()
        return "word"

    with routers(SmallRouter(book)) as addresses:
        for ask in (*SHORT_CALLS, lambda client: client.text("hello")):
            clients.append(Client(addresses, token=token))
            with pytest.raises(UnavailableError, match="the client is closed"):
                ask(clients[-1])
    assert not book.requests


def lost_to_a_busy_router(book: Book) -> list[SmallRouter]:
    """Routers whose client comes back after 8 s only."""
    busy = OverloadedError("queue full", retry_after_s=8.0)
    return [SmallRouter(book, die_at=1), SmallRouter(book, fail=busy)]


def test_a_client_that_is_closed_ends_a_stream_that_waits_to_come_back(book: Book) -> None:
    ended: list[BatonError] = []
    with routers(*lost_to_a_busy_router(book)) as addresses, Client(addresses) as client:

        def read() -> None:
            with pytest.raises(UnavailableError, match="the client is closed") as caught:
                client.text("hello")
            ended.append(caught.value)

        reading = threading.Thread(target=read)
        reading.start()
        while len(book.requests) < 2:
            time.sleep(0.005)
        client.close()
        reading.join(4.0)
        assert ended
        reading.join()


async def test_an_async_client_that_is_closed_ends_it_likewise(book: Book) -> None:
    with routers(*lost_to_a_busy_router(book)) as addresses:
        async with AsyncClient(addresses) as client:
            reading = asyncio.create_task(client.text("hello"))
            while len(book.requests) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await client.close()
            with pytest.raises(UnavailableError, match="the client is closed"):
                await asyncio.wait_for(reading, 4.0)


ALL_ERRORS = [  # but for what sends a request elsewhere (test_client_failover)
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BatonError) and kind is not ShuttingDownError
]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_errors_arrive_as_they_were_raised(
    book: Book, connect: Connect, kind: type[BatonError]
) -> None:
    error = kind("what happened", field="stop[1]", retry_after_s=1.5)
    with routers(SmallRouter(book, fail=error)) as addresses, connect(addresses) as client:
        for ask in (lambda client: list(client.generate("hello")), *SHORT_CALLS):
            with pytest.raises(BatonError) as caught:
                ask(client)
            assert type(caught.value) is kind
            assert caught.value.message == "what happened"
            assert caught.value.field == "stop[1]"
            assert caught.value.retry_after_s == pytest.approx(1.5)
    assert len(book.requests) == 1  # an answer is not asked for again
