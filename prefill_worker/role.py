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

from baton.finish_reason import FinishReason
from baton.wire import finish_reason_on_wire
from engine.errors import EngineStoppedError, InvalidRequestError
from engine.loop import EngineThread
from engine.request import (
    EngineEvent,
    FinishedEvent,
    HandoffId,
    PrefilledEvent,
    RequestId,
    RequestSpec,
)
from kv_transfer.errors import HandoffError, Reason
from kv_transfer.exporter import Exporter
from kv_transfer.lease import FirstToken, Lease, Receipt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stopped:
    """The prefill ended without a first token: aborted, or the engine failed."""

    message: str


Outcome = PrefilledEvent | Receipt | HandoffError | InvalidRequestError | Stopped
"""The first token, the end of its handoff (good or bad), or why there is no first token."""


class DrainingError(RuntimeError):
    """This worker takes no new requests."""


class PrefillRun:
    """One running prefill. Its caller reads outcomes; the role writes the rest."""

    def __init__(self, handoff: HandoffId) -> None:
        self.handoff = handoff
        self._outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue()  # at most three
        self.work: asyncio.Task[None]  # set by the role
        self.computed: asyncio.Future[PrefilledEvent | FinishedEvent] = (
            asyncio.get_running_loop().create_future()
        )
        """The event that ends the computation; cancelled once nobody waits for it."""

    @property
    def key(self) -> RequestId:
        """The engine's key. The request's own id may come again while the engine still sends events
        of a prefill that has ended here."""
        return RequestId(self.handoff)

    def report(self, outcome: Outcome | None) -> None:
        self._outcomes.put_nowait(outcome)

    async def next(self) -> Outcome | None:
        """Return the next outcome; None when there will be no more."""
        return await self._outcomes.get()

    def cancel(self) -> None:
        """Stop the prefill at any step; it drains in the background."""
        self.work.cancel()


