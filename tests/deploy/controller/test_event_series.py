"""What happens again is counted; what happens in a loop is not written each time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from deploy.controller.kit.events import Event, EventSeries, EventType, event_of

_START = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def series() -> EventSeries:
    return EventSeries()


def happened(
    reason: str = "Drained", message: str = "so it is", at_s: float = 0.0, **metadata: str
) -> Event:
    named = {"namespace": "n", "name": "decode", "uid": "u1"} | metadata
    about = {"apiVersion": "baton.dev/v1alpha1", "kind": "WorkerPool", "metadata": named}
    at = _START + timedelta(seconds=at_s)
    return event_of(about, EventType.NORMAL, reason, message, "baton-operator", at)


def test_what_happens_again_raises_the_count_of_its_event(series: EventSeries) -> None:
    first, again = series.note(happened(), 0.0), series.note(happened(at_s=5), 5.0)
    assert first is not None
    assert again == first | {"count": 2, "lastTimestamp": "2030-01-01T00:00:05Z"}
    assert again["firstTimestamp"] == "2030-01-01T00:00:00Z"
    others = [happened(message="other"), happened("Other"), happened(uid="u2")]
    written = [series.note(event, 6.0) for event in others]
    assert [event["count"] for event in written if event is not None] == [1, 1, 1]


def test_a_loop_is_held_back_but_counted_and_crowds_out_nothing_else(series: EventSeries) -> None:
    written = [series.note(happened("Failed"), i * 0.1) for i in range(100)]
    assert sum(event is not None for event in written) == 10
    assert series.note(happened("Drained"), 10.0) is not None
    assert series.note(happened("Failed", uid="u2"), 10.0) is not None
    later = series.note(happened("Failed"), 100.0)
    assert later is not None
    assert later["count"] == 101


def test_a_loop_with_ever_new_messages_is_held_back_too(series: EventSeries) -> None:
    written = [series.note(happened("Failed", f"no {i}"), 0.0) for i in range(100)]
    assert sum(event is not None for event in written) == 10


def test_namespace_name_and_message_are_such_as_a_server_takes() -> None:
    assert happened(namespace="")["metadata"]["namespace"] == "default"
    event = happened(message="x" * 5000, name="y" * 253)
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["message"]) == 1024


def test_what_was_used_longest_ago_is_forgotten(series: EventSeries) -> None:
    for uid in ("first", *map(str, range(5000)), "first"):
        event = series.note(happened(uid=uid), 0.0)
    assert event is not None
    assert event["count"] == 1
