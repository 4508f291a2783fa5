"""Both clients before routers that shut down in good order: these still listen, finish what they
have, and send new requests elsewhere.

Every case runs over `Client` and over `AsyncClient`.
"""

from __future__ import annotations

import threading

import pytest

from baton.client.events import Tokens
from baton.errors import ShuttingDownError, UnavailableError
from tests.baton.both_clients import Connect, indices_of, routers
from tests.baton.proxied import proxied
from tests.baton.small_router import Book, SmallRouter
from tests.router.proxy import Proxy

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
