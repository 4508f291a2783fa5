"""Both clients before several routers over real gRPC, of which some die, leave or are silent: where
a request goes on, and where it is aborted.

Every case runs over `Client` and over `AsyncClient`.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

import baton.client.client as client_module
from baton.client.events import Event, Tokens
from baton.client.request_stream import build_request
from baton.errors import (
    BatonError,
    DeadlineError,
    NotFoundError,
    OverloadedError,
    ShuttingDownError,
    UnavailableError,
)
from baton.v1 import router_pb2
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


# --- routers that shut down in good order ---------------------------------------------------------

# They still listen, finish what they have, and send new requests elsewhere.


REFUSED = ShuttingDownError("the router is shutting down", has_begun=False, retry_after_s=1.0)
LEFT = ShuttingDownError("the router is shutting down", has_begun=True)


def test_a_request_goes_to_the_next_router_and_so_do_those_after_it(
    book: Book, connect: Connect
) -> None:
    leaving, staying = SmallRouter(book, fail=REFUSED), SmallRouter(book)
    with routers(leaving, staying) as addresses, connect(addresses) as client:
        for _ in range(2):
            assert indices_of(list(client.generate("hello", max_tokens=3))) == [0, 1, 2]
    assert len(book.requests) == 3  # the second one began where the first one ended
    assert not any(request.HasField("resume_from_index") for request in book.requests)


def test_what_a_leaving_router_still_ends_well_makes_nobody_ask_it_first_again(
    book: Book, connect: Connect
) -> None:
    hold = threading.Event()
    leaving, staying = SmallRouter(book, hold=hold), SmallRouter(book)
    with routers(leaving, staying) as addresses, connect(addresses) as client:
        kept = client.generate("hello", max_tokens=3)
        events = [next(kept)]
        leaving.fail = REFUSED
        client.text("hello", max_tokens=3, request_id="second")
        hold.set()
        events += kept
        client.text("hello", max_tokens=3, request_id="third")
    assert indices_of(events) == [0, 1, 2]
    assert [request.request_id for request in book.requests][1:] == ["second", "second", "third"]


def test_a_request_that_its_router_had_begun_is_asked_for_again_not_begun_anew(
    book: Book, connect: Connect
) -> None:
    leaving, staying = SmallRouter(book, fail=LEFT), SmallRouter(book)
    with routers(leaving, staying) as addresses, connect(addresses) as client:
        assert indices_of(list(client.generate("hello", max_tokens=3))) == [0, 1, 2]
    first, second = book.requests
    assert second.request_id == first.request_id
    assert (second.HasField("resume_from_index"), second.resume_from_index) == (True, 0)


def test_a_request_waits_for_a_router_that_stays_no_longer_than_it_may(
    book: Book, connect: Connect
) -> None:
    leaving = SmallRouter(book, fail=REFUSED), SmallRouter(book, fail=REFUSED)
    with (
        routers(*leaving) as addresses,
        connect(addresses, reconnect_within_s=0.3) as client,
        pytest.raises(UnavailableError, match=r"shuts down, and none at .* within 0.3 s"),
    ):
        list(client.generate("hello"))
    assert len(book.requests) >= 3


def test_one_address_of_several_routers_leads_to_another_while_the_first_ends_what_it_has(
    book: Book, connect: Connect
) -> None:
    hold = threading.Event()
    leaving = SmallRouter(book, hold=hold, aborts_its_own_only=True)
    staying = SmallRouter(book, aborts_its_own_only=True)
    with (
        routers(leaving, staying),
        proxied(leaving.address) as (address, then),
        connect(address) as client,
    ):
        kept, left = (client.generate("hello", max_tokens=3) for _ in range(2))
        events = [next(kept)]
        assert not isinstance(next(left), Tokens)
        leaving.fail = REFUSED
        then(lambda proxy: Proxy.lead_to(proxy, staying.address))
        again = client.generate("hello", max_tokens=3, request_id="again")
        assert indices_of(list(again)) == [0, 1, 2]
        leaving.fail = None  # it would refuse the abort, too
        left.close()
        hold.set()
        events += kept
    assert indices_of(events) == [0, 1, 2]
    assert [request.request_id for request in book.requests].count("again") == 2
    assert len(leaving.aborted) == 1
    assert not staying.aborted


# --- aborts ---------------------------------------------------------------------------------------


class BusyRouter(SmallRouter):
    """It looks for no request, and ends any that it is asked to."""

    def Abort(self, request: router_pb2.AbortRequest, context: Any) -> router_pb2.AbortResponse:  # noqa: N802
        self.fail = None
        return super().Abort(request, context)


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


@pytest.mark.parametrize("num_seen", [0, 1])
def test_a_request_that_busy_routers_do_not_look_for_is_aborted(
    book: Book, connect: Connect, num_seen: int
) -> None:
    """It runs on at its worker."""
    too_late = OverloadedError("the line is full", retry_after_s=60.0)
    dying, busy = SmallRouter(book, die_at=num_seen), BusyRouter(book, fail=too_late)
    with (
        routers(dying, busy) as addresses,
        connect(addresses) as client,
        pytest.raises(OverloadedError),
    ):
        list(client.generate("hello", request_id="left"))
    assert book.aborted == ["left"]


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
