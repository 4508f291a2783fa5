"""A request's tokens on their way out: text, stop strings, figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.errors import (
    BatonError,
    DeadlineError,
    KvTransferError,
    NotResumableError,
    OverloadedError,
    PoisonError,
    UnavailableError,
    WorkerLostError,
)
from baton.finish_reason import FinishReason
from baton.v1 import router_pb2, worker_pb2
from router.fleet.fleet import Booking
from router.placement.placement import least_prefill_s
from router.report.ended_request import MISSED, EndedRequest, judged, trace_id
from router.report.stages import Stages
from router.report.tally import Buckets
from router.request.output import Finished, OutputLog, TokenLogprobs
from router.request.run_parts import RunParts
from router.request.validate import ParsedRequest
from router.text import Detokenizer

_NOT_OF_CLIENT = (BatonError, KvTransferError, WorkerLostError, PoisonError, NotResumableError)

_MISSED = (*_NOT_OF_CLIENT, OverloadedError, UnavailableError)
_AT_ONCE_S = 0.001
"""Tokens that follow the first one sooner were there before it: no model is that fast."""
REPORT_S = 0.25  # a stream's tokens reach the figures this often


class RequestOutput:
    """Own a request's log and the text state behind it."""

    def __init__(self, request: ParsedRequest, parts: RunParts, tokenize_s: float) -> None:
        self.log = OutputLog()
        self.queue_s = 0.0
        self.stages = Stages(parts.clock, request.head.arrived_s, tokenize_s)
        self._request, self._parts, self._tokenize_s = request, parts, tokenize_s
        self._labels = parts.metrics.of(request.head.tenant)
        self._ends = frozenset(request.stop_token_ids)
        text, may_think = parts.model.text, request.is_chat and request.stop
        self._detokenizer = Detokenizer(
            text.new_decoder(
                after_text=request.continues_text, shows_special=request.shows_special
            ),
            request.stop,
            min_tokens=request.sampling.min_tokens,
            includes_stop=request.includes_stop,
            thoughts=text.new_splitter(request.token_ids[-64:].tolist()) if may_think else None,
        )
        self._booking: Booking | None = None
        self._predicted_s: float | None = None
        self._gap_buckets: Buckets | None = None  # of the pool that decodes
        self._routed: router_pb2.Routed | None = None
        self._on_taken_in: Callable[[], None] = lambda: None
        self._num_attempts, self._lease_id = 0, ""
        self.has_failed = False
        """An attempt failed, by no fault of the client's."""
        self._had_time = False
        self._attempt_at_s = 0.0
        self._still_s = 0.0  # in attempts that are over, since the last token
        self._first_at_s = self._last_at_s = 0.0  # of the tokens, once there are any
        self._num_at_once = 0  # of them, with the first one
        self._gaps_s: list[float] = []  # one per token after those that came first
        self._reported_at_s = 0.0  # when the figures last got tokens
        self._num_reported = self._num_gaps_reported = 0  # tokens and gaps that they have
        self._second_token_s = 0.0
        self._reserve_s = self._prefill_queue_s = self._prefill_s = 0.0
        self._num_cached_tokens = 0
        self._reason, self._stop_found = FinishReason.ABORTED, ""  # until `emit` knows

    # --- what attempts call --------------------------------------------------------------------

    def new_attempt(
        self,
        booking: Booking,
        routed: router_pb2.Routed | None,
        on_taken_in: Callable[[], None],
        has_time: bool,
        predicted_s: float | None = None,
    ) -> None:
        """This booking's tokens come now. `routed` is sent once its decode worker has room, since a
        full one may be asked many times. `has_time`: as far as is known, a worker could serve it
        before its deadline. `predicted_s`: the wait for a first token, from now on."""
        self._report_tokens()
        self._booking, self._attempt_at_s = booking, self._parts.clock.now_s()
        self._predicted_s, self._gap_buckets = predicted_s, None
        self._routed, self._on_taken_in = routed, on_taken_in
        self._num_attempts, self._lease_id = self._num_attempts + 1, ""
        self._had_time |= has_time
        self.stages.enter("reserve" if routed else "attached", booking.decode.facts.worker_id)

    def attempt_over(self) -> None:
        """End the attempt's time. That in line, from here on, is no worker's fault."""
        self._still_s += self._parts.clock.now_s() - max(self._attempt_at_s, self._last_at_s)
        self.stages.leave()

    @property
    def _pools(self) -> tuple[str, str]:
        """Return which prefill and decode; empty before the first attempt."""
        booking = self._booking
        return (
            ("", "") if booking is None else (booking.prefill.facts.pool, booking.decode.facts.pool)
        )

    @property
    def num_emitted(self) -> int:
        return len(self.log.ids)

    def reserved(self, lease_id: str) -> None:
        """Note that the decode worker has room. It prefills by itself where the id is empty."""
        self._lease_id = lease_id
        self._reserve_s = self._parts.clock.now_s() - self._attempt_at_s
        self._on_taken_in()
        if self._booking is not None:
            is_local = self._booking.prefill is self._booking.decode
            self.stages.enter("prefill", self._booking.prefill.facts.worker_id)
            self._parts.metrics.placements.labels("local" if is_local else "remote").inc()
        if self._routed is not None:
            self.log.mark(self._routed)

    def attached(self, num_cached_tokens: int) -> None:
        """Note that another router had the prompt computed, all but what was cached."""
        self._num_cached_tokens = num_cached_tokens

    def first_token(self, first: worker_pb2.FirstToken | None, num_cached_tokens: int) -> None:
        """Note that the prompt is computed, all but what was cached; None: by the decode worker."""
        now, metrics = self._parts.clock.now_s(), self._parts.metrics
        booking = self._booking
        self.stages.first_token(first, "" if booking is None else booking.decode.facts.worker_id)
        num_tokens = len(self._request.token_ids)
        if self._num_attempts > 1 and (self.has_failed or self.log.ids):
            num_again = num_tokens + len(self.log.ids) - num_cached_tokens
            metrics.wasted.labels(*self._labels, "retry").inc(max(0, num_again))
        prefilled = booking is not None and booking.prefill_held  # else found where it ran
        if booking is not None:
            self._parts.fleet.release_prefill(booking)
        if self.log.ids:
            return  # a later attempt: the client has had its first token
        pool, _ = self._pools
        if prefilled:
            self._parts.request_figures.saw_first_token(now - self._attempt_at_s)
            if self._predicted_s:
                ratio = (now - self._attempt_at_s) / self._predicted_s
                metrics.ttft_ratio.labels(self._labels[0], pool).observe(ratio)
        if first is None:
            self._prefill_s = now - self._attempt_at_s - self._reserve_s
        else:
            self._prefill_queue_s = first.queue_ms / 1e3
            self._prefill_s = first.prefill_ms / 1e3
        self._num_cached_tokens = num_cached_tokens
        ttft_s = now - self._request.head.arrived_s
        metrics.ttft.labels(*self._labels, pool).observe(ttft_s)
        if prefilled:
            self._parts.pool_figures.saw_first_token(pool, ttft_s)
        metrics.cached_tokens.labels(*self._labels).inc(self._num_cached_tokens)
        metrics.prefilled_tokens.labels(*self._labels).inc(num_tokens)
        self._parts.counts.cached_tokens += self._num_cached_tokens
        self._parts.counts.prefilled_tokens += num_tokens
        self.log.mark(
            router_pb2.Prefilled(ttft_ms=ttft_s * 1e3, num_cached_tokens=self._num_cached_tokens)
        )

    def handed_off(self, done: worker_pb2.HandoffDone) -> None:
        put_s = done.put_ms / 1e3
        if self._booking is not None:
            booking = self._booking
            self._parts.fleet.observe_handoff(booking, done.num_bytes, put_s)
            workers = booking.prefill.facts.worker_id, booking.decode.facts.worker_id
            self._parts.recent.handed_off(*workers, done.num_bytes)
            self.stages.handed_off(done, " -> ".join(workers))
        self._parts.metrics.handoff_bytes.inc(done.num_bytes)
        self._parts.metrics.handoff.labels(self._labels[0], self._pools[1]).observe(put_s)
        self.log.mark(
            router_pb2.HandedOff(
                kv_bytes=done.num_bytes, put_ms=done.put_ms, exposed_ms=done.exposed_ms
            )
        )

    def emit(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finished: FinishReason | None,
    ) -> bool:
        """Put out the next tokens; True when the request is over with them."""
        log = self.log
        stop: str | None = None
        num_before = len(log.ids)
        for position, token_id in enumerate(ids):
            ends = finished is FinishReason.STOP and position == len(ids) - 1
            log.ids.append(token_id)
            if ends and token_id in self._ends and not self._request.includes_stop:
                log.texts.append("")  # what ends the text is no part of it
                continue
            emitted = self._detokenizer.push(token_id)
            log.texts.append(emitted.text)
            if emitted.stop is not None:
                stop, finished = emitted.stop, FinishReason.STOP
                break
        num_new = len(log.ids) - num_before
        if num_new:
            self._time(num_new)
            self._parts.admission.emitted(self._request.head.tenant, num_before, len(log.ids))
        if logprobs:
            log.logprobs.extend(logprobs[:num_new])
        if finished is None and len(log.ids) >= self._request.sampling.max_tokens:
            finished = FinishReason.LENGTH
        if finished is None:
            log.wake()
            return False
        if stop is None:
            self._flush(num_new)
        self._stop_found = self._stop_name(finished, stop)
        self._reason = finished
        log.wake()
        return True

    def _time(self, num_new: int) -> None:
        """Tokens that come together share the gap before them: none of them took no time."""
        now_s = self._parts.clock.now_s()
        if len(self.log.ids) == num_new:
            self._first_at_s = now_s
        else:
            gap_s = now_s - self._last_at_s
            if self._gap_buckets is None:
                labels = *self._labels, self._pools[1]
                self._gap_buckets = self._parts.metrics.itl.labels(*labels)
            self._gap_buckets.observe(gap_s)
            if not self._gaps_s:
                self._second_token_s = gap_s
                self._num_gaps_reported = num_new  # it contains the handoff
            self._gaps_s += [gap_s / num_new] * num_new
        if now_s - self._first_at_s < _AT_ONCE_S:
            self._num_at_once = len(self.log.ids)
        self._last_at_s, self._still_s = now_s, 0.0
        if now_s - self._reported_at_s >= REPORT_S:
            self._reported_at_s = now_s
            self._report_tokens()

    def _report_tokens(self) -> None:
        """Count what is new since the last time; one token at a time, it would cost as much as
        the token."""
        num_before, num_tokens = self._num_reported, len(self.log.ids)
        if num_before == num_tokens:
            return
        self._num_reported = num_tokens
        self.log.measure(self._parts.config.clients.max_unread_bytes)
        self._parts.metrics.tokens.labels(*self._labels).inc(num_tokens - num_before)
        self._parts.counts.output_tokens += num_tokens - num_before
        gaps_s = self._gaps_s[self._num_gaps_reported :]
        if gaps_s and self._booking is not None:
            self._num_gaps_reported = len(self._gaps_s)
            self._parts.pool_figures.saw_gaps(self._booking.decode.facts.pool, gaps_s)

    def _flush(self, num_new: int) -> None:
        """Held-back text comes with the last token, unless clients may have taken that token."""
        held_back = self._detokenizer.finish()
        if num_new:
            self.log.texts[-1] += held_back
        else:
            self.log.tail = held_back

    def _stop_name(self, reason: FinishReason, stop: str | None) -> str:
        if stop is not None:
            return stop
        last = self.log.ids[-1] if self.log.ids else None
        return str(last) if reason is FinishReason.STOP and last in self._ends else ""

    # --- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the request, once `emit` said that it is over, and its attempt is."""
        self._close(self._reason, self._stop_found)

    def abort(self) -> None:
        self._close(FinishReason.ABORTED, "")

    def fail(self, error: BatonError) -> None:
        is_failure = self._is_failure(error)
        if self._booking is not None and is_failure is not None:
            self._parts.request_figures.ended(failed=is_failure)
        self._count_goodput(self._report_end(error.reason), error)
        self.log.close(error)

    def _is_failure(self, error: BatonError) -> bool | None:
        """Tell whether workers failed the request. None: it says nothing of them."""
        if self.has_failed or type(error) in _NOT_OF_CLIENT:
            return True
        if not isinstance(error, DeadlineError):
            return None  # its client ended it, or another router continues it
        if self.log.ids:
            return False
        # One that hangs until its client's patience ends is served no better than one that fails.
        return True if self._had_time else None

    def _count_end(self, is_aborted: bool) -> None:
        """Count an end without an error, of a request that a worker got at least once. One that
        stood still for so long that its client ended it was abandoned."""
        parts, booking = self._parts, self._booking
        if booking is None:
            return
        if not is_aborted:
            parts.request_figures.ended(failed=False)
        else:
            least_s = least_prefill_s(booking.prefill_tokens, parts.fleet.arrays)
            if self._still_s > parts.request_figures.too_long_s(least_s):
                parts.request_figures.abandoned()

    def _close(self, reason: FinishReason, stop: str) -> None:
        is_aborted = reason is FinishReason.ABORTED
        self._parts.counts.num_ended += not is_aborted
        self._count_end(is_aborted)
        num_prompt, num_out = len(self._request.token_ids), len(self.log.ids)
        if is_aborted and num_out:
            num_wasted = num_prompt - self._num_cached_tokens + num_out
            self._parts.metrics.wasted.labels(*self._labels, "abort").inc(num_wasted)
        ended = self._report_end(reason.value)
        self._count_goodput(ended)
        end = Finished(reason, num_prompt, num_out, self._num_cached_tokens, ended, stop)
        self.log.close(end)

    def _report_end(self, outcome: str) -> EndedRequest:
        """Report the end to operators: figures, a line in the log, and the counters of targets. The
        gap before the second token is reported apart, since it contains the handoff."""
        self._report_tokens()
        head, booking, gaps_s = self._request.head, self._booking, self._gaps_s[1:]
        num_later = len(self.log.ids) - self._num_at_once
        decode_s = self._last_at_s - self._first_at_s
        prefill = decode = ""
        if booking is not None:
            decode = booking.decode.facts.worker_id
            prefill = "" if booking.prefill is booking.decode else booking.prefill.facts.worker_id
        ended = EndedRequest(
            request_id=head.request_id,
            tenant=head.tenant,
            outcome=outcome,
            e2e_s=self._parts.clock.now_s() - head.arrived_s,
            session_id=head.session_id,
            trace_id=trace_id(head.traceparent),
            reason="" if self._routed is None else self._routed.reason,
            prefill_worker=prefill,
            decode_worker=decode,
            lease_id=self._lease_id,
            num_attempts=self._num_attempts,
            num_prompt_tokens=len(self._request.token_ids),
            num_cached_tokens=self._num_cached_tokens if self.log.ids else None,
            num_output_tokens=len(self.log.ids),
            tokenize_s=self._tokenize_s,
            queue_s=self.queue_s,
            reserve_s=self._reserve_s,
            prefill_queue_s=self._prefill_queue_s,
            prefill_s=self._prefill_s,
            second_token_s=self._second_token_s,
            decode_s=decode_s,
            tpot_s=decode_s / num_later if num_later else 0.0,
            ttft_s=self._first_at_s - head.arrived_s if self.log.ids else 0.0,
            itl_s=statistics.median(gaps_s) if gaps_s else 0.0,
        )
        ended = self._judged(ended)
        traced = self._parts.trace(ended, head.traceparent, self.stages)
        ended = replace(ended, trace_id=traced or ended.trace_id)
        self._parts.recent.requests.append(ended)
        self._parts.metrics.ended(ended, *self._pools)
        ended.write_line()
        return ended

    def _judged(self, ended: EndedRequest) -> EndedRequest:
        """Note and count whether it met its targets for the first token and for the median gap. A
        client that resumes has waited for longer than this router knows."""
        head = self._request.head
        if head.resume_from_index is not None:
            return ended
        ttft = self._judged_first(head.ttft_target_s, ended)
        itl = judged(head.itl_target_s, ended.itl_s, is_over=ended.itl_s > 0)
        for target, result in (("ttft", ttft), ("itl", itl)):
            if result:
                self._parts.metrics.targets.labels(target, result).inc()
        return replace(ended, ttft_target=ttft, itl_target=itl)

    def _judged_first(self, target_s: float | None, ended: EndedRequest) -> str:
        has_begun = bool(self.log.ids)
        return judged(target_s, ended.ttft_s if has_begun else ended.e2e_s, is_over=has_begun)

    def _count_goodput(self, ended: EndedRequest, error: BatonError | None = None) -> None:
        """A request is good if it ends well within both targets, its own or the router's. A client
        that leaves, or names too short a deadline, judges what it had."""
        head, config = self._request.head, self._parts.config
        is_fault = type(error) in _MISSED
        is_of_client = error is not None and not is_fault and not isinstance(error, DeadlineError)
        if head.resume_from_index is not None or is_of_client:
            return
        found = self._judged_first(head.ttft_target_s or config.metrics.ttft_target_s, ended)
        if is_fault or ended.tpot_s > (head.itl_target_s or config.metrics.itl_target_s):
            found = MISSED
        if found:
            self._parts.metrics.goodput.labels(*self._labels, found).inc()
