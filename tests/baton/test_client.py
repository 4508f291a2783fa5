"""Both clients against routers over real gRPC: events, errors, and routers that die.

Every case runs over `Client` and over `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from baton import errors
from baton.client import AsyncClient, Client
from baton.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.events import Event, Finished, FinishReason, HandedOff, Prefilled, Routed, Tokens
from baton.request_stream import RequestStream, build_request
from baton.v1.router_pb2 import GenerateResponse
from baton.v1.router_pb2 import Tokens as TokensMessage
from tests.baton.small_router import Book, SmallRouter, answer, silent_address


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


@pytest.fixture(params=[Client, LoopedClient], ids=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Makes a client of the kind under test."""
    kind: Connect = request.param
    return kind


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


@pytest.mark.parametrize("seed", [None, 11])
def test_a_request_outlives_its_router_without_losing_or_repeating_a_token(
    book: Book, connect: Connect, seed: int | None
) -> None:
    options = {} if seed is None else {"seed": seed}
    dying, next_one = SmallRouter(book, die_at=4), SmallRouter(book)
    with routers(dying, next_one) as addresses, connect(addresses) as client:
        events = list(client.generate("hello", max_tokens=9, **options))
    (used,) = book.seeds.values()
    assert indices_of(events) == list(range(9))
    assert text_of(events) == answer(used, 9)
    first, second = book.requests
    assert (second.request_id, second.seed) == (first.request_id, used)
    assert second.resume_from_index == 4
    assert not first.HasField("resume_from_index")


def test_a_request_outlives_router_after_router(book: Book, connect: Connect) -> None:
    dying = [SmallRouter(book, die_at=index) for index in (0, 3, 5)]
    with routers(*dying, SmallRouter(book)) as addresses, connect(addresses) as client:
        events = list(client.generate("hello", max_tokens=8))
    (used,) = book.seeds.values()
    assert indices_of(events) == list(range(8))
    assert text_of(events) == answer(used, 8)


def test_one_address_may_come_back_under_a_new_router(book: Book, connect: Connect) -> None:
    dying = SmallRouter(book, die_at=2)
    port = int(dying.address.rpartition(":")[2])
    reborn: list[SmallRouter] = []
    with connect(dying.address) as client:
        events: list[Event] = []
        for event in client.generate("hello", max_tokens=5):
            events.append(event)
            if isinstance(event, Tokens) and event.index == 1:
                dying.stop()
                reborn.append(SmallRouter(book, port=port))
    reborn[0].stop()
    assert indices_of(events) == list(range(5))


def test_a_router_that_stays_away_is_given_up_within_the_bound(
    book: Book, connect: Connect
) -> None:
    with (
        routers(SmallRouter(book, die_at=2)) as addresses,
        connect(addresses, reconnect_within_s=0.3) as client,
        pytest.raises(UnavailableError, match=r"took request .* over within 0.3 s"),
    ):
        list(client.generate("hello"))


def test_an_address_without_a_router_is_told_at_once(connect: Connect) -> None:
    address = free_address()
    with connect(address) as client, pytest.raises(UnavailableError, match=address):
        list(client.generate("hello"))


def test_every_call_goes_to_the_first_router_that_answers(book: Book, connect: Connect) -> None:
    with routers(SmallRouter(book)) as addresses:
        for ask in SHORT_CALLS:
            with connect([free_address(), *addresses]) as client:
                ask(client)
        with connect([free_address(), *addresses]) as client:
            assert client.text("hello", seed=1) == answer(1, 6)
            client.abort("mine", tenant="t")
            assert client.tokenize("the fox") == [0, 1]
            assert [model.name for model in client.models()] == ["demo"]
            assert client.explain(build_request("hello"))[0].prefill_worker == "prefill-0"
            assert client.fleet().pools[0].name == "decode"
    assert book.aborted == ["any", "mine"]


def test_a_router_that_is_silent_or_shuts_down_is_passed_over(book: Book, connect: Connect) -> None:
    leaving = SmallRouter(book, fail=UnavailableError("shutting down"))
    with (
        silent_address() as silent,
        routers(leaving, SmallRouter(book)) as addresses,
        connect([silent, *addresses], call_timeout_s=0.3) as client,
    ):
        assert client.tokenize("the fox") == [0, 1]
    with silent_address() as silent, connect(silent, call_timeout_s=0.1) as client:
        for ask in SHORT_CALLS:
            with pytest.raises(UnavailableError, match=rf"no answer from {silent} within 0.1 s"):
                ask(client)


