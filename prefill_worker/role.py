"""The prefill role: computes a prompt, pushes its KV under a lease, samples the first token.

One prefill here:

1. `start`: the exporter opens the lease, the engine takes the request.
2. The engine's PrefilledEvent: the first token is told at once, before anything else that the
   event sets off, and while KV is still moving.
3. The exporter finishes the handoff and gives a receipt, or says why not.
4. Always, and whatever happened before: the handoff is drained first, then the engine lets go of
   the blocks. Cancelling a prefill goes straight there. When draining takes too long the caller is
   told the end; the blocks stay pinned until nothing can read them any more.
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
    FinishReason,
    HandoffId,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    SampledToken,
)
from engine.wire import finish_reason_to_proto
from kv_transfer.errors import HandoffError
from kv_transfer.exporter import Exporter
from kv_transfer.lease import FirstToken, FirstTokenLogprobs, Lease, Receipt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstTokenReady:
    token: SampledToken
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    finished: FinishReason | None


@dataclass(frozen=True)
class HandedOff:
    receipt: Receipt


@dataclass(frozen=True)
class HandoffBroken:
    reason: str
    message: str


@dataclass(frozen=True)
class Refused:
    """Nothing was computed: the request could never run here, by this field of its."""

    message: str
    field: str


@dataclass(frozen=True)
class Stopped:
    """The prefill ended without a first token: aborted, or the engine failed."""

    message: str


Outcome = FirstTokenReady | HandedOff | HandoffBroken | Refused | Stopped


class DrainingError(RuntimeError):
    """This worker takes no new work."""


class PrefillRun:
    """One prefill under way, as its caller sees it."""

    def __init__(self) -> None:
        self._outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue()  # at most three
        self.cancelled = asyncio.Event()

    def tell(self, outcome: Outcome | None) -> None:
        self._outcomes.put_nowait(outcome)

    async def next(self) -> Outcome | None:
        """The next outcome; None when there will be no more."""
        return await self._outcomes.get()

    def cancel(self) -> None:
        """Stop it wherever it is; it drains in the background."""
        self.cancelled.set()


@dataclass(frozen=True)
class _Waiting:
    """For the event that ends the computation of a prefill."""

    prefill: PrefillRun
    event: asyncio.Future[PrefilledEvent | FinishedEvent]


class PrefillRole:
    """Lives on the event loop; the engine runs on its own thread."""

    def __init__(
        self,
        engine: EngineThread,
        exporter: Exporter,
        fail: Callable[[str, BaseException], None],
    ) -> None:
        """`fail` is told of an error that leaves nothing here to rely on."""
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

        Raises DrainingError, and from the exporter LeaseError (fenced, served already, or not
        ours) and FingerprintError; then nothing was begun.
        """
        self._exporter.check_unserved(lease)  # one that is served goes on while the worker drains
        if self._draining:
            raise DrainingError("this worker is draining")
        handoff = self._exporter.open(lease)
        # An id that no other prefill ever has: the engine may still tell of one that is over here,
        # while the request's own id has come again.
        key = RequestId(f"{spec.request_id}/{handoff}")
        spec = replace(spec, request_id=key)
        prefill = PrefillRun()
        self._computing[handoff] = key
        loop, num_cached = asyncio.get_running_loop(), lease.num_cached_tokens
        self._waiting[key] = _Waiting(prefill, loop.create_future())
        # Not with the first turn of the task: the engine takes lease and prompt in one step.
        added = self._engine.call(lambda engine: engine.add_prefill(spec, handoff, num_cached))
        task = loop.create_task(self._run(prefill, key, handoff, added, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._task_over)
        return prefill

    def _task_over(self, task: asyncio.Task[None]) -> None:
        """An assertion that failed in one of the role's tasks ends the worker."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._fail("the prefill role", error)
        elif error is not None:
            log.error("a task of the prefill role failed", exc_info=error)

    def _handoff_broken(self, handoff: HandoffId, error: HandoffError) -> None:
        """Computing on is in vain; later than that, `finish` is waiting and reports it."""
        key = self._computing.pop(handoff, None)
        if key is not None and not self._waiting[key].event.done():
            self._waiting[key].event.set_exception(error)

    def on_events(self, events: Iterable[EngineEvent]) -> None:
        """Give each prefill the event that ends its computation."""
        for event in events:
            if isinstance(event, PrefilledEvent | FinishedEvent):
                waiting = self._waiting.get(event.request_id)
                if waiting is not None and not waiting.event.done():
                    if isinstance(event, PrefilledEvent):
                        waiting.prefill.tell(_first_token_ready(event))
                    waiting.event.set_result(event)

    async def _run(
        self,
        prefill: PrefillRun,
        key: RequestId,
        handoff: HandoffId,
        added: Future[None],
        timeout_s: float | None,
    ) -> None:
        """Steps 1 to 4. `work` may be cut short at any await; what follows it may not."""
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
            self._tell_end(prefill, work)
        if not drained:
            await self._exporter.wait_drained(handoff)
            self._engine.post(lambda engine: engine.unquarantine(key))

    def _tell_end(self, prefill: PrefillRun, work: asyncio.Task[None]) -> None:
        try:
            if work.cancelled():
                prefill.tell(Stopped("cancelled" if prefill.cancelled.is_set() else "deadline"))
            elif work.exception() is not None:
                prefill.tell(Stopped("this worker failed"))
                work.result()
        finally:
            prefill.tell(None)

    async def _compute_and_hand_off(
        self, prefill: PrefillRun, key: RequestId, handoff: HandoffId, added: Future[None]
    ) -> None:
        try:
            await asyncio.wrap_future(added)
        except InvalidRequestError as error:
            prefill.tell(Refused(error.message, error.field))
            return
        except EngineStoppedError as error:
            prefill.tell(Stopped(str(error)))
            return
        computed = self._waiting[key].event
        if computed.done():  # told in this same turn: what follows takes the next, after its caller
            await asyncio.sleep(0)
        try:
            event = await computed
        except HandoffError as error:
            prefill.tell(HandoffBroken(error.reason, str(error)))
            return
        if isinstance(event, FinishedEvent):
            prefill.tell(Stopped(event.message or event.reason.value))
            return
        if event.finished is None:
            prefill.tell(await self._hand_off(handoff, event.token))
        else:  # no router has to be there to tell the receiver
            ended_by = replace(_first(event.token), finished=finish_reason_to_proto(event.finished))
            await self._exporter.cancel(handoff, ended_by)

    async def _hand_off(self, handoff: HandoffId, token: SampledToken) -> Outcome:
        first = _first(token)
        try:
            receipt = await self._exporter.finish(handoff, first.token_id, first.logprobs, None)
        except HandoffError as error:
            log.warning("handoff %s: %s: %s", handoff, error.reason, error)
            return HandoffBroken(error.reason, str(error))
        if receipt.put_s > 0:
            seen = receipt.num_bytes / receipt.put_s
            former = self._handoff_bytes_per_s or seen
            self._handoff_bytes_per_s = former + (seen - former) / 8
        return HandedOff(receipt)

    async def _let_go(self, key: RequestId, handoff: HandoffId) -> bool:
        """Stop computing, wait until nothing is in flight, and only then free the blocks.

        False: it is still not known that nothing is, and the blocks are in quarantine.
        """
        self._computing.pop(handoff, None)
        self._engine.post(lambda engine: engine.abort(key))
        drained = await self._exporter.cancel(handoff)
        self._engine.post(lambda engine: engine.release(key, quarantine=not drained))
        del self._waiting[key]
        return drained

    def check_integrity(self) -> None:
        """Raise AssertionError when a prefill is watched by nobody."""
        assert len(self._waiting) <= len(self._tasks), (len(self._waiting), len(self._tasks))
        assert set(self._computing.values()) <= set(self._waiting), self._computing


def _first_token_ready(event: PrefilledEvent) -> FirstTokenReady:
    return FirstTokenReady(
        event.token, event.num_cached_tokens, event.queue_s, event.prefill_s, event.finished
    )


def _first(token: SampledToken) -> FirstToken:
    """An engine's first token as a receiver is told of it."""
    told = token.logprobs
    if told is None:
        return FirstToken(token.token_id)
    return FirstToken(token.token_id, FirstTokenLogprobs(told.logprob, told.rank, told.top))
