"""One try of a request on the workers it was placed on.

1. `Reserve` goes to the decode worker. It answers with a lease, without one (it prefills by itself)
   or with a rejection.
2. `Prefill` with the lease goes to the prefill worker. Its first token is emitted at once.
3. The decode worker's tokens follow on the session, perhaps before the first token. Tokens are
   emitted strictly by index: early ones wait, duplicates are dropped. An attached attempt begins
   here, or at 2. A router that attaches gets the lease again, since the router before it may be
   gone. The writer serves a lease once, for any router.
4. When the session is lost while the worker lives, the attempt attaches to itself in the next one.
   The worker has continued, or kept what it had. No token is computed twice.
5. It ends with the last token, or with an `AttemptError`. Whatever is still under way on a worker
   is cancelled. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from baton.clock import Clock
from baton.config.router import RouterConfig
from baton.v1 import common_pb2, worker_pb2
from baton.wire import DEADLINE, ORPHANED
from router.fleet.fleet import WorkerEntry
from router.fleet.session import SessionLostError
from router.fleet.worker_link import WorkerLink, Workers
from router.request.output import TokenLogprobs, finish_reason_of
from router.request.patience import Patience
from router.request.request_output import RequestOutput
from router.request.retrying import AttemptError, Failure, failure_of, loss_of
from router.request.worker_calls import (
    NotAttachedError,
    PrefillFailed,
    PrefillLeg,
    TakenOverError,
    attach_again,
)

FindWorker = Callable[[str, int], WorkerLink | None]  # by id and incarnation


class Attempt:
    """One try; an `AttemptHandler` of the decode worker's session, and the `PrefillListener`."""

    def __init__(
        self,
        wire_id: str,
        workers: Workers,
        sink: RequestOutput,
        config: RouterConfig,
        clock: Clock,
        first_token_limit_s: Callable[[WorkerEntry], float],
    ) -> None:
        """`first_token_limit_s`: how long a worker may take for the first token, once reserved."""
        self.wire_id = wire_id
        self.number: int | None = None
        self.running = False
        self.progress_s = -math.inf  # when the decode worker last sent a token
        self._workers, self._sink = workers, sink
        self._config, self._clock = config, clock
        self._first_token_limit_s = first_token_limit_s
        self._spec = worker_pb2.RequestSpec()
        self._first_index = 0  # output index of the first token that is this attempt's own
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.early: list[worker_pb2.RequestTokens] = []  # runs that wait for those before them
        self._early_reserved: worker_pb2.Reserved | None = None
        self._early_loss: str | None = None  # of the session, before `adopt`
        self._adopted = True
        self._find_worker: FindWorker | None = None  # of an attempt that was attached to
        self._first_seen = False
        self.is_over_at_worker = False
        self.has_moved = False  # to another router
        self.is_lease_taken = False  # as far as is known, by another router
        self._reserved = False
        self._prefill_leg = PrefillLeg(self)
        self._reattach_task: asyncio.Task[None] | None = None
        self._patience = Patience(config.suspect_silence_s, clock, self._on_silence)

    @property
    def _decode(self) -> WorkerEntry:
        return self._workers.decode.entry

    # --- running it ----------------------------------------------------------------------------

    async def run(
        self, spec: worker_pb2.RequestSpec, emitted_logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Submit the request and return when it has finished; raises AttemptError."""
        self._take_spec(spec)
        writer = None if self._workers.prefill is None else self._workers.prefill.entry.facts.ref
        session = self._workers.decode.session
        self._begin("an answer to Reserve", self._config.reserve_timeout_s)
        try:
            session.listen(self)
            session.reserve(
                worker_pb2.Reserve(spec=spec, writer=writer, emitted_logprobs=emitted_logprobs)
            )
        except SessionLostError as error:
            self._stop()
            lost = loss_of(self._decode, Failure.DECODE_LOST)
            raise AttemptError(lost, self._decode, str(error)) from None
        await self._follow()

    def listen(self) -> None:
        """Before attaching: keep what the session brings until `adopt`. Raises SessionLostError."""
        self._adopted = False
        self._workers.decode.session.listen(self)

    async def run_adopted(
        self, response: worker_pb2.AttachResponse, find_worker: FindWorker
    ) -> None:
        """Go on with a request that another router started; raises AttemptError."""
        self._take_spec(response.spec)
        self._reserved, self._find_worker = True, find_worker
        self.running = self._first_seen = len(response.tokens.ids) > self._first_index
        self._sink.attached(response.tokens.num_cached_tokens)
        config = self._config
        self._begin("a token", config.token_timeout_s if self.running else config.max_timeout_s)
        # Ended because no router was there, or by a client that now wants it after all.
        self._adopt(response.tokens, response.tokens.finished == common_pb2.FINISH_REASON_ABORTED)
        if self._early_loss is not None:
            self.on_session_lost(self._early_loss)
        await self._follow()

    def _take_spec(self, spec: worker_pb2.RequestSpec) -> None:
        self._spec, self.number = spec, spec.attempt
        self._first_index = len(spec.token_ids) // 4 - spec.num_prompt_tokens

    def _adopt(self, tokens: worker_pb2.RequestTokens, was_given_up: bool) -> None:
        """Take in the output of an attached request, and what came meanwhile. If its worker gave it
        up, that is not the request's end."""
        self._adopted = True
        if was_given_up:
            tokens.ClearField("finished")
        early, self.early = self.early, []
        for run in (tokens, *early):
            if run.attempt == self.number:
                self.on_tokens(run)
        reserved, self._early_reserved = self._early_reserved, None
        if reserved is not None and reserved.attempt == self.number:
            self.on_reserved(reserved)
        if was_given_up:
            self.is_over_at_worker = True
            message = f"{self._decode.facts.worker_id} gave it up: {tokens.error}"
            self._fail(Failure.GIVEN_UP, self._decode, message)

    def _begin(self, what: str, seconds: float) -> None:
        for link in self._workers.links:
            link.waiting.add(self)
        self._patience.expect(what, seconds, self._decode)

    async def _follow(self) -> None:
        """Wait for the end. Raises a failure without progress in time."""
        try:
            await asyncio.wait({self._done})
            self._done.result()
            await self._await_handoff_report()
        finally:
            self._stop()

    async def _await_handoff_report(self) -> None:
        """The figures of the handoff may trail the last token."""
        if self.running:
            await self._prefill_leg.wait(self._config.handoff_report_wait_s)

    def _stop(self) -> None:
        self._workers.decode.session.leave(self)
        for link in self._workers.links:
            link.waiting.discard(self)
        self._patience.end()
        self._prefill_leg.cancel()
        if self._reattach_task is not None:
            self._reattach_task.cancel()
        if not self._done.done():
            self._done.cancel()
        elif not self._done.cancelled():
            self._done.exception()  # it may have failed while something else ended it

    def abandon(self) -> None:
        """After `listen`: the request is not here, or found better elsewhere."""
        self._stop()

    def cancel_on_worker(self) -> None:
        """Abort the attempt at the decode worker, unless it is over there."""
        if not self.is_over_at_worker and self.number is not None:
            self._workers.decode.session.cancel(self.wire_id, self.number)

    def review_patience(self) -> None:
        self._patience.review()

    def _expect(self, what: str, *workers: WorkerEntry) -> None:
        self._patience.expect(what, self._config.token_timeout_s, *workers)

    def _expect_first(self, worker: WorkerEntry) -> None:
        self._patience.expect("a first token", partial(self._first_token_limit_s, worker), worker)

    def _on_silence(self, worker: WorkerEntry, what: str) -> None:
        since_s = self._clock.now_s() - self._config.token_timeout_s
        if self._workers.serve_others(worker, since_s, self._first_seen, self.running):
            again = partial(self._expect, what) if self._first_seen else self._expect_first
            return again(worker)
        self._fail(Failure.STUCK, worker, f"{worker.facts.worker_id}: no sign of {what}")

    def _fail(
        self,
        failure: Failure,
        worker: WorkerEntry,
        message: str,
        retry_after_s: float = 0.0,
        field: str | None = None,
    ) -> None:
        if self._done.done() or (self.has_moved and self._prefill_leg.is_under_way):
            return  # another router needs the prefill that is under way from here
        failure = Failure.MOVED if self.has_moved else failure
        self._done.set_exception(AttemptError(failure, worker, message, retry_after_s, field))

    # --- what the session reports --------------------------------------------------------------

    def on_reserved(self, reserved: worker_pb2.Reserved) -> None:
        if not self._adopted:
            self._early_reserved = reserved
            return
        if self._done.done() or self.running or self._prefill_leg.was_asked:
            return
        if not reserved.HasField("lease"):
            self._expect_first(self._decode)
        elif writer := self._writer_of(reserved.lease):
            self._expect_first(writer.entry)
            request = worker_pb2.PrefillRequest(spec=self._spec, lease=reserved.lease)
            self._prefill_leg.ask(writer, request, self._config.max_timeout_s)
        # Else the first router has asked it: the lease gives the time to wait.
        if (
            not self._reserved
        ):  # reported after the prefill was asked for, which must not wait for it
            self._reserved = True
            self._sink.reserved(reserved.lease.lease_id)

    def _writer_of(self, lease: worker_pb2.Lease) -> WorkerLink | None:
        """The prefill worker of the placement, even if another router chose it."""
        if self._workers.prefill is None and self._find_worker is not None:
            writer = self._find_worker(lease.writer.worker_id, lease.writer.incarnation)
            if writer is not None:
                self._workers = replace(self._workers, prefill=writer)
                writer.waiting.add(self)
        return self._workers.prefill

    def on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        self.is_over_at_worker = True
        fail = partial(self._fail_rejected, rejected)
        if failure_of(rejected) is Failure.HANDOFF_FAILED and not self._first_seen:
            # A writer gives up when its first token ends the request, or another router cancels it:
            # that token, or its refusal to serve again, may be on its way.
            self._clock.call_later(self._config.handoff_report_wait_s, fail)
        else:
            fail()

    def _fail_rejected(self, rejected: worker_pb2.Rejected) -> None:
        failure = failure_of(rejected)
        is_of_handoff = failure is Failure.HANDOFF_FAILED
        worker = self._workers.writer if is_of_handoff else self._decode
        if is_of_handoff and (self._workers.prefill is None or self.is_lease_taken):
            failure = Failure.WRITER_UNKNOWN
        message = f"{self._decode.facts.worker_id}: {failure.value}: {rejected.message}"
        retry_after_s, field = rejected.retry_after_ms / 1e3, rejected.field or None
        self._fail(failure, worker, message, retry_after_s, field)

    def on_admitted(self) -> None:
        self.running = True
        if self._first_seen:
            self._expect("a token", self._decode)

    def on_tokens(self, tokens: worker_pb2.RequestTokens) -> None:
        if not self._adopted:
            self.early.append(tokens)
            return
        if self._done.done():
            return
        if tokens.index > self._sink.num_emitted:
            self.running = True
            self.early.append(tokens)
            return
        self._deliver(tokens)
        self._deliver_early()

    def on_moved(self) -> None:
        """Another router follows the request, and needs the handoff that may be under way from
        here."""
        self.is_over_at_worker = self.has_moved = True
        fail = partial(self._fail, Failure.MOVED, self._decode, "another router attached it")
        self._prefill_leg.then(fail)

    def on_session_lost(self, message: str) -> None:
        """A lost answer to Reserve does not come again. The worker keeps everything else for a
        while."""
        if self.is_over_at_worker:
            return  # its end is known, or is for another router
        if not self._reserved and not self._adopted:
            self._early_loss = message
        elif not self._reserved or self._done.done():
            self._decode_lost(message)
        else:
            if self._reattach_task is not None:
                self._reattach_task.cancel()
            self._reattach_task = asyncio.create_task(self._reattach(message))

    def _decode_lost(self, message: str) -> None:
        self._fail(loss_of(self._decode, Failure.DECODE_LOST), self._decode, message)

    async def _reattach(self, lost: str) -> None:
        """Go on where the worker is now, in its next session."""
        link, timeout_s = self._workers.decode, self._config.reattach_timeout_s
        try:
            response = await attach_again(link, self._spec, self.listen, timeout_s)
        except TakenOverError:
            self.on_moved()  # nobody knew before
        except NotAttachedError as error:
            self._decode_lost(f"{lost}; not attached again: {error}")
        else:
            if response.spec.attempt == self.number:
                self._adopt(response.tokens, response.tokens.error == ORPHANED)
            else:  # of a worker that does not read which one is meant
                stale = f"attempt {response.spec.attempt} runs there"
                self._fail(Failure.STALE, self._decode, stale)

    # --- what the prefill worker reports -------------------------------------------------------

    def on_handed_off(self, done: worker_pb2.HandoffDone) -> None:
        self._sink.handed_off(done)
        if not self.running:
            self._expect("the handed-off request", self._decode)

    def on_lease_refused(self) -> None:
        self.is_lease_taken = self._find_worker is not None  # else its writer came too late for it
        if not self.running:  # the lease gives the time to wait
            self._patience.expect("a token", self._config.max_timeout_s, self._decode)

    def on_first_token(self, first: worker_pb2.FirstToken) -> None:
        if self._workers.prefill is not None:
            self._workers.prefill.first_token_s = self._clock.now_s()
        if self._done.done():
            return
        self._see_first(first, first.num_cached_tokens)
        self.is_over_at_worker |= first.finished != 0  # its writer informs the decode worker
        if self.running:
            self._expect("a token", self._decode)
        else:  # it hangs at the writer, or at the receiver that does not acknowledge
            self._expect("the end of the handoff", self._workers.writer, self._decode)
        has_logprobs = first.HasField("logprobs")
        self._deliver(
            worker_pb2.RequestTokens(
                index=self._first_index,
                ids=[first.id],
                logprobs=[first.logprobs] if has_logprobs else [],
                finished=first.finished,
            ),
            at_decode_worker=False,
        )
        self._deliver_early()

    def _see_first(self, first: worker_pb2.FirstToken | None, num_cached_tokens: int) -> None:
        if not self._first_seen:
            self._first_seen = True
            self._sink.first_token(first, num_cached_tokens)

    def on_prefill_failed(self, broken: PrefillFailed) -> None:
        """This does not matter once the decode worker has taken over, unless the first token is
        lost."""
        if not (self.running and self._first_seen):
            worker = self._decode if broken.lost_receiver else self._workers.writer
            self._fail(broken.failure, worker, broken.message, field=broken.field)

    # --- tokens --------------------------------------------------------------------------------

    def _deliver(self, tokens: worker_pb2.RequestTokens, at_decode_worker: bool = True) -> None:
        """Emit the new tokens of a run that leaves no gap."""
        skip = self._sink.num_emitted - tokens.index
        ids, logprobs = tokens.ids[skip:], tokens.logprobs[skip:]
        if at_decode_worker:
            self.is_over_at_worker |= tokens.finished != 0
            self._on_progress(tokens, has_news=bool(ids))
        finished = finish_reason_of(tokens)
        if (ids or finished) and self._sink.emit(ids, logprobs, finished):
            self._done.set_result(None)
        elif tokens.finished:
            self._fail(
                Failure.DEADLINE if tokens.error == DEADLINE else Failure.DECODE_FAILED,
                self._decode,
                f"{self._decode.facts.worker_id}: "
                f"{common_pb2.FinishReason.Name(tokens.finished)}: {tokens.error}",
            )

    def _on_progress(self, tokens: worker_pb2.RequestTokens, has_news: bool) -> None:
        """Tokens beyond what this attempt began with show that the decode worker runs it."""
        if tokens.index + len(tokens.ids) > self._first_index:
            self.running = True
            self._see_first(None, tokens.num_cached_tokens)
        if has_news:
            self.progress_s = self._clock.now_s()
            self._expect("a token", self._decode)

    def _deliver_early(self) -> None:
        while not self._done.done():
            first = min(self.early, key=lambda run: run.index, default=None)
            if first is None or first.index > self._sink.num_emitted:
                return
            self.early.remove(first)
            self._deliver(first)
