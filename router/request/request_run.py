"""One client request, from its arrival to its last token.

`machine.transition` says what follows from what; this turns messages, timers and answers into its
events, and carries out its effects. Nothing here runs between two of them, and a token that comes
in order goes from the worker's message to the client's log without one.

A failed attempt is cancelled where it may still run. The next one goes elsewhere with the prompt
and every token emitted so far: an emitted index is never sampled again, and a client that has seen
tokens gets `Migrated`. Tokens are emitted strictly by index: early ones wait, duplicates are
dropped. Clients read the `OutputLog`; none has to be there for the request to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from baton.errors import AlreadyExistsError, BatonError, DeadlineError, ShuttingDownError
from baton.grammar import BROKEN_GRAMMAR
from baton.v1 import common_pb2, router_pb2, worker_pb2
from baton.wire import DEADLINE, ORPHANED
from router.fleet.fleet import Booking, WorkerEntry
from router.fleet.session import AttemptHandler, SessionLostError
from router.fleet.worker_link import Workers
from router.placement.placement import Placement, least_prefill_s
from router.placement.ticket import Placed, Ticket
from router.request import machine
from router.request.alarm import Alarm
from router.request.failure import Failed, Failure, failure_of, loss_of
from router.request.machine import Do, Event, Phase, State, Stream
from router.request.output import OutputLog, ended_by, sendable_logprobs
from router.request.prefill_call import PrefillCall
from router.request.request_output import RequestOutput
from router.request.retrying import OUT_OF_TIME, Retrying
from router.request.run_parts import Arrival, RunParts, not_resumable
from router.request.search import (
    NotAttachedError,
    Probe,
    Running,
    TakenOverError,
    attach_again,
    check_resumable,
    find_running,
)

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the router is shutting down"
_FAULT = "request %s: internal error"


class RequestRun:
    """Own a request's state, retry budget and output. An `AttemptHandler` of its decode worker's
    session, a `PrefillListener`, and `Alarmed`."""

    def __init__(self, arrival: Arrival, parts: RunParts) -> None:
        self.arrival, self._parts = arrival, parts
        self.wire_id = arrival.wire_id
        parsed, config = arrival.parsed, parts.config
        self.seed = parts.rng.getrandbits(64) if parsed.seed is None else parsed.seed
        self._output = RequestOutput(arrival, parts)
        self.log: OutputLog = self._output.log
        self._prompt = parts.admission.prompt(parsed.token_ids, parsed.tenant, parsed.cache_salt)
        self._retrying = Retrying(arrival, parts, self.log)
        self._deadline_s = arrival.arrived_s + config.timeouts.of_request(parsed.timeout_s)
        self._alarm = Alarm(self._deadline_s, config.timeouts.suspect_silence_s, parts.clock, self)
        self._state = State(Phase.QUEUED)
        self._events: deque[tuple[Event, Any]] = deque()  # with the message each came with
        self._is_stepping = False
        self._ended = asyncio.Event()
        self._on_end: Callable[[RequestRun], None] = lambda _: None
        self._ticket: Ticket | None = None
        self._queued_at_s = 0.0
        self._searching: asyncio.Task[None] | None = None
        # Of the attempt that is under way:
        self._booking: Booking | None = None
        self._placement: Placement | None = None  # None: another router's
        self._workers: Workers | None = None
        self._spec = worker_pb2.RequestSpec()
        self.number: int | None = None
        self._first_index = 0  # output index of the first token that is the attempt's own
        self._early: list[worker_pb2.RequestTokens] = []  # that wait for those before them
        self._listener: AttemptHandler = self  # who is handed what the session brings
        self._prefill: PrefillCall | None = None
        self._attaching: asyncio.Task[None] | None = None
        self.progress_s = -math.inf
        """When its decode worker last sent a token of it."""

    # --- from outside --------------------------------------------------------------------------

    def start(self, on_end: Callable[[RequestRun], None]) -> None:
        """`on_end` is called when nothing of the request is left here but its log."""
        self._on_end = on_end
        self._alarm.review()
        is_sought = self.arrival.parsed.resume_from_index is not None
        self._state, effects = machine.start(is_sought)
        with self._stepping():
            self._carry_out(effects, None)

    def abort(self) -> None:
        """Cancel the request at every hop, at once; nothing happens to one that has ended."""
        self._feed(machine.Aborted(by_name=True))

    def lose_clients(self) -> None:
        """Cancel a request that nobody reads, unless another router continues it and may need the
        handoff that is under way from here."""
        self._feed(machine.Aborted(by_name=False))

    def orphan(self) -> None:
        """Stop following the request. It continues at its decode worker for another router."""
        has_begun = self._retrying.attempt_number > 0
        self._feed(machine.Orphaned(ShuttingDownError(SHUTTING_DOWN, has_begun=has_begun)))

    def lose_model(self) -> None:
        """End a stream that has begun: another model is served from now on."""
        if self.log.ids or self.arrival.parsed.resume_from_index:
            self._feed(machine.Overruled(not_resumable()))

    async def wait(self) -> None:
        """Return when nothing of the request is left here."""
        await self._ended.wait()

    @property
    def state(self) -> State:
        return self._state

    # --- the machine ---------------------------------------------------------------------------

    def _feed(self, event: Event, message: object = None) -> None:
        """Take the step that follows from an event. One that comes during a step waits for it."""
        self._events.append((event, message))
        if not self._is_stepping:
            with self._stepping():
                pass

    @contextlib.contextmanager
    def _stepping(self) -> Any:
        """Take all steps that are due. A fault ends this request, and no other."""
        self._is_stepping = True
        try:
            yield
            while True:
                while self._events:
                    event, message = self._events.popleft()
                    now, config = self._parts.clock.now_s(), self._parts.config
                    self._state, effects = machine.transition(self._state, event, now, config)
                    self._carry_out(effects, message)
                if (tokens := self._next_early()) is None:
                    return
                self._take(tokens)
        except Exception:
            log.exception(_FAULT, self.arrival.request_id)
            self._give_up()
        finally:
            self._is_stepping = False

    def _give_up(self) -> None:
        """After a fault of this router's own: it ends this request alone."""
        self._events.clear()
        if self._ended.is_set():
            return
        self._state = State(Phase.ENDED)
        try:
            self._leave_line()
            self._stop_search()
            self._end_attempt(cancels=True)
            self._end(BatonError("internal error"))
        except Exception:
            log.exception(_FAULT, self.arrival.request_id)
            self._alarm.end()
            if self.log.end is None:
                self.log.close(BatonError("internal error"))
            self._ended.set()
            self._on_end(self)

    def _carry_out(self, effects: tuple[machine.Effect, ...], message: Any) -> None:
        for effect in effects:
            match effect:
                case Do():
                    self._do(effect, message)
                case machine.Expect(what, limit_s, workers):
                    self._expect(what, limit_s, *workers)
                case machine.SetTimer(at_s):
                    self._alarm.set_timer(at_s)
                case machine.EndAttempt(cancels):
                    self._end_attempt(cancels)
                case machine.Judge(failed, was_running):
                    self._judge(failed, was_running)
                case machine.End(how):
                    self._end(how)

    def _do(self, effect: Do, message: Any) -> None:
        """`message`: that the event came with."""
        actions: dict[Do, Callable[[], object]] = {
            Do.SEARCH: self._start_search,
            Do.STOP_SEARCH: self._stop_search,
            Do.ENQUEUE: self._enqueue,
            Do.LEAVE_LINE: self._leave_line,
            Do.RESERVE: self._reserve,
            Do.ASK_PREFILL: partial(self._ask_prefill, message),
            Do.NOTE_RESERVED: lambda: self._output.reserved(message.lease.lease_id),
            Do.NOTE_FIRST: partial(self._note_first, message),
            Do.NOTE_HANDED_OFF: lambda: self._output.handed_off(message),
            Do.EMIT: partial(self._emit, message),
            Do.KEEP_EARLY: lambda: self._early.append(message),
            Do.ATTACH: partial(self._attach, message),
            Do.CANCEL_EVERYWHERE: lambda: self._parts.links.cancel_everywhere(self.wire_id),
        }
        actions[effect]()

    # --- the line ------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        """A request that runs already needs no position in line, so it gets one here."""
        parsed, admission, num_out = self.arrival.parsed, self._parts.admission, len(self.log.ids)
        self._queued_at_s = self._parts.clock.now_s()
        self._output.stages.enter("queue")
        try:
            if self._ticket is None:
                deadline_s = None if parsed.timeout_s is None else self._deadline_s
                self._ticket = admission.ticket(
                    self._prompt,
                    parsed.sampling.max_tokens,
                    parsed.priority,
                    parsed.tenant,
                    deadline_s,
                    parsed.session_id,
                    parsed.urgency,
                )
                self._ticket.failed = self._retrying.failed
            self._prompt.extend_to(self.log.ids)
            self._ticket.max_new_tokens = max(1, parsed.sampling.max_tokens - num_out)
            self._ticket.least_new_tokens = max(1, parsed.least_tokens - num_out)
            admission.enter(self._ticket, self._on_placed)
        except BatonError as error:
            self._feed(machine.Refused(error))

    def _leave_line(self) -> None:
        if self._ticket is not None:
            self._parts.admission.leave(self._ticket)

    def _on_placed(self, answer: Placed | BatonError) -> None:
        if isinstance(answer, BatonError):
            return self._feed(machine.Refused(answer))
        self._output.queue_s += self._parts.clock.now_s() - self._queued_at_s
        self._booking, self._placement = answer.booking, answer.placement
        booking, links = answer.booking, self._parts.links
        decode, prefill = links.get(booking.decode), links.get(booking.prefill)
        assert decode is not None, "it was placed there just now"
        assert prefill is not None, "it was placed there just now"
        is_local = answer.placement.prefill_slot is None
        self._workers = Workers(decode, None if is_local else prefill)
        self._feed(machine.Placed(decode.entry, None if is_local else prefill.entry))

    # --- an attempt ----------------------------------------------------------------------------

    def _reserve(self) -> None:
        assert self._booking is not None
        assert self._placement is not None
        assert self._workers is not None
        self._retrying.begin_attempt()
        self._spec = self._new_spec(self._booking.decode)
        placement, decode = self._placement, self._workers.decode
        self._begin(self._routed(decode.entry, placement.reason, placement))
        writer = None if self._workers.prefill is None else self._workers.prefill.entry.facts.ref
        limit = self._parts.config.clients.max_message_bytes
        logprobs = sendable_logprobs(self.log.logprobs, self._spec, limit)
        try:
            decode.session.listen(self)
            decode.session.reserve(
                worker_pb2.Reserve(spec=self._spec, writer=writer, emitted_logprobs=logprobs)
            )
        except SessionLostError as error:
            self._on_lost(str(error))

    def _begin(self, routed: router_pb2.Routed | None) -> None:
        assert self._booking is not None
        assert self._workers is not None
        self.number = self._spec.attempt
        self._first_index = len(self._spec.token_ids) // 4 - self._spec.num_prompt_tokens
        self.progress_s = -math.inf
        taken_in = partial(self._retrying.taken_in, self._booking.decode)
        has_time, placement = self._has_time(self._booking), self._placement
        predicted_s = placement.queue_s + placement.prefill_s if placement else None
        self._output.new_attempt(self._booking, routed, taken_in, has_time, predicted_s)
        for link in self._workers.links:
            link.waiting.add(self)

    def _end_attempt(self, cancels: bool) -> None:
        if self._workers is not None:
            decode = self._workers.decode
            decode.session.leave(self._listener)
            for link in self._workers.links:
                link.waiting.discard(self)
            self._output.attempt_over()
            if cancels:
                decode.session.cancel(self.wire_id, self._spec.attempt)
        if self._prefill is not None:
            self._prefill.cancel()
        if self._attaching is not None:
            self._attaching.cancel()
        self._release()
        self._alarm.rest()
        self._early.clear()
        self._workers = self._prefill = self._attaching = None
        self._listener = self

    def _release(self) -> None:
        if self._booking is not None:
            self._parts.fleet.release(self._booking)
        self._booking = self._placement = None

    def _has_time(self, booking: Booking) -> bool:
        """Whether its deadline leaves, as far as is known, what its prompt takes."""
        parts = self._parts
        least_s = least_prefill_s(booking.prefill_tokens, parts.fleet.arrays)
        return self._deadline_s - parts.clock.now_s() > least_s

    def _judge(self, failed: Failed, was_running: bool) -> None:
        retrying = self._retrying
        if failed.field == "grammar" and (constraint := self.arrival.parsed.constraint):
            failed = replace(failed, field=constraint.field)
        if failed.failure is Failure.DECODE_LOST and was_running:
            retrying.lost_while_running(failed.worker)
        num_failures = retrying.num_failures
        try:
            wait_s = retrying.judge(failed)
        except BatonError as error:
            self._feed(machine.Verdict(error=error))
        else:
            self._output.has_failed |= retrying.num_failures > num_failures
            again = "migration" if self.log.ids else "retry"
            self._output.stages.begin_again(
                again, failed.worker.facts.worker_id, failed.failure.value
            )
            self._feed(machine.Verdict(wait_s))

    def _end(self, how: machine.Outcome | BatonError) -> None:
        self._alarm.end()
        if how is machine.Outcome.COMPLETE:
            self._output.finish()
        elif how is machine.Outcome.ABORTED:
            self._output.abort()
        else:
            self._output.fail(how)
        # An ended request is asked for its output alone.
        parsed = replace(self.arrival.parsed, token_ids=np.empty(0, np.uint32))
        self.arrival = replace(self.arrival, parsed=parsed)
        self._ticket = None
        del self._prompt, self._output, self._listener  # itself: it would keep all this
        self._ended.set()
        self._on_end(self)

    # --- silence -------------------------------------------------------------------------------

    def _expect(self, what: str, limit_s: float | None, *workers: WorkerEntry) -> None:
        limit = self._first_token_limit_s if limit_s is None else lambda _: limit_s
        self._alarm.expect(what, limit, *workers)

    def _first_token_limit_s(self, worker: WorkerEntry) -> float:
        """By the newest measure: a worker's first long prompt is what its speed is learned from."""
        parts = self._parts
        tokens_per_s = parts.fleet.prefill_tokens_per_s(worker)
        if self._placement is not None:
            predicted_s = self._placement.first_token_s(tokens_per_s)
        else:  # what is cached of it where it runs is not known here
            predicted_s = self._spec.num_prompt_tokens / tokens_per_s
        return predicted_s + parts.config.timeouts.first_token_s

    def review_patience(self) -> None:
        self._alarm.review()

    def on_deadline(self) -> None:
        self._feed(machine.Overruled(DeadlineError(OUT_OF_TIME)))

    def on_timer(self) -> None:
        self._feed(machine.TimerFired())

    def on_silence(self, worker: WorkerEntry, what: str) -> None:
        """A worker that serves others meanwhile gets more time."""
        assert self._workers is not None
        state, limit_s = self._state, self._parts.config.timeouts.token_s
        since_s = self._parts.clock.now_s() - limit_s
        has_first = state.has_first_token
        if not self._workers.serve_others(worker, since_s, has_first, state.is_running):
            message = f"{worker.facts.worker_id}: no sign of {what}"
            self._feed(machine.AttemptFailed(Failed(Failure.STUCK, worker, message)))
        elif has_first:
            self._expect(what, limit_s, worker)
        else:
            self._expect("a first token", None, worker)

    # --- what the decode worker's session reports ----------------------------------------------

    def on_reserved(self, reserved: worker_pb2.Reserved) -> None:
        has_lease = reserved.HasField("lease")
        writer = self._writer_of(reserved.lease) if has_lease else None
        self._feed(machine.Reserved(has_lease, writer), reserved)

    def _writer_of(self, lease: worker_pb2.Lease) -> WorkerEntry | None:
        """The prefill worker of the placement, even if another router chose it."""
        assert self._workers is not None
        if self._workers.prefill is None and self._placement is None:
            writer = self._parts.links.find(lease.writer.worker_id, lease.writer.incarnation)
            if writer is not None:
                self._workers = replace(self._workers, prefill=writer)
                writer.waiting.add(self)
        return None if self._workers.prefill is None else self._workers.prefill.entry

    def on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        decode, failure = self._decode, failure_of(rejected)
        message = f"{decode.facts.worker_id}: {failure.value}: {rejected.message}"
        retry_after_s, field = rejected.retry_after_ms / 1e3, rejected.field or None
        failed = Failed(failure, decode, message, retry_after_s, field, rejected.message)
        self._feed(machine.Rejected(failed))

    def on_admitted(self, admitted: worker_pb2.HandoffAdmitted) -> None:
        self._feed(machine.Admitted())

    def on_moved(self, moved: worker_pb2.Moved) -> None:
        self._feed(machine.Moved())

    def on_session_lost(self, message: str) -> None:
        """The worker keeps everything for a while, but an answer to Reserve."""
        self._on_lost(message)

    def _on_lost(self, message: str) -> None:
        failed = Failed(loss_of(self._decode, Failure.DECODE_LOST), self._decode, message)
        self._feed(machine.LinkLost(failed), failed)

    @property
    def _decode(self) -> WorkerEntry:
        assert self._workers is not None
        return self._workers.decode.entry

    def on_tokens(self, tokens: worker_pb2.RequestTokens) -> None:
        """The next tokens of a stream that flows change nothing but the log and the time."""
        flows = self._state.phase is Phase.DECODING and self._state.stream is Stream.OPEN
        if not flows or tokens.finished or self._early or self._is_stepping:
            return self._take(tokens)
        if tokens.index != len(self.log.ids):
            return self._take(tokens)
        self._is_stepping = True
        try:
            self.progress_s = self._parts.clock.now_s()
            self._alarm.progress(self.progress_s)
            if self._output.emit(tokens.ids, tokens.logprobs, None):
                self._events.append((machine.Complete(), None))
        except Exception:
            log.exception(_FAULT, self.arrival.request_id)
            self._give_up()
        finally:
            self._is_stepping = False
        if self._events:
            with self._stepping():
                pass

    def _take(self, tokens: worker_pb2.RequestTokens) -> None:
        end, num_emitted = tokens.index + len(tokens.ids), len(self.log.ids)
        event = machine.Tokens(
            leaves_gap=tokens.index > num_emitted,
            is_own=end > self._first_index,
            has_news=end > num_emitted,
            finishes=tokens.finished != 0,
        )
        self._feed(event, tokens)

    def _next_early(self) -> worker_pb2.RequestTokens | None:
        """The first of those that were early, once nothing is missing before it."""
        first = min(self._early, key=lambda run: run.index, default=None)
        if first is None or first.index > len(self.log.ids):
            return None
        self._early.remove(first)
        return first

    def _note_first(self, message: worker_pb2.RequestTokens | worker_pb2.FirstToken) -> None:
        first = message if isinstance(message, worker_pb2.FirstToken) else None
        self._output.first_token(first, message.num_cached_tokens)

    def _emit(self, message: worker_pb2.RequestTokens | worker_pb2.FirstToken) -> None:
        """Emit the new tokens of a run that leaves no gap."""
        if isinstance(message, worker_pb2.FirstToken):
            has_logprobs = message.HasField("logprobs")
            tokens = worker_pb2.RequestTokens(
                index=self._first_index,
                ids=[message.id],
                logprobs=[message.logprobs] if has_logprobs else [],
                finished=message.finished,
            )
        else:
            tokens = message
        skip = len(self.log.ids) - tokens.index
        ids, logprobs = tokens.ids[skip:], tokens.logprobs[skip:]
        if ids and tokens is message:
            self.progress_s = self._parts.clock.now_s()
        finished = ended_by(tokens)
        if (ids or finished) and self._output.emit(ids, logprobs, finished):
            self._feed(machine.Complete())
        elif tokens.finished:
            failure = Failure.DEADLINE if tokens.error == DEADLINE else Failure.DECODE_FAILED
            why = tokens.error or common_pb2.FinishReason.Name(tokens.finished)
            failed = Failed(failure, self._decode, f"{self._decode.facts.worker_id}: {why}")
            if tokens.error.startswith(BROKEN_GRAMMAR):
                failed = replace(failed, failure=Failure.INVALID, field="grammar", problem=why)
            self._feed(machine.AttemptFailed(failed))

    # --- what the prefill worker reports -------------------------------------------------------

    def _ask_prefill(self, reserved: worker_pb2.Reserved) -> None:
        assert self._workers is not None
        assert self._workers.prefill is not None
        writer = self._workers.prefill
        if writer.has_left:  # since the request was placed there
            message = f"{writer.entry.facts.worker_id} has left the fleet"
            return self.on_prefill_failed(Failed(Failure.LEFT, writer.entry, message))
        request = worker_pb2.PrefillRequest(spec=self._spec, lease=reserved.lease)
        self._prefill = PrefillCall(writer, self._decode, request, self)
        return None

    def on_first_token(self, first: worker_pb2.FirstToken) -> None:
        if self._workers is not None and self._workers.prefill is not None:
            self._workers.prefill.first_token_s = self._parts.clock.now_s()
        self._feed(machine.FirstToken(first.finished != 0), first)

    def on_handed_off(self, done: worker_pb2.HandoffDone) -> None:
        self._feed(machine.HandedOff(), done)

    def on_prefill_failed(self, failed: Failed) -> None:
        self._feed(machine.PrefillFailed(failed))

    def on_lease_refused(self) -> None:
        # A lease of this router's own is refused when its writer came too late for it.
        self._feed(machine.LeaseRefused(taken=self._placement is None))

    # --- where it runs already -----------------------------------------------------------------

    def _start_search(self) -> None:
        self._searching = asyncio.create_task(self._search())

    async def _search(self) -> None:
        """Attach to the request where another router left it."""
        parsed, parts = self.arrival.parsed, self._parts
        try:
            async with parts.searching.turn(parsed.tenant):
                sought, timeout_s = self.arrival.sought, parts.config.timeouts.attach_s
                running = await find_running(sought, parts.links, timeout_s)
            if running is None:
                check_resumable(parsed)
            if running is None:
                self._feed(machine.NotFound())
            else:
                self._take_over(running)
        except BatonError as error:
            self._feed(machine.Refused(error))
        except Exception:
            log.exception(_FAULT, self.arrival.request_id)
            self._give_up()

    def _stop_search(self) -> None:
        if self._searching is not None:
            self._searching.cancel()

    def _take_over(self, running: Running) -> None:
        parsed, parts = self.arrival.parsed, self._parts
        response, link = running.response, running.link
        spec = response.spec
        if parsed.seed is not None and parsed.seed != spec.seed:
            running.leave()
            error = AlreadyExistsError(f"the request runs with seed {spec.seed}", field="seed")
            return self._feed(machine.Refused(error))
        self.seed, self._spec = spec.seed, spec
        self._retrying.go_on_with(spec.attempt)
        self.log.mark(self._routed(link.entry, f"found running on {link.entry.facts.worker_id}"))
        growth = min(parsed.sampling.max_tokens, parts.config.placement.decode_growth_tokens)
        self._booking = parts.fleet.book_running(link.entry, len(self._prompt) + growth)
        self._workers = Workers(link, None)
        self._begin(None)
        self._output.attached(response.tokens.num_cached_tokens)
        is_running = len(response.tokens.ids) > self._first_index
        self._feed(machine.Found(link.entry, is_running))
        # Given up: no router was there, or its client left that wants it now after all.
        given_up = response.tokens.finished == common_pb2.FINISH_REASON_ABORTED
        self._go_on(running.probe, response.tokens, given_up)

    def _attach(self, lost: Failed) -> None:
        if self._attaching is not None:
            self._attaching.cancel()
        self._attaching = asyncio.create_task(self._attached_again(lost))

    async def _attached_again(self, lost: Failed) -> None:
        try:
            await self._attach_again(lost)
        except Exception:
            log.exception(_FAULT, self.arrival.request_id)
            self._give_up()

    async def _attach_again(self, lost: Failed) -> None:
        """Go on where the worker is now, in its next session."""
        assert self._workers is not None
        link, timeout_s = self._workers.decode, self._parts.config.timeouts.reattach_s
        probe = self._listener = Probe(self.wire_id, self._on_lost)
        try:
            response = await attach_again(link, self._spec, probe, timeout_s)
        except TakenOverError:
            return self._feed(machine.Moved())  # nobody knew before
        except NotAttachedError as error:
            failure = loss_of(link.entry, Failure.DECODE_LOST)
            message = f"{lost.message}; not attached again: {error}"
            failed = replace(lost, failure=failure, message=message)
            return self._feed(machine.AttemptFailed(failed))
        if response.spec.attempt != self.number:  # of a worker that does not read which is meant
            message = f"attempt {response.spec.attempt} runs there"
            failed = Failed(Failure.STALE, link.entry, message)
            return self._feed(machine.AttemptFailed(failed))
        self._feed(machine.Attached())
        self._go_on(probe, response.tokens, given_up=response.tokens.error == ORPHANED)

    def _go_on(self, probe: Probe, tokens: worker_pb2.RequestTokens, given_up: bool) -> None:
        """Take in the output of an attached attempt, and what came meanwhile. `given_up`: by its
        worker, which is not the request's end."""
        assert self._workers is not None
        decode = self._workers.decode
        self._attaching, self._listener = None, self
        if not probe.lost:
            decode.session.listen(self)
        error = tokens.error
        if given_up:
            tokens.ClearField("finished")
        self._take(tokens)
        if self._state.decode is not None:  # it goes on
            probe.replay(self)
        if given_up:
            message = f"{decode.entry.facts.worker_id} gave it up: {error}"
            failed = Failed(Failure.GIVEN_UP, decode.entry, message)
            self._feed(machine.AttemptFailed(failed, is_over_there=True))
        elif probe.lost and self._state.decode is not None:
            self._on_lost(probe.lost)

    # --- values for workers and clients --------------------------------------------------------

    def _new_spec(self, decode: WorkerEntry) -> worker_pb2.RequestSpec:
        arrival, parsed = self.arrival, self.arrival.parsed
        left_s = self._deadline_s - self._parts.clock.now_s()
        return worker_pb2.RequestSpec(
            request_id=arrival.wire_id,
            body_digest=parsed.body_digest,
            tenant=parsed.tenant,
            attempt=self._retrying.attempt_number,
            token_ids=self._prompt.wire_tokens,
            num_prompt_tokens=self._prompt.num_prompt_tokens,
            sampling=self._sampling(decode),
            seed=self.seed,
            stop_token_ids=parsed.stop_token_ids,
            cache_salt=parsed.cache_salt,
            num_public_tokens=self._prompt.num_public_tokens,
            priority=parsed.urgency,
            timeout_ms=max(1, int(left_s * 1e3)),
            traceparent=arrival.traceparent,
            kv_fingerprint=decode.facts.kv_fingerprint,
            grammar="" if parsed.constraint is None else parsed.constraint.grammar,
            allowed_tokens=parsed.allowed_tokens,
            bad_words=parsed.bad_words,
        )

    def _sampling(self, decode: WorkerEntry) -> common_pb2.SamplingParams:
        """A client that named no `max_tokens` gets what fits where its request runs."""
        asked = self.arrival.parsed.sampling
        room = decode.facts.longest_request - self._prompt.num_prompt_tokens
        if asked.max_tokens <= room:
            return asked
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(asked)
        sampling.max_tokens = room
        return sampling

    def _routed(
        self, decode: WorkerEntry, reason: str, placement: Placement | None = None
    ) -> router_pb2.Routed:
        """`placement` None: another router's."""
        return router_pb2.Routed(
            request_id=self.arrival.request_id,
            seed=self.seed,
            prefill_worker="" if placement is None else placement.prefill_worker,
            decode_worker=decode.facts.worker_id,
            reason=reason,
            num_prompt_tokens=self._prompt.num_prompt_tokens,
            num_cached_tokens_prefill=placement.num_cached_tokens_prefill if placement else 0,
            num_cached_tokens_decode=placement.num_cached_tokens_decode if placement else 0,
            attempt=self._retrying.attempt_number,
            unit=self._parts.model.unit,
        )
