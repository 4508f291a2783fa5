"""What happens again is counted; what happens in a loop is not written each time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from deploy.controller.kit.events import EventSeries, EventType, Occurrence

_START = datetime(2030, 1, 1, tzinfo=UTC)


def happened(
    reason: str = "Drained",
    message: str = "decode-1 has drained",
    at_s: float = 0.0,
    uid: str = "u1",
    namespace: str = "n",
) -> Occurrence:
    about = {"kind": "WorkerPool", "namespace": namespace, "name": "decode", "uid": uid}
    at = _START + timedelta(seconds=at_s)
    return Occurrence(about, EventType.NORMAL, reason, message, at, at_s)


@pytest.fixture
def book() -> EventSeries:
    return EventSeries()


def test_what_happens_again_raises_the_count_of_its_event(book: EventSeries) -> None:
    first = book.note(happened())
    again = book.note(happened(at_s=5))
    assert first is not None
    assert again is first
    event = again.event("baton-operator")
    assert event["count"] == 2
    assert event["firstTimestamp"] == "2030-01-01T00:00:00Z"
    assert event["lastTimestamp"] == "2030-01-01T00:00:05Z"


def test_another_message_reason_or_object_is_another_event(book: EventSeries) -> None:
    occurrences = [happened(), happened(message="other"), happened("Other"), happened(uid="u2")]
    series = [book.note(occurrence) for occurrence in occurrences]
    assert len({one.name for one in series if one is not None}) == 4


def test_a_loop_is_held_back_but_counted(book: EventSeries) -> None:
    written = [book.note(happened("Failed", "no", at_s=i * 0.1)) for i in range(100)]
    assert sum(series is not None for series in written) == 10
    later = book.note(happened("Failed", "no", at_s=100))
    assert later is not None
    assert later.count == 101


def test_a_loop_with_ever_new_messages_is_held_back_too(book: EventSeries) -> None:
    written = [book.note(happened("Failed", f"no {i}")) for i in range(100)]
    assert sum(series is not None for series in written) == 10


def test_a_loop_crowds_out_no_other_reason_and_no_other_object(book: EventSeries) -> None:
    for _ in range(100):
        book.note(happened("Failed", "no"))
    assert book.note(happened("Drained")) is not None
    assert book.note(happened("Failed", "no", uid="u2")) is not None


def test_an_event_of_an_object_without_namespace_is_in_default(book: EventSeries) -> None:
    series = book.note(happened(namespace=""))
    assert series is not None
    assert series.event("baton-operator")["metadata"]["namespace"] == "default"


def test_names_and_messages_keep_to_their_longest(book: EventSeries) -> None:
    occurrence = happened(message="x" * 5000)
    about = {**occurrence.about, "name": "y" * 253}
    series = book.note(Occurrence(about, EventType.WARNING, "R", "x" * 5000, _START, 0.0))
    assert series is not None
    event = series.event("baton-operator")
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["message"]) == 1024


def test_the_book_forgets_what_was_used_longest_ago(book: EventSeries) -> None:
    first = book.note(happened(uid="first"))
    for number in range(5000):
        book.note(happened(uid=f"u{number}"))
    again = book.note(happened(uid="first"))
    assert first is not None
    assert again is not None
    assert again is not first
    assert again.count == 1
