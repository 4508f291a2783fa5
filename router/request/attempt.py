"""One try of a request on the workers of one placement, from its reservation to its end.

`machine.transition` says what follows from what; this turns messages, timers and answers into its
events, and carries out its effects. Nothing here runs between two of them, and a token that comes
in order goes from the worker's message to the client's log without one.

Tokens are emitted strictly by index: early ones wait, duplicates are dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from baton.errors import BatonError
from baton.fleet import WorkerState
from baton.grammar import BROKEN_GRAMMAR
from baton.v1 import common_pb2, worker_pb2
from baton.wire import DEADLINE, ORPHANED
from router.fleet.fleet import Booking, WorkerEntry
from router.fleet.session import Report, SessionLostError
from router.fleet.worker_link import WorkerLink
from router.placement.placement import Placement
from router.request import machine
from router.request.alarm import Alarm
from router.request.failure import Failed, Failure, loss_of, rejection
from router.request.machine import Do, Event, HowOver, Outcome, Phase, Signal, State, Stop, Stream
from router.request.output import TokenLogprobs, ended_by
from router.request.prefill_call import PrefillCall
from router.request.request_output import RequestOutput
from router.request.run_parts import RunParts
from router.request.search import NotAttachedError, Probe, Running, TakenOverError, attach_again


@dataclass(frozen=True)
class Place:
    """Where an attempt runs, and what is booked there for it."""

    decode: WorkerLink
    booking: Booking
    placement: Placement | None = None
    """None: another router's, which is not known here."""

    @property
    def writer(self) -> WorkerEntry | None:
        """None: the decode worker prefills, or another router chose the writer."""
        is_remote = self.placement is not None and self.placement.prefill_slot is not None
        return self.booking.prefill if is_remote else None


class Owner(AbstractContextManager[None, bool], Protocol):
    """The request that an attempt is of. In its context a fault ends it, and no other request."""

    def attempt_over(self, how: HowOver) -> None:
        """Go on: nothing of the attempt is left here. Called once."""


