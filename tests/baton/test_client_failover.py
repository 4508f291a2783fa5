"""Both clients before several routers over real gRPC, of which some die, leave or are silent.

Every case runs over `Client` and over `AsyncClient`.
"""

from __future__ import annotations

import threading

import pytest

import baton.client.client as client_module
from baton.client.events import Event, Tokens
from baton.client.request_stream import build_request
from baton.errors import DeadlineError, UnavailableError
from tests.baton.both_clients import (
    SHORT_CALLS,
    Connect,
    free_address,
    indices_of,
    routers,
    text_of,
)
from tests.baton.proxied import proxied
from tests.baton.small_router import Book, SmallRouter, answer, silent_address
from tests.router.proxy import Proxy


@pytest.mark.parametrize(
    ("seed", "deaths"),
    [(None, [4]), (11, [4]), (None, [0, 3, 5])],
    ids=["drawn", "given", "thrice"],
)
def test_a_request_outlives_its_routers_without_losing_or_repeating_a_token(
    book: Book, connect: Connect, seed: int | None, deaths: list[int]
) -> None:
    options = {} if seed is None else {"seed": seed}
    dying = [SmallRouter(book, die_at=index) for index in deaths]
    with routers(*dying, SmallRouter(book)) as addresses, connect(addresses) as client:
        events = list(client.generate("hello", max_tokens=9, **options))
    (used,) = book.seeds.values()
    assert indices_of(events) == list(range(9))
    assert text_of(events) == answer(used, 9)
    first, *others = book.requests
    assert not first.HasField("resume_from_index")
    assert [request.resume_from_index for request in others] == deaths
    assert {(request.request_id, request.seed) for request in others} == {(first.request_id, used)}


def test_a_request_leaves_a_router_whose_host_hangs(
    book: Book, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    options = [(name, 200 if name in quick else n) for name, n in client_module._CHANNEL_OPTIONS]
    monkeypatch.setattr(client_module, "_CHANNEL_OPTIONS", options)
    until_its_end = threading.Event()
    hung, next_one = SmallRouter(book, hold=until_its_end), SmallRouter(book)
    with (
        routers(hung, next_one) as (_, second),
        proxied(hung.address) as (first, then),
        connect([first, second]) as client,
    ):
        events: list[Event] = []
        for event in client.generate("hello", max_tokens=5, timeout_s=20):
            events.append(event)
            if isinstance(event, Tokens) and event.index == 4:
                then(Proxy.freeze)
        until_its_end.set()
    assert indices_of(events) == list(range(5))
    assert [request.resume_from_index for request in book.requests] == [0, 5]


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


def test_an_address_without_a_router_is_reported_at_once(connect: Connect) -> None:
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
            assert (
                client.explain(build_request("hello")).candidates[0].prefill_worker == "prefill-0"
            )
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


def test_a_servers_own_deadline_is_not_taken_for_silence(book: Book, connect: Connect) -> None:
    late = SmallRouter(book, fail=DeadlineError("too late"))
    with (
        routers(late, SmallRouter(book)) as addresses,
        connect(addresses) as client,
        pytest.raises(DeadlineError, match="too late"),
    ):
        client.tokenize("the fox")
