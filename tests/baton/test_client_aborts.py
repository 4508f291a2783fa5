"""Which requests both clients abort, and at which router; over real gRPC.

Every case runs over `Client` and over `AsyncClient`.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from baton.client.events import Event, Tokens
from baton.errors import BatonError, NotFoundError, OverloadedError, UnavailableError
from baton.v1 import router_pb2
from tests.baton.both_clients import Connect, routers
from tests.baton.small_router import Book, SmallRouter


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
