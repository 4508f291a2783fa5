"""One client request, from its arrival to its last token.

1. It waits in line for a placement (`Admission`), then runs as an `Attempt`. 2. An attempt that
fails is cancelled where it may still run. The next one goes elsewhere with the prompt and every
token emitted so far: an emitted index is never sampled again, and a client that has seen tokens
gets `Migrated`. 3. A request whose router vanished is looked for at the decode workers first
(`resume_from_index`). 4. It ends as Finished or as a BatonError, at its deadline at the latest. A
cancelled one is cancelled at every hop.

Clients read its `OutputLog`; none has to be there for it to go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

import numpy as np

from baton.errors import (
    AlreadyExistsError,
    BatonError,
    DeadlineError,
    ShuttingDownError,
)
from baton.v1 import common_pb2, router_pb2, worker_pb2
from router.fleet.fleet import Booking, WorkerEntry
from router.fleet.worker_link import Workers
from router.placement.placement import Placement, least_prefill_s
from router.placement.ticket import Placed, Ticket
from router.request.attempt import Attempt
from router.request.output import OutputLog, sendable_logprobs
from router.request.request_output import RequestOutput
from router.request.resume import check_resumable, find_running
from router.request.retrying import OUT_OF_TIME, AttemptError, Failure, Retrying
from router.request.run_parts import Arrival, RunParts, not_resumable

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the router is shutting down"


class RequestRun:
    """Own a request's attempts, retry budget and output."""

    def __init__(self, arrival: Arrival, parts: RunParts) -> None:
        self.arrival, self._parts = arrival, parts
        parsed, config = arrival.parsed, parts.config
        self.seed = parts.rng.getrandbits(64) if parsed.seed is None else parsed.seed
        self._output = RequestOutput(arrival, parts)
        self.log: OutputLog = self._output.log
        self._prompt = parts.admission.prompt(parsed.token_ids, parsed.tenant, parsed.cache_salt)
        self._deadline_s = arrival.arrived_s + config.timeout_s(parsed.timeout_s)
        self._retrying = Retrying(arrival, parts, self.log)
        self._aborted = self._orphaned = self._has_lost_model = False
        self.attempt: Attempt | None = None  # under way
        self._is_sought = parsed.resume_from_index is not None  # at the decode workers
        self._task: asyncio.Task[None] | None = None

    # --- from outside --------------------------------------------------------------------------

    def start(self, on_end: Callable[[RequestRun], None]) -> None:
        self._task = asyncio.create_task(self._run(), name=f"request:{self.arrival.request_id}")

        def ended(_: asyncio.Task[None]) -> None:
            if self.log.end is None:  # cancelled before its first step
                self._output.abort()
            self._let_go()
            on_end(self)

        self._task.add_done_callback(ended)

    def _let_go(self) -> None:
        """Of what only its attempts needed: an ended request is asked for its output alone."""
        parsed = replace(self.arrival.parsed, token_ids=np.empty(0, np.uint32))
        self.arrival = replace(self.arrival, parsed=parsed)
        del self._prompt, self._output

    def abort(self) -> None:
        """Cancel the request at every hop, at once; nothing happens to one that has ended."""
        if self._task is not None and not self._task.done():
            self._aborted = True
            # One that is looked for may run, and may belong to this router's session by now.
            if self._is_sought or self.has_moved:
                self._parts.links.cancel_everywhere(self.arrival.wire_id)
            self._task.cancel()

    def lose_clients(self) -> None:
        """Cancel a request that nobody reads, unless another router continues it and may need the
        handoff that is under way from here."""
        if not self.has_moved:
            self.abort()

    @property
    def has_moved(self) -> bool:
        return self.attempt is not None and self.attempt.has_moved

    def orphan(self) -> None:
        """Stop following the request. It continues at its decode worker for another router."""
        if self._task is not None and not self._task.done():
            self._orphaned = True
            self._task.cancel()

    def lose_model(self) -> None:
        """End a stream that has begun: another model is served from now on."""
        has_begun = bool(self.log.ids or self.arrival.parsed.resume_from_index)
        if has_begun and self._task is not None and not self._task.done():
            self._has_lost_model = True
            self._task.cancel()

    async def wait(self) -> None:
        """Return when nothing of the request is left here."""
        if self._task is not None:
            await asyncio.wait({self._task})

    # --- its life ------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._drive_until_deadline()
            self._output.finish()
        except asyncio.CancelledError:
            if self._aborted:
                self._output.abort()
            elif self._has_lost_model:
                self._output.fail(not_resumable())
            else:
                has_begun = self._retrying.attempt_number > 0
                self._output.fail(ShuttingDownError(SHUTTING_DOWN, has_begun=has_begun))
        except BatonError as error:
            self._output.fail(error)
        finally:
            if self.log.end is None:
                self._output.fail(BatonError("internal error"))

    async def _drive_until_deadline(self) -> None:
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - self._parts.clock.now_s())):
                await self._drive()
        except TimeoutError:
            raise DeadlineError(OUT_OF_TIME) from None

    async def _drive(self) -> None:
        if self.arrival.parsed.resume_from_index is not None and await self._resume():
            return
        ticket = self._ticket()
        while True:
            queued_at_s = self._parts.clock.now_s()
            placed = await self._place(ticket)
            self._output.queue_s += self._parts.clock.now_s() - queued_at_s
            if await self._ends_well(self._try_placed(placed)):
                return

    async def _place(self, ticket: Ticket) -> Placed:
        parsed, num_out = self.arrival.parsed, len(self.log.ids)
        self._prompt.extend_to(self.log.ids)
        ticket.max_new_tokens = max(1, parsed.sampling.max_tokens - num_out)
        ticket.least_new_tokens = max(1, parsed.least_tokens - num_out)
        return await self._parts.admission.place(ticket)

    def _ticket(self) -> Ticket:
        """A position in line, which a request that runs already does not need.

        Raises OverloadedError.
        """
        parsed = self.arrival.parsed
        deadline_s = None if parsed.timeout_s is None else self._deadline_s
        ticket = self._parts.admission.ticket(
            self._prompt,
            parsed.sampling.max_tokens,
            parsed.priority,
            parsed.tenant,
            deadline_s,
            parsed.session_id,
        )
        ticket.failed = self._retrying.failed
        return ticket

    async def _ends_well(self, trying: Coroutine[None, None, None]) -> bool:
        """Whether an attempt finished the request; raises BatonError when no other may follow."""
        try:
            await trying
            return True
        except AttemptError as error:
            num_failures = self._retrying.num_failures
            wait_s = self._retrying.judge(error)
            self._output.has_failed |= self._retrying.num_failures > num_failures
        if wait_s:
            await asyncio.sleep(wait_s)
        return False

    async def _try_placed(self, placed: Placed) -> None:
        """One attempt where the request was placed; raises AttemptError."""
        parts = self._parts
        try:
            workers = self._workers(placed)
            self._retrying.begin_attempt()
            placement = placed.placement
            routed = self._routed(placed.booking.decode, placement.reason, placement)
            attempt = self._new_attempt(workers, placement.first_token_s)
            spec, limit = self._spec(placed), parts.config.max_message_bytes
            running = attempt.run(spec, sendable_logprobs(self.log.logprobs, spec, limit))
            await self._follow(attempt, running, placed.booking, routed)
        finally:
            parts.fleet.release(placed.booking)

    def _workers(self, placed: Placed) -> Workers:
        """Raises AttemptError on the one that has left since the request was placed there."""
        links, booking = self._parts.links, placed.booking
        decode, prefill = links.get(booking.decode), links.get(booking.prefill)
        if decode is None or prefill is None:
            gone = booking.decode if decode is None else booking.prefill
            raise AttemptError(Failure.LEFT, gone, f"{gone.facts.worker_id} has just left")
        return Workers(decode, None if placed.placement.prefill_slot is None else prefill)

    async def _follow(
        self,
        attempt: Attempt,
        running: Coroutine[None, None, None],
        booking: Booking,
        routed: router_pb2.Routed | None = None,
    ) -> None:
        """See an attempt through to its end, and leave nothing of it behind on its workers."""
        taken_in = partial(self._retrying.taken_in, booking.decode)
        self._output.new_attempt(booking, routed, taken_in, self._has_time(booking))
        self.attempt = attempt
        try:
            await running
        except AttemptError as error:
            if error.failure is Failure.DECODE_LOST and attempt.running:
                self._retrying.lost_while_running(booking.decode)
            raise
        finally:
            self.attempt = None
            self._output.attempt_over()
            if not self._orphaned:
                attempt.cancel_on_worker()

    def _has_time(self, booking: Booking) -> bool:
        """Whether its deadline leaves, as far as is known, what its prompt takes."""
        parts = self._parts
        least_s = least_prefill_s(booking.prefill_tokens, parts.fleet.arrays)
        return self._deadline_s - parts.clock.now_s() > least_s

    def _new_attempt(self, workers: Workers, first_token_s: Callable[[float], float]) -> Attempt:
        """`first_token_s`: what to be patient for at a rate of prefill, in tokens a second."""
        parts = self._parts

        def limit_s(worker: WorkerEntry) -> float:
            # The newest measure: a worker's first long prompt is what its speed is learned from.
            predicted_s = first_token_s(parts.fleet.prefill_tokens_per_s(worker))
            return predicted_s + parts.config.first_token_timeout_s

        return Attempt(
            self.arrival.wire_id, workers, self._output, parts.config, parts.clock, limit_s
        )

    # --- taking over from another router -------------------------------------------------------

    async def _resume(self) -> bool:
        """Attach to the request where it runs; True when it finished there.

        Raises NotResumableError if it cannot be continued, UnavailableError if that is not known
        yet, OverloadedError if too many searches wait.
        """
        parsed, parts = self.arrival.parsed, self._parts
        num_tokens = len(parsed.token_ids)  # what is cached of it where it runs is not known here
        async with parts.searching.turn(parsed.tenant):
            found = await find_running(
                self.arrival.sought,
                parts.links,
                lambda link: self._new_attempt(
                    Workers(link, None), lambda tokens_per_s: num_tokens / tokens_per_s
                ),
                parts.config.attach_timeout_s,
            )
        if found is None:
            self._is_sought = False
            check_resumable(parsed)
            return False
        spec = found.response.spec
        try:
            if parsed.seed is not None and parsed.seed != spec.seed:
                raise AlreadyExistsError(f"the request runs with seed {spec.seed}", field="seed")
        except BaseException:
            found.attempt.abandon()
            raise
        finally:
            self._is_sought = False
        self.seed = spec.seed
        self._retrying.go_on_with(spec.attempt)
        worker = found.link.entry
        self.log.mark(self._routed(worker, f"found running on {worker.facts.worker_id}"))
        growth = min(self.arrival.parsed.sampling.max_tokens, parts.config.decode_growth_tokens)
        booking = parts.fleet.book_running(worker, len(self._prompt) + growth)
        running = found.attempt.run_adopted(found.response, parts.links.find)
        try:
            return await self._ends_well(self._follow(found.attempt, running, booking))
        finally:
            parts.fleet.release(booking)

    # --- values for workers and clients --------------------------------------------------------

    def _spec(self, placed: Placed) -> worker_pb2.RequestSpec:
        arrival, parsed = self.arrival, self.arrival.parsed
        left_s = self._deadline_s - self._parts.clock.now_s()
        return worker_pb2.RequestSpec(
            request_id=arrival.wire_id,
            body_digest=parsed.body_digest,
            tenant=parsed.tenant,
            attempt=self._retrying.attempt_number,
            token_ids=self._prompt.wire_tokens,
            num_prompt_tokens=self._prompt.num_prompt_tokens,
            sampling=self._sampling(placed),
            seed=self.seed,
            stop_token_ids=parsed.stop_token_ids,
            cache_salt=parsed.cache_salt,
            num_public_tokens=self._prompt.num_public_tokens,
            priority=parsed.priority,
            timeout_ms=max(1, int(left_s * 1e3)),
            traceparent=arrival.traceparent,
            kv_fingerprint=placed.booking.decode.facts.kv_fingerprint,
        )

    def _sampling(self, placed: Placed) -> common_pb2.SamplingParams:
        """A client that named no `max_tokens` gets what fits where its request runs."""
        asked = self.arrival.parsed.sampling
        room = placed.booking.decode.facts.longest_request - self._prompt.num_prompt_tokens
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