def test_a_servers_own_word_that_time_is_over_is_not_taken_for_silence(
    book: Book, connect: Connect
) -> None:
    late = SmallRouter(book, fail=DeadlineError("too late"))
    with (
        routers(late, SmallRouter(book)) as addresses,
        connect(addresses) as client,
        pytest.raises(DeadlineError, match="too late"),
    ):
        client.tokenize("the fox")


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


ALL_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BatonError)
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


def test_leaving_a_stream_early_aborts_its_request(book: Book, connect: Connect) -> None:
    hold = threading.Event()
    with routers(SmallRouter(book, hold=hold)) as addresses, connect(addresses) as client:
        events = client.generate("hello", request_id="left")
        for event in events:
            if isinstance(event, Tokens):
                break
        events.close()
        hold.set()
    assert book.aborted == ["left"]


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "gap"])
def test_a_request_that_is_not_read_to_its_end_is_aborted_at_its_own_router(
    book: Book, connect: Connect, leaves: bool
) -> None:
    """It was begun at one that died, and another call has made the first one preferred again."""
    hold = threading.Event()
    dying = SmallRouter(book, die_at=2)
    other = SmallRouter(book, aborts_its_own_only=True)
    own = SmallRouter(book, hold=hold, aborts_its_own_only=True, skip=None if leaves else 4)
    with routers(dying, own, other) as addresses, connect(addresses) as client:
        events = client.generate("hello", request_id="left", max_tokens=6)
        seen: list[Event] = []
        while not (isinstance(event := next(events), Tokens) and event.index == 3):
            seen.append(event)
        own.fail = UnavailableError("busy")
        assert client.tokenize("the fox") == [0, 1]  # the other one is asked first from now on
        own.fail = None
        if leaves:
            events.close()
        else:
            with pytest.raises(BatonError, match="tokens 4 to 4 of request left are missing"):
                list(events)
        hold.set()
    assert book.aborted == ["left"]
    assert own.aborted == ["left"]


def test_an_abort_goes_on_to_the_router_that_knows_the_request(
    book: Book, connect: Connect
) -> None:
    hold = threading.Event()
    other = SmallRouter(book, aborts_its_own_only=True)
    own = SmallRouter(book, hold=hold, aborts_its_own_only=True)
    with routers(other, own) as addresses, connect(addresses[1]) as asking:
        events = asking.generate("hello", request_id="mine")
        next(events)
        with connect(addresses) as client:
            client.abort("mine")
            with pytest.raises(NotFoundError):
                client.abort("nobody's")
        assert own.aborted == ["mine"]
        hold.set()
        list(events)


def test_a_router_that_is_overloaded_says_when_to_come_back(book: Book, connect: Connect) -> None:
    error = OverloadedError("queue full", retry_after_s=0.25)
    with (
        routers(SmallRouter(book, fail=error)) as addresses,
        connect(addresses) as client,
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
        ({"prompt": "a", "timeout_s": "5"}, "timeout_s"),
        ({"prompt": "a", "timeout_s": None}, "timeout_s"),
        ({"prompt": "a", "timeout_s": True}, "timeout_s"),
        ({"prompt": "a", "timeout_s": -3}, "timeout_s"),
        ({"prompt": "a", "timeout_s": 0}, "timeout_s"),
        ({"prompt": "a", "timeout_s": float("inf")}, "timeout_s"),
        ({"prompt": "a", "timeout_s": float("nan")}, "timeout_s"),
        ({"prompt": "a", "timeout_s": 1e9}, "timeout_s"),
        ({"prompt": "a", "sampling": {}}, "sampling"),
        ({"prompt": "a", "text": "b"}, "text"),
        ({"prompt": "a", "resume_from_index": 1}, "resume_from_index"),
        ({"prompt": "a", "stop": "END"}, "stop"),
        ({"prompt": "a", "temperature": None}, "temperature"),
        ({"prompt": "a", "chat": ["x"]}, "prompt"),
        ({"chat": ["hello"]}, "prompt"),
        ({"chat": 3}, "prompt"),
        ({"chat": [{"role": "user", "content": None}]}, "prompt"),
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
