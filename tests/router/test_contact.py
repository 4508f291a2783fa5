"""When a worker that does not answer is waited for, and when it has been waited for long enough."""

from __future__ import annotations

from baton.clock import ManualClock
from router.fleet.worker_link import Contact

PATIENCE_S = 6.0


def test_a_worker_is_waited_for_while_it_is_connected_and_for_a_while_after() -> None:
    clock = ManualClock(100.0)
    contact = Contact(PATIENCE_S, clock.now_s)
    assert contact.may_be_heard
    contact.begin()
    clock.advance(100.0)
    assert contact.may_be_heard
    contact.end()
    clock.advance(5.9)
    assert contact.may_be_heard
    clock.advance(0.2)
    assert not contact.may_be_heard


def test_connections_that_end_as_they_begin_make_nobody_wait_longer() -> None:
    clock = ManualClock(100.0)
    contact = Contact(PATIENCE_S, clock.now_s)
    contact.begin()
    clock.advance(100.0)
    contact.end()
    waited_s = 0.0
    while contact.may_be_heard:
        clock.advance(0.5)
        waited_s += 0.5
        contact.begin()
        contact.end()
        assert waited_s < 2 * PATIENCE_S
    contact.begin()
    assert not contact.may_be_heard
    clock.advance(1.0)
    assert contact.may_be_heard, "this one lasts"


def test_a_worker_that_comes_back_after_long_is_waited_for_anew() -> None:
    clock = ManualClock(100.0)
    contact = Contact(PATIENCE_S, clock.now_s)
    for lasted_s in (100.0, 0.0):
        contact.begin()
        clock.advance(lasted_s)
        contact.end()
        clock.advance(10.0)
        assert not contact.may_be_heard
    contact.begin()
    assert contact.may_be_heard
    contact.end()
    clock.advance(3.0)
    contact.begin()
    contact.end()
    assert contact.may_be_heard
    clock.advance(3.0)
    assert not contact.may_be_heard
