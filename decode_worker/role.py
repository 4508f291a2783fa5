"""The decode role: takes requests from routers, runs them, keeps what they emitted.

One attempt of a request on this worker:

1. `submit` with a writer: RESERVING. The engine reserves blocks and the lease table grants them:
   LEASED, and the session sends the lease. Without a writer the engine prefills: RUNNING.
2. `admitted`: all KV has arrived, RUNNING. `failed`: the blocks are quarantined and the session
   sends a rejection.
3. The engine's events fill the request log. Sessions read from it.
4. ENDED. If its writer may still write, the attempt stays in `_fenced` until `quiescent`.

A newer attempt ends an older one; an attempt older than the newest is refused. A request whose
session is lost runs on as an orphan until another session attaches it or `orphan_ttl_s` passes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from baton.clock import Clock
from baton.config.workers import DecodeConfig
from baton.finish_reason import FinishReason
from baton.wire import ANY_ATTEMPT, finish_reason_of
from decode_worker.request_log import (
    NoSessionError,
    OtherBodyError,
    Record,
    RequestLog,
    StaleAttemptError,
    Submission,
)
from decode_worker.session import (
    Admitted,
    Ending,
    Moved,
    Phase,
    Refusal,
    Rejected,
    Reserved,
    RouterSession,
    Run,
    Runs,
    ToEnd,
)
from engine.errors import EngineStoppedError, InvalidRequestError
from engine.loop import EngineThread
from engine.request import (
    EngineEvent,
    FinishedEvent,
    NoCapacityEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    TokenEvent,
)
from kv_transfer.errors import LeaseError
from kv_transfer.lease import FirstToken, WorkerIdentity
from kv_transfer.lease_table import LeaseFailure, LeaseTable

log = logging.getLogger(__name__)

ROUTERS_ANSWER_WITHIN_S = 1.0


def _give_up(found: asyncio.Future[bool]) -> None:
    if not found.done():
        found.set_result(False)


class DecodeRole:
    """The decode role of one worker, a `LeaseListener`. It runs on the event loop, not the engine's
    thread."""

    def __init__(
        self,
        engine: EngineThread,
        kv_fingerprint: bytes,
        config: DecodeConfig,
        clock: Clock,
        fail: Callable[[str, BaseException], None],
    ) -> None:
        """`fail` ends the worker: it gets the error after which no state can be trusted."""
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()  # they take requests in
        self._engine = engine
        self._kv_fingerprint = kv_fingerprint
        self._config = config
        self._clock = clock
        self._leases: LeaseTable  # from `bind` on
        self._log = RequestLog(
            config.finished_ttl_s, config.max_finished, config.max_finished_bytes
        )
        self._sessions: dict[str, RouterSession] = {}
        self.runs = Runs()  # not ended
        self._fenced: set[RequestId] = set()
        self._answers: dict[RequestId, asyncio.Future[EngineEvent]] = {}  # awaited: to `reserve`
        self.num_other_first_tokens = 0
        """First tokens that the engine computed again, and got another than the writer had sent."""
        self._draining = False
        self._numbers = itertools.count(1)  # of submissions
        self._ending: dict[str, Ending] = {}

    def bind(self, leases: LeaseTable) -> None:
        """Set the table whose listener this role is: once, before the first `submit`."""
        self._leases = leases

    # --- sessions -------------------------------------------------------------------------------

    def open_session(self, router_id: str) -> RouterSession:
        """Open a router's session. Its previous session closes and leaves orphans."""
        former = self._sessions.get(router_id)
        if former is not None:
            self.close_session(former)
        session = self._sessions[router_id] = RouterSession(router_id)
        return session

    def close_session(self, session: RouterSession) -> None:
        """Close a lost session. Its requests run on as orphans."""
        session.close()
        if self._sessions.get(session.router_id) is session:
            del self._sessions[session.router_id]
        self.runs.orphan(session, self._clock.now_s())

    def attach(
        self,
        router_id: str,
        request_id: str,
        tenant: str,
        body_digest: bytes = b"",
        seed: int | None = None,
        attempt: int | None = None,
    ) -> Record:
        """Move a request to the caller's session, which gets its later tokens.

        `RequestLog.find_for` checks that the request is the one meant. A caller that names an
        `attempt` resumes its own stream: it may not take a request from another router.
        Raises NotHereError, OtherBodyError or NoSessionError; then nothing has moved.
        """
        record = self._log.find_for(request_id, tenant, body_digest, seed, attempt)
        session = self._sessions.get(router_id)
        if session is None:
            raise NoSessionError(f"router {router_id!r} has no session here")
        run = self.runs.of_request(request_id)
        if run is not None:
            if attempt is not None and run.router != session.router:
                raise OtherBodyError(f"request {request_id!r} is followed by another router")
            run.move_to(session)
        return record

    # --- requests in ----------------------------------------------------------------------------

    def submit(
        self, session: RouterSession, submission: Submission, writer: WorkerIdentity | None
    ) -> None:
        """Take a request, or reject it through the session. If it raises, nothing is left.

        `writer`: the prefill worker that sends the KV; None: the prompt is computed here.
        """
        if session.closed:
            return
        refused = self._refusal(submission)
        if refused is not None:
            session.notice(Rejected(submission.request_id, submission.attempt, *refused))
            return
        former = self.runs.of_request(submission.request_id)
        if former is not None:
            self._end(former, FinishReason.ABORTED, "replaced by a newer attempt")
            if former.session is not None:
                former.session.drop(submission.request_id)
            if former.session is not session:
                former.notify(Moved(*former.name))
        # The engine's key is unique to this attempt. The router may reuse its id and number while
        # the engine still sends events of an attempt that has ended here.
        key = RequestId(f"{submission.spec.request_id}/{next(self._numbers)}")
        submission = replace(submission, spec=replace(submission.spec, request_id=key))
        record = self._log.open(submission)
        deadline_s = submission.deadline_s(self._clock.now_s())
        run = Run(submission, record, session, session.router, Phase.RESERVING, deadline_s)
        self.runs.add(run)
        try:
            # A writer sends the first token to the router itself: this worker starts after it.
            session.follow(record, len(record.token_ids) + (writer is not None))
            work = self._start(run) if writer is None else self._reserve(run, writer)
            self._spawn(self._guard(run, work))
        except BaseException:  # the caller rejects it through the session
            self._forget(run, "it could not be taken")
            raise

    def cancel(self, session: RouterSession, request_id: str, attempt: int) -> None:
        """Abort this attempt and every older one. Does nothing if it is unknown or newer.

        A router that lost the request to another router may cancel it only by ANY_ATTEMPT, which
        means that the client wants it ended.
        """
        run = self.runs.of_request(request_id)
        if run is None or run.submission.attempt > attempt:
            return
        if run.router == session.router or attempt == ANY_ATTEMPT:
            self._end(run, FinishReason.ABORTED, "cancelled")

    async def end_for_client(self, request_id: str) -> bool:
        """Abort what runs here under the id, whichever router follows it, or waits for a worker at
        a router. Returns whether there was anything."""
        run = self.runs.of_request(request_id)
        if run is not None:
            self._end(run, FinishReason.ABORTED, "cancelled")
            return True
        ending = self._ending.get(request_id)
        if ending is None:
            loop = asyncio.get_running_loop()
            found: asyncio.Future[bool] = loop.create_future()
            ending = self._ending[request_id] = Ending(set(self._sessions), found)
            found.add_done_callback(lambda _: self._ending.pop(request_id))
            loop.call_later(ROUTERS_ANSWER_WITHIN_S, _give_up, found)
            for session in self._sessions.values():
                session.notice(ToEnd(request_id, ANY_ATTEMPT))
        return await asyncio.shield(ending.was_found)  # others may wait for it too

    def ended(self, session: RouterSession, request_id: str, was_found: bool) -> None:
        """Take a router's answer to `ToEnd`."""
        if ending := self._ending.get(request_id):
            ending.answer(session.router_id, was_found)

    def _refusal(self, submission: Submission) -> tuple[Refusal, str] | None:
        if self._draining:
            return Refusal.DRAINING, "this worker is draining"
        if submission.kv_fingerprint != self._kv_fingerprint:
            return Refusal.FINGERPRINT, "this worker has another kv_fingerprint"
        try:
            self._log.check_new(submission)
        except OtherBodyError as error:
            return Refusal.TAKEN, str(error)
        except StaleAttemptError as error:
            return Refusal.STALE_ATTEMPT, str(error)
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch(task)

    def watch(self, task: asyncio.Task[None]) -> None:
        """End the worker when an assertion fails in the task. The caller keeps the task."""
        task.add_done_callback(self._task_over)

    def _task_over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._fail("the decode role", error)
        elif error is not None:
            log.error("a task of the decode role failed", exc_info=error)

    async def _guard(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; refuse an attempt that is still RESERVING afterwards."""
        refusal, why = Refusal.INTERNAL, "this worker failed to take the request"
        try:
            await work
        except InvalidRequestError as error:
            self._refuse(run, Refusal.INVALID, error.message, error.field)
        except EngineStoppedError as error:  # the process is ending, and reports why itself
            log.warning("a request reached a stopped engine: %s", error)
            refusal, why = Refusal.DRAINING, "this worker's engine has stopped"
        finally:
            if run.phase is Phase.RESERVING:  # whatever failed, nothing else ends it
                self._engine.post(lambda engine: engine.abort(run.key))
                self._refuse(run, refusal, why)

    async def _start(self, run: Run) -> None:
        """Prefill and decode here."""
        spec = await self._prepared(run)
        await asyncio.wrap_future(self._engine.call(lambda engine: engine.add(spec)))
        if run.phase is Phase.ENDED:
            self._engine.post(lambda engine: engine.abort(spec.request_id))
        else:
            self._started(run)

    async def _prepared(self, run: Run) -> RequestSpec:
        """Compile the request's grammar and return its spec. Raises InvalidRequestError."""
        spec = run.submission.spec
        if spec.grammar is not None:
            await asyncio.to_thread(self._engine.prepare, spec)
        return spec

    def _started(self, run: Run) -> None:
        """Note that the engine has accepted a request that it prefills itself."""
        if run.phase is Phase.RESERVING:
            run.phase = Phase.RUNNING
            run.notify(Reserved(*run.name, None, 0))

    async def _reserve(self, run: Run, writer: WorkerIdentity) -> None:
        """Reserve blocks and lease them to the writer."""
        event = await self._reserved(run, await self._prepared(run))
        try:
            if isinstance(event, ReservedEvent) and run.phase is Phase.RESERVING:
                self._grant(run, writer, event)
                return
        except LeaseError as error:  # the two workers do not fit
            self._refuse(run, Refusal.INTERNAL, f"writer: {error}")
        # No lease was granted: no writer knows the blocks.
        self._engine.post(lambda engine: engine.release(run.key))
        if isinstance(event, NoCapacityEvent):
            self._refuse(run, Refusal.NO_CAPACITY, event.message)

    async def _reserved(self, run: Run, spec: RequestSpec) -> EngineEvent:
        """Return the engine's answer to a reservation. None in time counts as no capacity."""
        answer: asyncio.Future[EngineEvent] = asyncio.get_running_loop().create_future()
        self._answers[run.key] = answer
        bound_s = self._config.reserve_within_s
        try:
            await asyncio.wrap_future(self._engine.call(lambda engine: engine.reserve(spec)))
            async with asyncio.timeout(bound_s):
                return await answer
        except TimeoutError:
            return NoCapacityEvent(run.key, f"no blocks came free within {bound_s:g} s")
        finally:
            del self._answers[run.key]

    def _grant(self, run: Run, writer: WorkerIdentity, event: ReservedEvent) -> None:
        left_s = run.left_s(self._clock.now_s(), otherwise_s=self._config.max_lease_s)
        lease = self._leases.grant(
            run.key, writer, event.block_ids, event.num_cached_tokens, left_s
        )
        run.phase = Phase.LEASED
        run.reserved = Reserved(*run.name, lease, event.num_cached_tokens)
        run.notify(run.reserved)

    # --- LeaseListener --------------------------------------------------------------------------

    def admitted(self, request_id: str, first: FirstToken) -> None:
        """Admit a request to the running batch: all KV of its lease has arrived."""
        run = self.runs.find(request_id)
        assert run is not None, request_id
        assert run.phase is Phase.LEASED, (request_id, run.phase)
        run.phase, run.reserved = Phase.RUNNING, None
        token = run.append_first(first)
        self._engine.post(lambda engine: engine.admit(run.key, token))
        run.notify_output()
        run.notify(Admitted(*run.name))

    def failed(
        self, request_id: str, reason: LeaseFailure, ended_by: FirstToken | None = None
    ) -> None:
        """End a failed handoff, whose blocks stay quarantined until `quiescent`. If the writer's
        first token ended the request, that token is the whole output."""
        run = self.runs.find(request_id)
        if run is None or run.phase is not Phase.LEASED:
            return
        self._quarantine(run)
        run.reserved = None
        # None also for a reason that this release does not know.
        finished = None if ended_by is None else finish_reason_of(ended_by.finished)
        if ended_by is None or finished is None:
            self._refuse(run, Refusal.HANDOFF_FAILED, reason.value)
        else:
            run.append_first(ended_by)
            self._close(run, finished, "")
            run.notify_output()

    def quiescent(self, request_id: str) -> None:
        """Release the blocks of an ended lease: its writer has provably stopped."""
        key = RequestId(request_id)
        self._fenced.discard(key)
        self._engine.post(lambda engine: engine.release(key))

    # --- the engine's events --------------------------------------------------------------------

    def on_events(self, events: Iterable[EngineEvent]) -> None:
        """Record one step's events; each session concerned sends one message."""
        touched: set[RouterSession] = set()
        for event in events:
            if self._answers and self._answers_reserve(event):
                continue
            if not isinstance(event, TokenEvent | FinishedEvent):
                continue
            run = self.runs.find(event.request_id)
            if run is None:
                continue  # another role's, or already ended here
            self._started(run)  # its first token may come before `_start` resumes
            if isinstance(event, TokenEvent):
                self._append(run, event)
                run.record.num_cached_tokens = event.num_cached_tokens
                reason, error = event.finished, ""
            else:
                reason, error = event.reason, event.message
            if run.session is not None:
                run.session.changed(run.record)
                touched.add(run.session)
            if reason is not None:
                self._close(run, reason, error)
        for session in touched:
            session.flush()

    def _answers_reserve(self, event: EngineEvent) -> bool:
        if not isinstance(event, ReservedEvent | NoCapacityEvent | FinishedEvent):
            return False
        answer = self._answers.get(event.request_id)
        if answer is not None and not answer.done():
            answer.set_result(event)
        return answer is not None

    def _append(self, run: Run, event: TokenEvent) -> None:
        if event.index != run.first_index:
            run.record.append(event.index, event.token)
        elif event.token.token_id != run.record.token_ids[event.index]:
            self.num_other_first_tokens += 1  # computed again: the one that was sent stands

    # --- ends -----------------------------------------------------------------------------------

    def sweep(self) -> None:
        """End attempts past their deadline, unclaimed orphans and expired records."""
        now_s = self._clock.now_s()
        for run in self.runs:
            why = run.overdue(now_s, self._config.orphan_ttl_s)
            if why is not None:
                self._end(run, FinishReason.ABORTED, why)
        self._log.expire(now_s)

    def _end(self, run: Run, reason: FinishReason, error: str) -> None:
        """End an attempt in any phase, from outside the engine."""
        if run.phase is Phase.ENDED:
            return
        key, lease_id = run.key, run.lease_id
        if run.phase is Phase.LEASED:
            self._quarantine(run)
        else:
            self._engine.post(lambda engine: engine.abort(key))
        self._close(run, reason, error)
        if lease_id is not None:
            self._leases.release(lease_id)
        run.notify_output()

    def _close(self, run: Run, reason: FinishReason, error: str) -> None:
        run.phase = Phase.ENDED
        self.runs.remove(run)
        self._log.finish(run.record, reason, error, self._clock.now_s())

    def _refuse(self, run: Run, refusal: Refusal, message: str, field: str = "") -> None:
        if run.phase is Phase.ENDED:
            return
        self._forget(run, message)
        if refusal is Refusal.HANDOFF_FAILED:  # its router has a lease: the attempt is used up
            self._log.use_up(run.submission, self._clock.now_s())
        retry_s = self._config.no_capacity_retry_s if refusal is Refusal.NO_CAPACITY else 0.0
        run.notify(Rejected(*run.name, refusal, message, retry_s, field))

    def _forget(self, run: Run, message: str) -> None:
        """End an attempt that never ran. It emitted nothing, so no session may attach to it."""
        self._close(run, FinishReason.ERROR, message)
        self._log.forget(run.submission.request_id)
        if run.session is not None:
            run.session.drop(run.submission.request_id)

    def _quarantine(self, run: Run) -> None:
        key = run.key
        self._fenced.add(key)
        self._engine.post(lambda engine: engine.abort(key))

    # --- drain ----------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        self._draining = True

    @property
    def is_idle(self) -> bool:
        """Nothing runs, and no writer may still write this worker's memory."""
        return not self.runs and not self._fenced and not self._tasks

    @property
    def has_sent_all(self) -> bool:
        """Every router has taken everything from its session."""
        return all(session.has_sent_all for session in self._sessions.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when an attempt has two owners or none."""
        self.runs.check_integrity()
