"""The prefill role: computes a prompt, pushes its KV under a lease, samples the first token.

One prefill:

1. `start`: the exporter opens the lease, and the engine takes the request.
2. The engine sends PrefilledEvent. The role reports the first token at once, while KV still moves.
3. The exporter finishes the handoff: it returns a receipt or raises an error.
4. In every case the handoff drains first, and then the engine releases the blocks. A cancel skips
   to this step. When draining takes too long the caller gets the end, but the blocks stay pinned
   until nothing can read them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from engine.errors import EngineStoppedError, InvalidRequestError
from engine.loop import EngineThread
from engine.request import (
    EngineEvent,
    FinishedEvent,
    HandoffId,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    SampledToken,
)
from engine.wire import finish_reason_to_proto
from kv_transfer.errors import HandoffError
from kv_transfer.exporter import Exporter
from kv_transfer.lease import FirstToken, Lease, Receipt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandoffBroken:
    reason: str
    message: str


@dataclass(frozen=True)
class Stopped:
    """The prefill ended without a first token: aborted, or the engine failed."""

    message: str


Outcome = PrefilledEvent | Receipt | HandoffBroken | InvalidRequestError | Stopped
"""The first token, the end of its handoff (good or bad), or why there is no first token."""


class DrainingError(RuntimeError):
    """This worker takes no new requests."""


class PrefillRun:
    """One running prefill, as its caller sees it."""

    def __init__(self) -> None:
        self._outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue()  # at most three
        self.cancelled = asyncio.Event()

    def report(self, outcome: Outcome | None) -> None:
        self._outcomes.put_nowait(outcome)

    async def next(self) -> Outcome | None:
        """The next outcome; None when there will be no more."""
        return await self._outcomes.get()

    def cancel(self) -> None:
        """Stop the prefill at any step; it drains in the background."""
        self.cancelled.set()


@dataclass(frozen=True)
class _Waiting:
    """A prefill that waits for the event that ends its computation."""

    prefill: PrefillRun
    event: asyncio.Future[PrefilledEvent | FinishedEvent]


class PrefillRole:
    """Runs on the event loop; the engine has its own thread."""

    def __init__(
        self,
        engine: EngineThread,
        exporter: Exporter,
        fail: Callable[[str, BaseException], None],
    ) -> None:
        """`fail` ends the worker: it gets the error after which no state can be trusted."""
        self._engine = engine
        self._fail = fail
        self._exporter = exporter
        self._waiting: dict[RequestId, _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._computing: dict[HandoffId, RequestId] = {}
        self._handoff_bytes_per_s = 0.0
        exporter.on_broken = self._handoff_broken

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    @property
    def handoff_bytes_per_s(self) -> float:
        """Moving average over this worker's handoffs; 0 before the first."""
        return self._handoff_bytes_per_s

    def begin_drain(self) -> None:
        self._draining = True

    def start(self, spec: RequestSpec, lease: Lease, timeout_s: float | None) -> PrefillRun:
        """Begin a prefill whose KV goes into `lease`.

        Raises DrainingError, FingerprintError or LeaseError (fenced, already served, or for
        another writer); then nothing was begun.
        """
        self._exporter.check_unserved(lease)  # a served lease continues while the worker drains
        if self._draining:
            raise DrainingError("this worker is draining")
        handoff = self._exporter.open(lease)
        # The engine's key is unique to this prefill. The request's own id may come again while the
        # engine still sends events of a prefill that has ended here.
        key = RequestId(f"{spec.request_id}/{handoff}")
        spec = replace(spec, request_id=key)
        prefill = PrefillRun()
        self._computing[handoff] = key
        loop, num_cached = asyncio.get_running_loop(), lease.num_cached_tokens
        self._waiting[key] = _Waiting(prefill, loop.create_future())
        # Called here, not in the task: the engine takes lease and prompt in one step.
        added = self._engine.call(lambda engine: engine.add_prefill(spec, handoff, num_cached))
        task = loop.create_task(self._run(prefill, key, handoff, added, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._task_over)
        return prefill

    def _task_over(self, task: asyncio.Task[None]) -> None:
        """End the worker when an assertion failed in one of the role's tasks."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._fail("the prefill role", error)
        elif error is not None:
            log.error("a task of the prefill role failed", exc_info=error)

    def _handoff_broken(self, handoff: HandoffId, error: HandoffError) -> None:
        """Stop a computation that cannot be handed off. After it, `finish` raises the error."""
        key = self._computing.pop(handoff, None)
        if key is not None and not self._waiting[key].event.done():
            self._waiting[key].event.set_exception(error)

    def on_events(self, events: Iterable[EngineEvent]) -> None:
        """Pass each prefill the event that ends its computation."""
        for event in events:
            if isinstance(event, PrefilledEvent | FinishedEvent):
                waiting = self._waiting.get(event.request_id)
                if waiting is not None and not waiting.event.done():
                    if isinstance(event, PrefilledEvent):
                        waiting.prefill.report(event)
                    waiting.event.set_result(event)

    async def _run(
        self,
        prefill: PrefillRun,
        key: RequestId,
        handoff: HandoffId,
        added: Future[None],
        timeout_s: float | None,
    ) -> None:
        """Steps 1 to 4. `work` may be cancelled at any await; the clean-up after it may not."""
        work = asyncio.create_task(self._compute_and_hand_off(prefill, key, handoff, added))
        cancelled = asyncio.create_task(prefill.cancelled.wait())
        try:
            await asyncio.wait(
                {work, cancelled}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            cancelled.cancel()
            work.cancel()
            await asyncio.wait({work})
            drained = await self._let_go(key, handoff)
            self._report_end(prefill, work)
        if not drained:
            await self._exporter.wait_drained(handoff)
            self._engine.post(lambda engine: engine.unquarantine(key))

    def _report_end(self, prefill: PrefillRun, work: asyncio.Task[None]) -> None:
        try:
            if work.cancelled():
                prefill.report(Stopped("cancelled" if prefill.cancelled.is_set() else "deadline"))
            elif work.exception() is not None:
                prefill.report(Stopped("this worker failed"))
                work.result()
        finally:
            prefill.report(None)

    async def _compute_and_hand_off(
        self, prefill: PrefillRun, key: RequestId, handoff: HandoffId, added: Future[None]
    ) -> None:
        try:
            await asyncio.wrap_future(added)
        except InvalidRequestError as error:
            prefill.report(error)
            return
        except EngineStoppedError as error:
            prefill.report(Stopped(str(error)))
            return
        computed = self._waiting[key].event
        if computed.done():  # reported in this turn: let its caller run before what follows
            await asyncio.sleep(0)
        try:
            event = await computed
        except HandoffError as error:
            prefill.report(HandoffBroken(error.reason, str(error)))
            return
        if isinstance(event, FinishedEvent):
            prefill.report(Stopped(event.message or event.reason.value))
            return
        if event.finished is None:
            prefill.report(await self._hand_off(handoff, event.token))
        else:  # the receiver learns the end from the writer: no router is needed for it
            reason = finish_reason_to_proto(event.finished)
            ended_by = FirstToken(event.token.token_id, event.token.logprobs, reason)
            await self._exporter.cancel(handoff, ended_by)

    async def _hand_off(self, handoff: HandoffId, token: SampledToken) -> Outcome:
        first = FirstToken(token.token_id, token.logprobs)
        try:
            receipt = await self._exporter.finish(handoff, first)
        except HandoffError as error:
            log.warning("handoff %s: %s: %s", handoff, error.reason, error)
            return HandoffBroken(error.reason, str(error))
        if receipt.put_s > 0:
            seen = receipt.num_bytes / receipt.put_s
            former = self._handoff_bytes_per_s or seen
            self._handoff_bytes_per_s = former + (seen - former) / 8
        return receipt

    async def _let_go(self, key: RequestId, handoff: HandoffId) -> bool:
        """Stop computing, wait until nothing is in flight, and only then free the blocks.

        False: something may still be in flight, and the blocks are quarantined.
        """
        self._computing.pop(handoff, None)
        self._engine.post(lambda engine: engine.abort(key))
        drained = await self._exporter.cancel(handoff)
        self._engine.post(lambda engine: engine.release(key, quarantine=not drained))
        del self._waiting[key]
        return drained

    def check_integrity(self) -> None:
        """Raise AssertionError when no task watches a prefill."""
        assert len(self._waiting) <= len(self._tasks), (len(self._waiting), len(self._tasks))
        assert set(self._computing.values()) <= set(self._waiting), self._computing
