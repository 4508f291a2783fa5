"""Clients against a router over real gRPC: events, errors, and routers that die."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from baton import errors
from baton.client import AsyncClient, Client
from baton.errors import BatonError, InvalidRequestError, OverloadedError, UnavailableError
from baton.events import Event, Finished, FinishReason, HandedOff, Prefilled, Routed, Tokens
from baton.request_stream import RequestStream, build_request
from baton.v1.router_pb2 import GenerateResponse
from baton.v1.router_pb2 import Tokens as TokensMessage
from tests.baton.small_router import Book, SmallRouter, answer


@pytest.fixture
def book() -> Book:
    return Book()


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


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


def indices_of(events: list[Event]) -> list[int]:
    tokens = [event for event in events if isinstance(event, Tokens)]
    return [event.index + offset for event in tokens for offset in range(len(event.ids))]


def test_events_come_typed_and_in_order(book: Book) -> None:
    with routers(SmallRouter(book)) as addresses, Client(addresses) as client:
        events = list(client.generate("hello", max_tokens=3, seed=5))
    assert [type(event) for event in events] == [
        Routed, Prefilled, HandedOff, Tokens, Tokens, Tokens, Finished
    ]  # fmt: skip
    assert text_of(events) == answer(5, 3)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH
    assert finished.usage.num_cached_tokens == 192


async def test_the_asyncio_client_sees_the_same(book: Book) -> None:
    with routers(SmallRouter(book)) as addresses:
        async with AsyncClient(addresses) as client:
            chat = [{"role": "user", "content": "hello"}]
            assert await client.text(chat=chat, max_tokens=4, seed=2) == answer(2, 4)


def test_every_option_reaches_the_router(book: Book) -> None:
    with routers(SmallRouter(book)) as addresses, Client(addresses) as client:
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


@pytest.mark.parametrize("seed", [None, 11])
def test_a_request_outlives_its_router_without_losing_or_repeating_a_token(
    book: Book, seed: int | None
) -> None:
    options = {} if seed is None else {"seed": seed}
    dying, next_one = SmallRouter(book, die_at=4), SmallRouter(book)
    with routers(dying, next_one) as addresses, Client(addresses) as client:
        events = list(client.generate("hello", max_tokens=9, **options))
    (used,) = book.seeds.values()
    assert indices_of(events) == list(range(9))
    assert text_of(events) == answer(used, 9)
    first, second = book.requests
    assert (second.request_id, second.seed) == (first.request_id, used)
    assert second.resume_from_index == 4
    assert not first.HasField("resume_from_index")


async def test_the_asyncio_client_outlives_a_router_too(book: Book) -> None:
    dying = [SmallRouter(book, die_at=index) for index in (0, 3, 5)]
    with routers(*dying, SmallRouter(book)) as addresses:
        async with AsyncClient(addresses) as client:
            events = [event async for event in client.generate("hello", max_tokens=8)]
    (used,) = book.seeds.values()
    assert indices_of(events) == list(range(8))
    assert text_of(events) == answer(used, 8)


def test_one_address_may_come_back_under_a_new_router(book: Book) -> None:
    dying = SmallRouter(book, die_at=2)
    port = int(dying.address.rpartition(":")[2])
    reborn: list[SmallRouter] = []
    with Client(dying.address) as client:
        events: list[Event] = []
        for event in client.generate("hello", max_tokens=5):
            events.append(event)
            if isinstance(event, Tokens) and event.index == 1:
                dying.stop()
                reborn.append(SmallRouter(book, port=port))
    reborn[0].stop()
    assert indices_of(events) == list(range(5))


def test_a_router_that_stays_away_is_given_up_within_the_bound(book: Book) -> None:
    with (
        routers(SmallRouter(book, die_at=2)) as addresses,
        Client(addresses, reconnect_within_s=0.3) as client,
        pytest.raises(UnavailableError, match=r"took request .* over within 0.3 s"),
    ):
        list(client.generate("hello"))


def test_an_address_without_a_router_is_told_at_once() -> None:
    address = free_address()
    with Client(address) as client, pytest.raises(UnavailableError, match=address):
        list(client.generate("hello"))


def test_the_first_router_that_answers_is_used(book: Book) -> None:
    with (
        routers(SmallRouter(book)) as addresses,
        Client([free_address(), *addresses]) as client,
    ):
        assert client.text("hello", seed=1) == answer(1, 6)
        assert client.tokenize("the fox") == [0, 1]
        assert [model.name for model in client.models()] == ["demo"]
        assert client.fleet().pools[0].name == "decode"


ALL_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BatonError)
]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
async def test_errors_arrive_as_they_were_raised(book: Book, kind: type[BatonError]) -> None:
    error = kind("what happened", field="stop[1]", retry_after_s=1.5)
    with routers(SmallRouter(book, fail=error)) as addresses:
        with Client(addresses) as client, pytest.raises(BatonError) as caught:
            list(client.generate("hello"))
        async with AsyncClient(addresses) as asyncio_client:
            with pytest.raises(BatonError) as asyncio_caught:
                await asyncio_client.text("hello")
    for received in (caught.value, asyncio_caught.value):
        assert type(received) is kind
        assert received.message == "what happened"
        assert received.field == "stop[1]"
        assert received.retry_after_s == pytest.approx(1.5)
    assert len(book.requests) == 2  # an answer is not asked for again


def test_leaving_a_stream_early_aborts_its_request(book: Book) -> None:
    hold = threading.Event()
    with routers(SmallRouter(book, hold=hold)) as addresses, Client(addresses) as client:
        events = client.generate("hello", request_id="left")
        for event in events:
            if isinstance(event, Tokens):
                break
        events.close()
        hold.set()
    assert book.aborted == ["left"]


async def test_leaving_an_asyncio_stream_early_aborts_its_request(book: Book) -> None:
    hold = threading.Event()
    with routers(SmallRouter(book, hold=hold)) as addresses:
        async with AsyncClient(addresses) as client:
            async with contextlib.aclosing(client.generate("hello", request_id="left")) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        break
            hold.set()
    assert book.aborted == ["left"]


def test_a_router_that_is_overloaded_says_when_to_come_back(book: Book) -> None:
    error = OverloadedError("queue full", retry_after_s=0.25)
    with (
        routers(SmallRouter(book, fail=error)) as addresses,
        Client(addresses) as client,
        pytest.raises(OverloadedError) as caught,
    ):
        client.text("hello")
    assert caught.value.retry_after_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": [-1]}, "prompt"),
        ({"chat": [{"role": "user"}]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "temprature": 1.0}, "temprature"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_before_it_is_sent(
    arguments: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request(**arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


def tokens(index: int, ids: list[int], text: str) -> GenerateResponse:
    return GenerateResponse(tokens=TokensMessage(index=index, ids=ids, text=text))


def test_a_gap_in_the_stream_is_an_error_and_what_was_seen_is_dropped() -> None:
    stream = RequestStream(build_request("a"), ["nowhere"])
    assert stream.absorb(tokens(0, [5, 6], "ab")) == Tokens(0, (5, 6), "ab")
    assert stream.absorb(tokens(0, [5, 6], "ab")) is None
    assert stream.absorb(tokens(2, [], "tail")) == Tokens(2, (), "tail")
    assert stream.absorb(tokens(2, [], "tail")) is None
    with pytest.raises(BatonError, match="tokens 2 to 2 "):
        stream.absorb(tokens(3, [7], "c"))
