"""Keys to be worked on: never two workers on one, none forgotten."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.pacing import Backoff
from deploy.controller.kit.errors import UnreachableError, status_error
from deploy.controller.kit.workqueue import Reconcile, Workers, WorkQueue

_TIMEOUT_S = 10.0
_SHORT = Backoff(first_s=0.01, longest_s=0.01)
_AGAIN = re.compile(r"test: (\w+): .*again in ([0-9.]+) s")


@contextlib.contextmanager
def working(queue: WorkQueue[Any], reconcile: Reconcile[Any], *args: Any) -> Iterator[None]:
    """Workers on the queue, one if nothing is said, that have ended with the block."""
    workers = Workers(queue, reconcile, *(args or (1,)), name="test")
    workers.start()
    yield
    assert workers.stop(_TIMEOUT_S)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(clock: ManualClock) -> WorkQueue[str]:
    return WorkQueue(Backoff(first_s=1.0, longest_s=8.0), clock.now_s)


def test_a_key_added_twice_waits_once_and_the_one_that_has_waited_longest_comes_first(
    clock: ManualClock, queue: WorkQueue[str]
) -> None:
    for key in ("b", "a", "b"):
        queue.add(key)
        clock.advance(1)
    assert (queue.take(), queue.take(), len(queue)) == ("b", "a", 0)


def test_a_key_added_while_it_is_worked_on_comes_again_after_the_end(
    clock: ManualClock, queue: WorkQueue[str]
) -> None:
    queue.add("a")
    assert queue.take() == "a"
    queue.add("a")
    clock.advance(1)
    queue.add("b")
    assert (queue.take(), len(queue)) == ("b", 1)
    queue.succeeded("a", again_after_s=30.0)
    assert (queue.take(), len(queue)) == ("a", 0), "the earliest time counts"
    queue.succeeded("a")
    clock.advance(100)
    assert len(queue) == 0, "one key waits for one time"


def test_no_sequence_of_calls_gives_a_key_to_two_or_forgets_one(
    clock: ManualClock, queue: WorkQueue[str]
) -> None:
    rng, owed, under_way = random.Random(7), set[str](), set[str]()
    for _ in range(5000):
        key = rng.choice("abcde")
        match rng.randrange(3):
            case 0:
                queue.add(key)
                owed.add(key)
            case 1 if owed - under_way:
                taken = queue.take()
                assert taken is not None
                assert taken in owed - under_way
                owed.remove(taken)
                under_way.add(taken)
            case 2 if under_way:
                queue.succeeded(under_way.pop())
        clock.advance(1)
        assert len(queue) == len(owed)


def test_a_failing_key_comes_back_later_and_later_until_it_succeeds(
    clock: ManualClock, queue: WorkQueue[str]
) -> None:
    queue.add("a")
    delays = []
    for _ in range(6):
        assert queue.take() == "a"
        delay_s = queue.failed("a")
        delays.append(delay_s)
        clock.advance(delay_s - 0.01)
        assert len(queue) == 0
        clock.advance(0.02)
        assert len(queue) == 1
    for full_s, delay_s in zip((1, 2, 4, 8, 8, 8), delays, strict=True):
        assert full_s / 2 <= delay_s <= full_s
    assert queue.take() == "a"
    queue.succeeded("a")
    queue.add("a")
    assert queue.take() == "a"
    assert queue.failed("a") <= 1, "its failures are forgotten"


def test_delays_after_failures_are_not_all_the_same() -> None:
    assert len({Backoff(1.0, 8.0, num_failures=3).next_s() for _ in range(10)}) == 10
    assert Backoff(1.0, 8.0, num_failures=10_000).next_s() <= 8.0


def test_workers_work_on_many_keys_at_once_and_on_each_alone() -> None:
    queue: WorkQueue[int] = WorkQueue()
    both_inside = threading.Barrier(2)
    inside: set[int] = set()
    finished = threading.Event()
    rounds: Counter[int] = Counter()

    def reconcile(key: int) -> float | None:
        assert key not in inside
        inside.add(key)
        rounds[key] += 1
        if rounds[key] == 1:
            both_inside.wait(_TIMEOUT_S)
            queue.add(key)
        inside.remove(key)
        if rounds == {1: 2, 2: 2}:
            finished.set()
        return None

    with working(queue, reconcile, 3):
        queue.add(1)
        queue.add(2)
        assert finished.wait(_TIMEOUT_S)
    assert rounds == {1: 2, 2: 2}


def test_a_reconcile_may_ask_to_look_again_later() -> None:
    queue: WorkQueue[str] = WorkQueue()
    looked_twice = threading.Event()
    num_looks = 0

    def reconcile(key: str) -> float | None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            looked_twice.set()
            return None
        return 0.01

    with working(queue, reconcile):
        queue.add("a")
        assert looked_twice.wait(_TIMEOUT_S)


@pytest.mark.parametrize("refusal", [UnreachableError("gone"), ValueError("another bug")])
def test_what_a_reconcile_should_never_raise_is_reported_before_its_key_comes_back(
    refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    queue: WorkQueue[str] = WorkQueue(_SHORT)
    steps: list[str] = []
    has_succeeded = threading.Event()
    failures: list[Exception] = [ValueError("a bug"), UnreachableError("no bug")]

    def reconcile(key: str) -> float | None:
        steps.append("reconcile")
        if failures:
            raise failures.pop()
        has_succeeded.set()
        return None

    def report_fault(key: str, error: Exception) -> None:
        steps.append(f"{key}: {error}")
        raise refusal

    workers = Workers(queue, reconcile, 1, "test", report_fault)
    workers.start()
    queue.add("a")
    assert has_succeeded.wait(_TIMEOUT_S)
    assert workers.stop(_TIMEOUT_S)
    assert steps == ["reconcile", "reconcile", "a: a bug", "reconcile"]
    assert "Traceback" in caplog.text


def test_a_server_that_wants_to_be_left_alone_is(caplog: pytest.LogCaptureFixture) -> None:
    queue: WorkQueue[str] = WorkQueue(_SHORT)
    throttled = threading.Event()

    def reconcile(key: str) -> float | None:
        throttled.set()
        raise status_error({"code": 429, "details": {"retryAfterSeconds": 60}}, "GET /")

    with working(queue, reconcile):
        queue.add("a")
        assert throttled.wait(_TIMEOUT_S)
    assert "again in 60.0 s" in caplog.text


def test_what_is_refused_for_long_is_looked_at_again_within_seconds_and_a_fault_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of one that is refused a part all else is done: the planner and rollouts go by looks."""
    queue: WorkQueue[str] = WorkQueue(Backoff(first_s=600.0, longest_s=600.0))
    errors = {"refused": UnreachableError("gone"), "faulty": ValueError("a bug")}
    looks = {key: threading.Event() for key in errors}

    def reconcile(key: str) -> float | None:
        looks[key].set()
        raise errors[key]

    with working(queue, reconcile):
        for key, has_looked in looks.items():
            queue.add(key)
            assert has_looked.wait(_TIMEOUT_S)
    delays_s = {key: float(s) for key, s in _AGAIN.findall(caplog.text)}
    assert delays_s["refused"] <= 5.0
    assert delays_s["faulty"] >= 300.0


def test_a_stop_lets_the_key_under_way_end_and_begins_no_other() -> None:
    queue: WorkQueue[str] = WorkQueue()
    begun, may_end = threading.Event(), threading.Event()
    ended: list[str] = []

    def reconcile(key: str) -> float | None:
        begun.set()
        assert may_end.wait(_TIMEOUT_S)
        ended.append(key)
        return None

    workers = Workers(queue, reconcile, num_workers=1, name="test")
    workers.start()
    queue.add("a")
    queue.add("b")
    assert begun.wait(_TIMEOUT_S)
    assert not workers.stop(timeout_s=0.02), "one that does not end is not waited for for ever"
    may_end.set()
    assert workers.stop(_TIMEOUT_S)
    assert ended == ["a"]
