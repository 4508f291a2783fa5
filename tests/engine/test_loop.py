"""The engine's thread: commands between steps, events after them, and how it ends."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import pytest

from engine.api import Engine
from engine.errors import EngineStoppedError, InvalidRequestError, UnknownRequestError
from engine.loop import EngineThread
from engine.request import EngineEvent, RequestId, RequestSpec, SampledToken, StepPlan, TokenEvent
from engine.run.core import build_engine
from tests.engine.fakes import FakeEngine, Streams, alone, fake_config, prompt, spec_of

WAIT_S = 20.0


class Collected:
    """Events of an engine thread; `done` is set when so many requests have finished."""

    def __init__(self, num_requests: int) -> None:
        self.streams = Streams()
        self.threads: set[int] = set()
        self.done = threading.Event()
        self._num_requests = num_requests

    def __call__(self, events: list[EngineEvent]) -> None:
        self.threads.add(threading.get_ident())
        self.streams.take(events)
        if len(self.streams.finished) == self._num_requests:
            self.done.set()


def test_requests_from_many_threads_are_all_served_on_the_engines_own() -> None:
    collected = Collected(12)
    thread = EngineThread(FakeEngine(fake_config()).core, collected)
    thread.start()
    specs = [spec_of(str(n), prompt(10 * n + 1)) for n in range(12)]

    def add(engine: Engine, spec: RequestSpec) -> None:
        engine.add(spec)

    def submit(part: int) -> None:
        for spec in specs[part::3]:
            thread.call(partial(add, spec=spec)).result(WAIT_S)

    callers = [threading.Thread(target=submit, args=(part,)) for part in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert collected.done.wait(WAIT_S)
    thread.call(lambda engine: engine.check_integrity()).result(WAIT_S)
    thread.stop()
    assert len(collected.threads) == 1
    assert threading.get_ident() not in collected.threads
    for spec in specs:
        assert collected.streams.tokens[spec.request_id] == alone(spec)
    assert thread.num_steps >= 24
    assert not thread.runnable
    assert thread.error is None


def test_a_refusal_is_its_callers_alone() -> None:
    thread = EngineThread(FakeEngine(fake_config()).core, lambda events: None)
    thread.start()
    refused = thread.call(lambda engine: engine.add(spec_of("r", prompt(0))))
    with pytest.raises(InvalidRequestError):
        refused.result(WAIT_S)
    thread.post(lambda engine: engine.admit(RequestId("nobody"), SampledToken(1)))
    with pytest.raises(UnknownRequestError):
        thread.call(lambda e: e.admit(RequestId("nobody"), SampledToken(1))).result(WAIT_S)
    assert thread.call(lambda engine: engine.load().num_waiting).result(WAIT_S) == 0
    thread.stop()


def test_commands_run_in_order_and_before_the_step() -> None:
    thread = EngineThread(FakeEngine(fake_config()).core, lambda events: None)
    order: list[int] = []
    for number in range(5):
        thread.post(lambda engine, number=number: order.append(number))  # type: ignore[misc]
    last = thread.call(lambda engine: order.append(5))
    thread.start()
    last.result(WAIT_S)
    thread.stop()
    assert order == [0, 1, 2, 3, 4, 5]


class BrokenRunner:
    """A device that fails in its first step."""

    def __init__(self, entered: threading.Event, go: threading.Event) -> None:
        engine = FakeEngine(fake_config())
        self.model, self.num_blocks = engine.model, 400
        self.entered, self.go = entered, go

    def run(self, plan: StepPlan, specs: object, *rest: object) -> list[SampledToken]:
        self.entered.set()
        assert self.go.wait(WAIT_S)
        raise OSError("the device is gone")

    def close(self) -> None:
        pass


def test_a_step_that_fails_ends_the_thread_and_every_future(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, go, fatal = threading.Event(), threading.Event(), Future[BaseException]()
    engine = FakeEngine(fake_config())
    core = build_engine(engine.config, BrokenRunner(entered, go), engine.sink)  # type: ignore[arg-type]
    thread = EngineThread(core, lambda events: None, fatal.set_result)
    thread.start()
    thread.call(lambda engine: engine.add(spec_of("r", prompt(4)))).result(WAIT_S)
    assert entered.wait(WAIT_S)
    assert thread.runnable
    waiting = thread.call(lambda engine: engine.load())
    go.set()
    with pytest.raises(EngineStoppedError, match="the device is gone"):
        waiting.result(WAIT_S)
    assert isinstance(fatal.result(WAIT_S), OSError)
    with pytest.raises(EngineStoppedError, match="the device is gone"):
        thread.call(lambda engine: engine.load()).result(WAIT_S)
    thread.stop()
    assert isinstance(thread.error, OSError)
    assert not thread.runnable
    assert "cannot go on" in caplog.text


def test_a_command_with_a_bug_is_fatal_and_fails_its_future() -> None:
    fatal = Future[BaseException]()
    thread = EngineThread(FakeEngine(fake_config()).core, lambda events: None, fatal.set_result)
    thread.start()

    def bug(engine: Engine) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        thread.call(bug).result(WAIT_S)
    assert isinstance(fatal.result(WAIT_S), ZeroDivisionError)
    thread.stop()


def test_stop_is_prompt_idempotent_and_fails_what_comes_later() -> None:
    first_token = threading.Event()

    def on_events(events: list[EngineEvent]) -> None:
        if any(isinstance(event, TokenEvent) for event in events):
            first_token.set()

    thread = EngineThread(FakeEngine(fake_config()).core, on_events)
    thread.start()
    thread.call(lambda engine: engine.add(spec_of("r", prompt(900)))).result(WAIT_S)
    assert first_token.wait(WAIT_S)
    thread.stop()
    thread.stop()
    with pytest.raises(EngineStoppedError):
        thread.call(lambda engine: engine.load()).result(WAIT_S)
    never_started = EngineThread(FakeEngine(fake_config()).core, on_events)
    pending = never_started.call(lambda engine: engine.load())
    never_started.stop()
    with pytest.raises(EngineStoppedError):
        pending.result(WAIT_S)


def test_progress_is_measured_on_the_given_clock_and_idleness_is_no_lack_of_it() -> None:
    now = [100.0]
    done = threading.Event()
    thread = EngineThread(
        FakeEngine(fake_config()).core, lambda events: done.set(), clock=lambda: now[0]
    )
    assert thread.last_step_at == 100.0
    now[0] = 500.0
    thread.start()
    thread.call(lambda engine: engine.add(spec_of("r", prompt(4)))).result(WAIT_S)
    assert done.wait(WAIT_S)
    thread.stop()
    assert thread.last_step_at == 500.0
    assert thread.num_steps >= 1


def test_an_engine_that_is_only_asked_things_has_no_step_to_be_late_with() -> None:
    thread = EngineThread(FakeEngine(fake_config()).core, lambda events: None)
    idle: list[bool] = []
    asked_often = threading.Event()

    def ask(engine: Engine) -> None:
        """Asks again before it has ended: the thread never finds its queue empty."""
        if not engine.has_work():
            idle.append(thread.runnable)
        if len(idle) < 3:
            thread.post(ask)
        else:
            asked_often.set()

    thread.post(lambda engine: engine.add(spec_of("r", prompt(5))))
    thread.post(ask)
    thread.start()
    assert asked_often.wait(WAIT_S)
    thread.stop()
    assert idle[1:] == [False, False]