class PrefillRole:
    """The prefill role of one worker. It runs on the event loop; the engine has its own thread."""

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
        self._runs: dict[RequestId, PrefillRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self.handoff_bytes_per_s = 0.0
        """Moving average over this worker's handoffs; 0 before the first."""
        exporter.on_broken = self._handoff_broken

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    def begin_drain(self) -> None:
        self._draining = True

    def start(self, spec: RequestSpec, lease: Lease, timeout_s: float | None) -> PrefillRun:
        """Begin a prefill whose KV goes into `lease`.

        Raises DrainingError, FingerprintError or LeaseError; then nothing was begun.
        """
        self._exporter.check_unserved(lease)  # a served lease continues while the worker drains
        if self._draining:
            raise DrainingError("this worker is draining")
        handoff, opening = self._exporter.open(lease), self._exporter.opening(lease)
        run = PrefillRun(handoff)
        self._runs[run.key] = run
        spec, num_cached = replace(spec, request_id=run.key), lease.num_cached_tokens

        def add() -> Future[None]:
            return self._engine.call(
                lambda engine: engine.add_prefill(spec, handoff, num_cached, opening)
            )

        # Called here, not in the task, so that the engine has the prompt as soon as it can.
        added = asyncio.ensure_future(
            self._prepared(spec, add) if spec.grammar is not None else asyncio.wrap_future(add())
        )
        run.work = asyncio.create_task(self._compute_and_hand_off(run, added))
        run.work.add_done_callback(lambda _: added.cancel())  # also if it never began
        task = asyncio.create_task(self._run(run, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._task_over)
        return run

    def _task_over(self, task: asyncio.Task[None]) -> None:
        """End the worker when an assertion failed in one of the role's tasks."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._fail("the prefill role", error)
        elif error is not None:
            log.error("a task of the prefill role failed", exc_info=error)

    def _handoff_broken(self, handoff: HandoffId, error: HandoffError) -> None:
        """Stop a computation that cannot be handed off. After it, `finish` raises the error."""
        run = self._runs.get(RequestId(handoff))
        if run is not None and not run.computed.done():
            run.computed.set_exception(error)

    def on_events(self, events: Iterable[EngineEvent]) -> None:
        """Pass each prefill the event that ends its computation."""
        for event in events:
            if isinstance(event, PrefilledEvent | FinishedEvent):
                run = self._runs.get(event.request_id)
                if run is not None and not run.computed.done():
                    if isinstance(event, PrefilledEvent):
                        run.report(event)
                    run.computed.set_result(event)

    async def _prepared(self, spec: RequestSpec, add: Callable[[], Future[None]]) -> None:
        """Add a request once its grammar is compiled, which may take as long as a step."""
        await asyncio.to_thread(self._engine.prepare, spec)
        await asyncio.wrap_future(add())

    async def _run(self, run: PrefillRun, timeout_s: float | None) -> None:
        """Steps 2 to 4. The work may be cancelled at any await; the clean-up after it may not."""
        try:
            await asyncio.wait({run.work}, timeout=timeout_s)
        finally:
            is_late = run.work.cancel()
            await asyncio.wait({run.work})
            drained = await self._let_go(run)
            self._report_end(run, "deadline" if is_late else "cancelled")
        if not drained:
            await self._exporter.wait_drained(run.handoff)
            self._engine.post(lambda engine: engine.release(run.key))

    def _report_end(self, run: PrefillRun, why_cancelled: str) -> None:
        """Report why the work gave no outcome, and that there will be no more. Raises its error."""
        try:
            if run.work.cancelled():
                run.report(Stopped(why_cancelled))
            elif run.work.exception() is not None:
                run.report(Stopped("this worker failed"))
                run.work.result()
        finally:
            run.report(None)

    async def _compute_and_hand_off(self, run: PrefillRun, added: asyncio.Future[None]) -> None:
        try:
            await added
        except InvalidRequestError as error:
            run.report(error)
            return
        except EngineStoppedError as error:
            run.report(Stopped(str(error)))
            return
        if run.computed.done():  # reported in this turn: let its caller run before what follows
            await asyncio.sleep(0)
        try:
            event = await run.computed
            if isinstance(event, FinishedEvent) and event.reason is FinishReason.ERROR:
                run.report(InvalidRequestError("grammar", event.message))
            elif isinstance(event, FinishedEvent):
                run.report(Stopped(event.message or event.reason.value))
            else:
                await self._hand_off(run, event)
        except HandoffError as error:
            # A client that leaves is no fault: the receiver then fences the writer.
            level = logging.INFO if error.reason is Reason.FENCED else logging.WARNING
            log.log(level, "handoff %s: %s", run.handoff, error)
            run.report(error)

    async def _hand_off(self, run: PrefillRun, event: PrefilledEvent) -> None:
        reason = finish_reason_on_wire(event.finished)
        first = FirstToken(event.token.token_id, event.token.logprobs, reason)
        if event.finished is not None:  # the receiver learns it from the writer, without a router
            await self._exporter.cancel(run.handoff, ended_by=first)
            return
        receipt = await self._exporter.finish(run.handoff, first)
        if receipt.put_s > 0:
            seen = receipt.num_bytes / receipt.put_s
            former = self.handoff_bytes_per_s or seen
            self.handoff_bytes_per_s = former + (seen - former) / 8
        run.report(receipt)

    async def _let_go(self, run: PrefillRun) -> bool:
        """Stop computing, wait until nothing is in flight, and only then free the blocks.

        False: something may still be in flight, and the blocks stay set aside.
        """
        run.computed.cancel()
        self._engine.post(lambda engine: engine.abort(run.key))
        drained = await self._exporter.cancel(run.handoff)
        if drained:
            self._engine.post(lambda engine: engine.release(run.key))
        del self._runs[run.key]
        return drained

    def check_integrity(self) -> None:
        """Raise AssertionError when no task watches a prefill."""
        assert len(self._runs) <= len(self._tasks), (len(self._runs), len(self._tasks))
