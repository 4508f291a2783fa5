"""One client request, from its arrival to its last token.

| stage   | waits for                                         | then                    |
| ------- | ------------------------------------------------- | ----------------------- |
| SEARCH  | the decode workers: does one run it already?      | an `Attempt`, or LINE   |
| LINE    | a placement                                       | an `Attempt`            |
| attempt | its end, see `machine`                            | LINE, PAUSE, or its end |
| PAUSE   | a timer, `retries.backoff_s`                        | LINE                    |

A failed attempt is cancelled where it may still run. The next one goes elsewhere with the prompt
and every token emitted so far: an emitted index is never sampled again, and a client that has seen
tokens gets `Migrated`. Clients read the `OutputLog`; none has to be there for the request to go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from baton.errors import AlreadyExistsError, BatonError, DeadlineError, ShuttingDownError
from baton.v1 import common_pb2, router_pb2, worker_pb2
from router.fleet.fleet import WorkerEntry
from router.placement.placement import Placement, least_prefill_s
from router.placement.ticket import Placed, Ticket
from router.request.alarm import Alarm
from router.request.attempt import Attempt, Place
from router.request.failure import Failed
from router.request.machine import HowOver, Outcome, Stop
from router.request.output import OutputLog, sendable_logprobs
from router.request.request_output import RequestOutput
from router.request.retrying import OUT_OF_TIME, Retrying
from router.request.run_parts import RunParts, not_resumable
from router.request.search import Running, check_resumable, find_running
from router.request.validate import ParsedRequest

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the router is shutting down"
_FAULT = "request %s: internal error"


@dataclass(frozen=True)
class Waiting:
    """The stage of a request that no worker is asked to run. `leave` gives up what it waits for.
    `is_sought`: it may run at a worker."""

    leave: Callable[[], object] = lambda: None
    is_sought: bool = False


class RequestRun:
    """Own a request's stage, retry budget and output. The `Owner` of its attempts."""

    def __init__(self, request: ParsedRequest, parts: RunParts, tokenize_s: float) -> None:
        self.request, self._parts = request, parts
        head, config = request.head, parts.config
        self.seed = parts.rng.getrandbits(64) if head.seed is None else head.seed
        self._output = RequestOutput(request, parts, tokenize_s)
        self.log: OutputLog = self._output.log
        self._prompt = parts.admission.prompt(request.token_ids, head.tenant, head.cache_salt)
        self._retrying = Retrying(head, parts, self.log)
        self._deadline_s = head.arrived_s + config.timeouts.of_request(head.timeout_s)
        self._alarm = Alarm(
            self._deadline_s, config.timeouts.suspect_silence_s, parts.clock, self._on_deadline
        )
        self.stage: Waiting | Attempt = Waiting()
        self._ticket: Ticket | None = None  # kept over its attempts; None: it was in no line yet
        self._ended = asyncio.Event()
        self._on_end: Callable[[RequestRun], None] = lambda _: None

    # --- from outside --------------------------------------------------------------------------

    def start(self, on_end: Callable[[RequestRun], None]) -> None:
        """`on_end` is called when nothing of the request is left here but its log."""
        self._on_end = on_end
        with self:
            self._alarm.review()
            if self.request.head.resume_from_index is None:
                self._enqueue()
            else:
                search = asyncio.create_task(self._search())
                self.stage = Waiting(search.cancel, is_sought=True)

    def abort(self) -> None:
        """Cancel the request at every hop, at once; nothing happens to one that has ended."""
        self._stop(Stop.ABORTED, Outcome.ABORTED)

    def lose_clients(self) -> None:
        """Cancel a request that nobody reads, unless another router continues it and may need the
        handoff that is under way from here."""
        self._stop(Stop.LEFT, Outcome.ABORTED)

    def orphan(self) -> None:
        """Stop following the request. It continues at its decode worker for another router."""
        has_begun = self._retrying.attempt_number > 0
        self._stop(Stop.ORPHANED, ShuttingDownError(SHUTTING_DOWN, has_begun=has_begun))

    def lose_model(self) -> None:
        """End a stream that has begun: another model is served from now on."""
        if self.log.ids or self.request.head.resume_from_index:
            self._stop(Stop.OVERRULED, not_resumable())

    async def wait(self) -> None:
        """Return when nothing of the request is left here."""
        await self._ended.wait()

    # --- its end -------------------------------------------------------------------------------

    def _on_deadline(self) -> None:
        self._stop(Stop.OVERRULED, DeadlineError(OUT_OF_TIME))

    def _stop(self, why: Stop, end: Outcome | BatonError) -> None:
        if self._ended.is_set():
            return
        with self:
            if isinstance(self.stage, Attempt):
                return self.stage.stop(why, end)
            if self.stage.is_sought and why in (Stop.ABORTED, Stop.LEFT):
                self._parts.links.cancel_everywhere(self.request.head.wire_id)
            self.stage.leave()
            self._end(end)

    def _end(self, how: Outcome | BatonError) -> None:
        self.stage, self._ticket = Waiting(), None
        self._alarm.end()
        try:
            if how is Outcome.COMPLETE:
                self._output.finish()
            elif how is Outcome.ABORTED:
                self._output.abort()
            else:
                self._output.fail(how)
        except Exception:
            log.exception(_FAULT, self.request.head.request_id)
        if self.log.end is None:
            self.log.close(BatonError("internal error"))
        # An ended request is asked for its output alone.
        self.request = replace(self.request, token_ids=np.empty(0, np.uint32))
        del self._prompt, self._output
        self._ended.set()
        self._on_end(self)

    def __enter__(self) -> None:
        """In the context of a request a fault of this router's own ends it, and no other."""

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> bool:
        if not isinstance(fault, Exception):
            return False
        log.error(_FAULT, self.request.head.request_id, exc_info=fault)
        if not self._ended.is_set():
            try:
                self.stage.leave()
            except Exception:
                log.exception(_FAULT, self.request.head.request_id)
            self._end(BatonError("internal error"))
        return True

    # --- where it runs already -----------------------------------------------------------------

    async def _search(self) -> None:
        """Attach to the request where another router left it."""
        parts, head = self._parts, self.request.head
        with self:
            try:
                async with parts.searching.turn(head.tenant):
                    timeout_s = parts.config.timeouts.attach_s
                    running = await find_running(self.request, parts.links, timeout_s)
                if running is not None:
                    self._take_over(running)
                else:
                    check_resumable(head)
                    self._enqueue()
            except BatonError as error:
                self._end(error)

    def _take_over(self, running: Running) -> None:
        """Raises AlreadyExistsError."""
        sampling, link, spec = self.request.sampling, running.link, running.response.spec
        if self.request.head.seed not in (None, spec.seed):
            running.leave()
            raise AlreadyExistsError(f"the request runs with seed {spec.seed}", field="seed")
        self.seed = spec.seed
        self._retrying.go_on_with(spec.attempt)
        self.log.mark(self._routed(link.entry, f"found running on {link.entry.facts.worker_id}"))
        growth = min(sampling.max_tokens, self._parts.config.placement.decode_growth_tokens)
        booking = self._parts.fleet.book_running(link.entry, len(self._prompt) + growth)
        self._begin(Place(link, booking), spec, None).follow(running)

    # --- the line ------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        """A request that runs already needs no position in line, so it gets one here."""
        request, admission, num_out = self.request, self._parts.admission, len(self.log.ids)
        head, max_tokens = request.head, request.sampling.max_tokens
        queued_at_s = self._parts.clock.now_s()
        self._output.stages.enter("queue")
        try:
            if self._ticket is None:
                self._ticket = admission.ticket(
                    self._prompt,
                    max_tokens,
                    head.priority,
                    head.tenant,
                    None if head.timeout_s is None else self._deadline_s,
                    head.session_id,
                    request.urgency,
                )
                self._ticket.failed = self._retrying.failed
            self._prompt.extend_to(self.log.ids)
            self._ticket.max_new_tokens = max(1, max_tokens - num_out)
            self._ticket.least_new_tokens = max(1, request.least_tokens - num_out)
            self.stage = Waiting(partial(admission.leave, self._ticket))
            admission.enter(self._ticket, partial(self._on_placed, queued_at_s))
        except BatonError as error:
            self._end(error)

    def _on_placed(self, queued_at_s: float, answer: Placed | BatonError) -> None:
        with self:
            if isinstance(answer, BatonError):
                return self._end(answer)
            self.stage = Waiting(partial(self._parts.fleet.release, answer.booking))
            self._output.queue_s += self._parts.clock.now_s() - queued_at_s
            self._retrying.begin_attempt()
            decode, placement = self._parts.links.at(answer.booking.decode), answer.placement
            spec = self._new_spec(decode.entry)
            routed = self._routed(decode.entry, placement.reason, placement)
            attempt = self._begin(Place(decode, answer.booking, placement), spec, routed)
            limit = self._parts.config.clients.max_message_bytes
            attempt.reserve(sendable_logprobs(self.log.logprobs, spec, limit))

    # --- attempts ------------------------------------------------------------------------------

    def _begin(
        self, place: Place, spec: worker_pb2.RequestSpec, routed: router_pb2.Routed | None
    ) -> Attempt:
        parts, booking, placement = self._parts, place.booking, place.placement
        taken_in = partial(self._retrying.taken_in, booking.decode)
        least_s = least_prefill_s(booking.prefill_tokens, parts.fleet.arrays)
        has_time = self._deadline_s - parts.clock.now_s() > least_s  # as far as is known
        predicted_s = placement.queue_s + placement.prefill_s if placement else None
        self.stage = Attempt(place, spec, self._output, self._alarm, parts, self)
        self._output.new_attempt(booking, routed, taken_in, has_time, predicted_s)
        return self.stage

    def attempt_over(self, how: HowOver) -> None:
        """Go on after an attempt of which nothing is left here."""
        self.stage = Waiting()
        with self:
            if not isinstance(how, Failed):
                return self._end(how)
            try:
                self._try_again(how)
            except BatonError as error:
                self._end(error)

    def _try_again(self, failed: Failed) -> None:
        """Raises BatonError when no other attempt may follow."""
        constraint, retrying, clock = self.request.constraint, self._retrying, self._parts.clock
        if failed.field == "grammar" and constraint:
            failed = replace(failed, field=constraint.field)
        num_failures = retrying.num_failures
        wait_s = retrying.judge(failed)
        self._output.has_failed |= retrying.num_failures > num_failures
        again = "migration" if self.log.ids else "retry"
        worker_id = failed.worker.facts.worker_id
        self._output.stages.begin_again(again, worker_id, failed.failure.value)
        if wait_s > 0:
            self._alarm.set_timer(clock.now_s() + wait_s, self._on_pause_over)
        else:
            self._enqueue()

    def _on_pause_over(self) -> None:
        with self:
            self._enqueue()

    # --- values for workers and clients --------------------------------------------------------

    def _new_spec(self, decode: WorkerEntry) -> worker_pb2.RequestSpec:
        parsed, head = self.request, self.request.head
        left_s = self._deadline_s - self._parts.clock.now_s()
        return worker_pb2.RequestSpec(
            request_id=head.wire_id,
            body_digest=parsed.body_digest,
            tenant=head.tenant,
            attempt=self._retrying.attempt_number,
            token_ids=self._prompt.wire_tokens,
            num_prompt_tokens=self._prompt.num_prompt_tokens,
            sampling=self._sampling(decode),
            seed=self.seed,
            stop_token_ids=parsed.stop_token_ids,
            cache_salt=head.cache_salt,
            num_public_tokens=self._prompt.num_public_tokens,
            priority=parsed.urgency,
            timeout_ms=max(1, int(left_s * 1e3)),
            traceparent=head.traceparent,
            kv_fingerprint=decode.facts.kv_fingerprint,
            grammar="" if parsed.constraint is None else parsed.constraint.grammar,
            allowed_tokens=parsed.allowed_tokens,
            bad_words=parsed.bad_words,
        )

    def _sampling(self, decode: WorkerEntry) -> common_pb2.SamplingParams:
        """Bound `max_tokens`, where the client named none, by what fits where it runs."""
        asked = self.request.sampling
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
        """Say where it goes. `placement` None: another router chose."""
        return router_pb2.Routed(
            request_id=self.request.head.request_id,
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