class Attempt:
    """Own what an attempt holds at its workers, its calls and its state. An `AttemptHandler` of its
    decode worker's session."""

    def __init__(
        self,
        place: Place,
        spec: worker_pb2.RequestSpec,
        output: RequestOutput,
        alarm: Alarm,
        parts: RunParts,
        owner: Owner,
    ) -> None:
        self.wire_id, self.number = spec.request_id, spec.attempt
        self.progress_s = -math.inf
        """When its decode worker last sent a token of it."""
        self.state = State(Phase.RESERVING, place.decode.entry, place.writer)
        self._place, self._spec = place, spec
        self._output, self._log, self._alarm = output, output.log, alarm
        self._parts, self._owner = parts, owner
        self._first_index = len(spec.token_ids) // 4 - spec.num_prompt_tokens  # that is its own
        self._events: deque[tuple[Event, Any]] = deque()  # with the message each came with
        self._is_stepping = False
        self._early: list[worker_pb2.RequestTokens] = []  # that wait for those before them
        self._probe: Probe | None = None  # listens in its place while it is attached again
        self._prefill: PrefillCall | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._links = {place.decode}
        if self.state.writer is not None:
            self._links.add(parts.links.at(self.state.writer))
        for link in self._links:
            link.waiting.add(self)

    # --- from its request ----------------------------------------------------------------------

    def reserve(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Ask the decode worker for room. `logprobs`: of the tokens emitted so far."""
        session, writer = self._place.decode.session, self.state.writer
        self._expect("an answer to Reserve", self._parts.config.timeouts.reserve_s, (self._decode,))
        ref = None if writer is None else writer.facts.ref
        reserve = worker_pb2.Reserve(spec=self._spec, writer=ref, emitted_logprobs=logprobs)
        try:
            session.listen(self)
            session.reserve(reserve)
        except SessionLostError as error:
            self.on_session_lost(str(error))

    def follow(self, running: Running) -> None:
        """Go on with what another router began."""
        config, tokens = self._parts.config, running.response.tokens
        self._output.attached(tokens.num_cached_tokens)
        is_running = len(tokens.ids) > self._first_index
        phase = Phase.DECODING if is_running else Phase.PREFILLING
        self.state = replace(self.state, phase=phase, is_attached=True)
        limit_s = config.timeouts.token_s if is_running else config.timeouts.max_s
        self._expect("a token", limit_s, (self._decode,))
        # Given up: no router was there, or its client left that wants it now after all.
        given_up = tokens.finished == common_pb2.FINISH_REASON_ABORTED
        self._go_on(running.probe, tokens, given_up)

    def stop(self, why: Stop, end: Outcome | BatonError) -> None:
        """End it with its request, unless its output is complete or another router needs it."""
        self._feed(machine.Stopped(why, end))

    def leave(self, cancels: bool = True) -> None:
        """Hold nothing of it any more. `cancels`: nor at its decode worker."""
        session = self._place.decode.session
        session.leave(self._probe or self)
        for link in self._links:
            link.waiting.discard(self)
        self._output.attempt_over()
        if cancels:
            session.cancel(self.wire_id, self.number)
        if self._prefill is not None:
            self._prefill.cancel()
        if self._attaching is not None:
            self._attaching.cancel()
        self._prefill = self._attaching = None
        self._parts.fleet.release(self._place.booking)
        self._alarm.rest()
        self._early.clear()

    # --- the machine ---------------------------------------------------------------------------

    @property
    def _decode(self) -> WorkerEntry:
        return self._place.decode.entry

    def _feed(self, event: Event, message: object = None) -> None:
        """Take the step that follows from an event. One that comes during a step waits for it."""
        self._events.append((event, message))
        if self._is_stepping:
            return
        with self._owner:
            self._is_stepping = True
            while self._events:
                event, message = self._events.popleft()
                now, config = self._parts.clock.now_s(), self._parts.config
                self.state, effects = machine.transition(self.state, event, now, config)
                for effect in effects:
                    self._carry_out(effect, message)
                if not self._events and (tokens := self._next_early()) is not None:
                    self._take(tokens)
        self._is_stepping = False

    def _carry_out(self, effect: machine.Effect, message: Any) -> None:
        """`message`: that the event came with."""
        match effect:
            case Do():
                self._do(effect, message)
            case machine.AskPrefill(writer):
                self._ask_prefill(writer, message.lease)
            case machine.Expect(what, limit_s, workers):
                self._expect(what, limit_s, workers)
            case machine.SetTimer(at_s):
                self._alarm.set_timer(at_s, partial(self._feed, Signal.TIMER_FIRED))
            case machine.End(how, cancels):
                self.leave(cancels)
                self._owner.attempt_over(how)

    def _do(self, effect: Do, message: Any) -> None:
        match effect:
            case Do.NOTE_RESERVED:
                self._output.reserved(message.lease.lease_id)
            case Do.NOTE_FIRST:
                first = message if isinstance(message, worker_pb2.FirstToken) else None
                self._output.first_token(first, message.num_cached_tokens)
            case Do.NOTE_HANDED_OFF:
                self._output.handed_off(message)
            case Do.EMIT:
                self._emit(message)
            case Do.KEEP_EARLY:
                self._early.append(message)
            case Do.ATTACH:
                self._attach(message)
            case Do.CANCEL_EVERYWHERE:
                self._parts.links.cancel_everywhere(self.wire_id)

    # --- silence -------------------------------------------------------------------------------

    def _expect(self, what: str, limit_s: float | None, workers: Sequence[WorkerEntry]) -> None:
        limit = self._first_token_limit_s if limit_s is None else lambda _: limit_s
        self._alarm.expect(what, limit, workers, self._on_silence)

    def _first_token_limit_s(self, worker: WorkerEntry) -> float:
        """Use the newest measure: from its first long prompt a worker's speed is learned."""
        placement, parts = self._place.placement, self._parts
        tokens_per_s = parts.fleet.prefill_tokens_per_s(worker)
        if placement is not None:
            predicted_s = placement.first_token_s(tokens_per_s)
        else:  # what is cached of it where it runs is not known here
            predicted_s = self._spec.num_prompt_tokens / tokens_per_s
        return predicted_s + parts.config.timeouts.first_token_s

    def review_patience(self) -> None:
        """Look at the limits again: a worker's state has changed."""
        self._alarm.review()

    def _on_silence(self, worker: WorkerEntry, what: str) -> None:
        """A worker that serves others meanwhile gets more time."""
        limit_s = self._parts.config.timeouts.token_s
        if not self._serves_others(worker, self._parts.clock.now_s() - limit_s):
            message = f"{worker.facts.worker_id}: no sign of {what}"
            self._feed(machine.AttemptFailed(Failed(Failure.STUCK, worker, message)))
        elif self.state.has_first_token:
            self._expect(what, limit_s, (worker,))
        else:
            self._expect("a first token", None, (worker,))

    def _serves_others(self, worker: WorkerEntry, since_s: float) -> bool:
        """Tell whether a worker that is silent about this attempt serves others. A writer does
        if its other prompts come out, a decode worker if its other streams flow. It has preempted
        this attempt for memory, and elsewhere everything would be computed again."""
        state = self.state
        if worker.state is WorkerState.SUSPECT:
            return False
        if worker is state.writer:
            link = self._parts.links.get(worker)
            return not state.has_first_token and bool(link and link.first_token_s > since_s)
        others = self._place.decode.waiting
        return state.is_running and any(other.progress_s > since_s for other in others)

    # --- what the decode worker's session reports ----------------------------------------------

    def on_report(self, report: Report) -> None:
        match report:
            case worker_pb2.Reserved():
                has_lease = report.HasField("lease")
                writer = self._writer_of(report.lease) if has_lease else None
                self._feed(machine.Reserved(has_lease, writer), report)
            case worker_pb2.Rejected():
                self._feed(machine.Rejected(rejection(report, self._decode)))
            case worker_pb2.HandoffAdmitted():
                self._feed(Signal.ADMITTED)
            case worker_pb2.Moved():
                self._feed(Signal.MOVED)

    def _writer_of(self, lease: worker_pb2.Lease) -> WorkerEntry | None:
        """Return the prefill worker of the placement, even if another router chose it."""
        if self._place.placement is not None or self.state.writer is not None:
            return self.state.writer
        link = self._parts.links.find(lease.writer.worker_id, lease.writer.incarnation)
        if link is None:
            return None
        self._links.add(link)
        link.waiting.add(self)
        return link.entry

    def on_session_lost(self, message: str) -> None:
        """Attach again: the worker keeps everything for a while, but an answer to Reserve."""
        failed = Failed(loss_of(self._decode, Failure.DECODE_LOST), self._decode, message)
        self._feed(machine.LinkLost(failed), message)

    def on_tokens(self, tokens: worker_pb2.RequestTokens) -> None:
        """Take tokens. Of a stream that flows they change nothing but the log and the time."""
        flows = self.state.phase is Phase.DECODING and self.state.stream is Stream.OPEN
        if not flows or tokens.finished or self._early or self._is_stepping:
            return self._take(tokens)
        if tokens.index != len(self._log.ids):
            return self._take(tokens)
        with self._owner:
            self.progress_s = self._parts.clock.now_s()
            self._alarm.progress(self.progress_s)
            if self._output.emit(tokens.ids, tokens.logprobs, None):
                self._feed(Signal.COMPLETE)

    def _take(self, tokens: worker_pb2.RequestTokens) -> None:
        end, num_emitted = tokens.index + len(tokens.ids), len(self._log.ids)
        event = machine.Tokens(
            leaves_gap=tokens.index > num_emitted,
            is_own=end > self._first_index,
            has_news=end > num_emitted,
            finishes=tokens.finished != 0,
        )
        self._feed(event, tokens)

    def _next_early(self) -> worker_pb2.RequestTokens | None:
        """Take the first of those that were early, once nothing is missing before it."""
        first = min(self._early, key=lambda run: run.index, default=None)
        if first is None or first.index > len(self._log.ids):
            return None
        self._early.remove(first)
        return first

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
        skip = len(self._log.ids) - tokens.index
        ids, logprobs = tokens.ids[skip:], tokens.logprobs[skip:]
        if ids and tokens is message:
            self.progress_s = self._parts.clock.now_s()
        finished = ended_by(tokens)
        if (ids or finished) and self._output.emit(ids, logprobs, finished):
            self._feed(Signal.COMPLETE)
        elif tokens.finished:
            failure = Failure.DEADLINE if tokens.error == DEADLINE else Failure.DECODE_FAILED
            why = tokens.error or common_pb2.FinishReason.Name(tokens.finished)
            failed = Failed(failure, self._decode, f"{self._decode.facts.worker_id}: {why}")
            if tokens.error.startswith(BROKEN_GRAMMAR):
                failed = replace(failed, failure=Failure.INVALID, field="grammar", problem=why)
            self._feed(machine.AttemptFailed(failed))

    # --- its prefill, and a lost session --------------------------------------------------------

    def _ask_prefill(self, writer: WorkerEntry, lease: worker_pb2.Lease) -> None:
        parts, link = self._parts, self._parts.links.get(writer)
        if link is None:  # since the request was placed there
            message = f"{writer.facts.worker_id} has left the fleet"
            self._feed(machine.PrefillFailed(Failed(Failure.LEFT, writer, message)))
        else:
            request, clock = worker_pb2.PrefillRequest(spec=self._spec, lease=lease), parts.clock
            self._prefill = PrefillCall(link, self._decode, request, clock, self._feed)

    def _attach(self, lost: str) -> None:
        if self._attaching is not None:
            self._attaching.cancel()
        self._attaching = asyncio.create_task(self._attach_again(lost))

    async def _attach_again(self, lost: str) -> None:
        """Go on where the worker is now, in its next session."""
        probe = self._probe = Probe(self.wire_id, self.on_session_lost)
        with self._owner:
            timeout_s = self._parts.config.timeouts.reattach_s
            try:
                response = await attach_again(self._place.decode, self._spec, probe, timeout_s)
            except TakenOverError:
                return self._feed(Signal.MOVED)  # nobody knew before
            except NotAttachedError as error:
                failure = loss_of(self._decode, Failure.DECODE_LOST)
                return self._fail(failure, f"{lost}; not attached again: {error}")
            if response.spec.attempt != self.number:  # its worker does not read which is meant
                return self._fail(Failure.STALE, f"attempt {response.spec.attempt} runs there")
            self._feed(Signal.ATTACHED)
            self._go_on(probe, response.tokens, given_up=response.tokens.error == ORPHANED)

    def _go_on(self, probe: Probe, tokens: worker_pb2.RequestTokens, given_up: bool) -> None:
        """Take in the output of an attached attempt, and what came meanwhile. `given_up`: by its
        worker, which is not the request's end."""
        self._attaching = self._probe = None
        if not probe.lost:
            self._place.decode.session.listen(self)
        error = tokens.error
        if given_up:
            tokens.ClearField("finished")
        self._take(tokens)
        if self.state.phase is not Phase.OVER:
            probe.replay(self)
        if given_up:
            why = f"{self._decode.facts.worker_id} gave it up: {error}"
            self._fail(Failure.GIVEN_UP, why, is_over_there=True)
        elif probe.lost:
            self.on_session_lost(probe.lost)

    def _fail(self, failure: Failure, message: str, is_over_there: bool = False) -> None:
        failed = Failed(failure, self._decode, message)
        self._feed(machine.AttemptFailed(failed, is_over_there))
