"""A thread for an engine: commands go in between steps, events come out after each.

1. `start`: the thread waits until there is a command or something to step.
2. It runs the commands that are there in order, then one step, then `on_events`, and repeats.
3. `stop` ends it after the step under way. Commands that have not run fail with
   EngineStoppedError, as do later ones.
4. An exception in a step, in `on_events` or in a command is fatal, unless it is an EngineError: KV
   and requests are in an unknown state. It is logged. Waiting and later futures fail with an
   EngineStoppedError that it caused. Then `on_fatal` is called and the thread ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.api import Engine, EngineHealth
from engine.errors import EngineError, EngineStoppedError
from engine.request import EngineEvent, RequestSpec

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Own the engine's thread. Every public method may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[list[EngineEvent]], None],
        on_fatal: Callable[[BaseException], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_events` and `on_fatal` run on the engine's thread."""
        self._engine = engine
        self._on_events = on_events
        self._on_fatal = on_fatal
        self._clock = clock
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._ended = False  # no command is taken any more
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._num_steps = 0
        self._last_step_at = clock()
        self._runnable = False

    # --- for the heartbeat ----------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def last_step_at(self) -> float:
        """When the last step ended, or there was last nothing to step, on `clock` (monotonic)."""
        return self._last_step_at

    @property
    def health(self) -> EngineHealth:
        """How the running step does, as the engine says."""
        return self._engine.health

    @property
    def runnable(self) -> bool:
        """Whether a step is under way or the engine has work that a step would advance."""
        return self._runnable

    @property
    def error(self) -> BaseException | None:
        """What ended the thread; None while it runs and after an ordinary stop."""
        return self._error

    # --- commands -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for it. Idempotent. Not for the engine's thread."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._fail_commands()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function(engine)` between steps. The future gets its result, or what it raises.

        An EngineError concerns the caller alone. Any other error is fatal for the engine too.
        """
        future: Future[T] = Future()
        with self._wake:
            if not self._ended:
                self._commands.append((function, future))
                self._wake.notify()
                return future
        self._fail(future)
        return future

    def prepare(self, spec: RequestSpec) -> None:
        """Let the engine prepare for a request, on the caller's thread."""
        self._engine.prepare(spec)

    def start_engine(self) -> Future[None]:
        """Warm the engine up, on its thread."""
        return self.call(lambda engine: engine.start(self._wake_up))

    def _wake_up(self) -> None:
        with self._wake:
            self._wake.notify()

    def post(self, function: Callable[[Engine], object]) -> None:
        """Run `function(engine)` between steps; an EngineError is logged. Dropped after the end."""
        self.call(function).add_done_callback(_log_refusal)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._run_commands()
                self._step()
        except Exception as error:  # the outermost loop of the engine's thread
            log.critical("the engine failed and cannot go on", exc_info=error)
            with self._wake:
                self._ended = True
                self._error = error
            self._fail_commands()
            if self._on_fatal is not None:
                self._on_fatal(error)
        finally:
            self._runnable = False

    def _wait(self) -> bool:
        """Wait for a command or for work. False when the thread is to end."""
        with self._wake:
            while not self._ended and not self._commands:
                if self._engine.has_work():
                    break
                self._runnable = False
                self._wake.wait()
            if not self._runnable:
                self._last_step_at = self._clock()  # idleness is not lack of progress
            return not self._ended

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):  # those that come meanwhile wait for a step
            function, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, EngineError):
                    raise

    def _step(self) -> None:
        self._runnable = self._engine.has_work()
        if not self._runnable:
            return
        events = self._engine.step()
        self._num_steps += 1
        self._last_step_at = self._clock()
        if events:
            self._on_events(events)

    def _fail_commands(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, deque()
        for _, future in commands:
            self._fail(future)

    def _fail(self, future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        stopped = EngineStoppedError("the engine was stopped")
        if self._error is not None:
            stopped = EngineStoppedError(f"the engine failed: {self._error!r}")
            stopped.__cause__ = self._error
        future.set_exception(stopped)


def _log_refusal(future: Future[object]) -> None:
    error = future.exception()
    if isinstance(error, EngineError) and not isinstance(error, EngineStoppedError):
        log.error("a command to the engine was refused", exc_info=error)
