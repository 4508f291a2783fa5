"""Decide what each step computes, and record what came of it.

A request advances `num_computed_tokens` towards `num_tokens`. Each step gives running requests the
tokens that they lack, within its budget of tokens and, beside decodes, of seconds: first decodes
(one token each), then prompts in chunks, then waiting requests. Order is priority, the
lowest first, then arrival.

1. `add`, `add_prefill`: waiting. A waiting request holds no blocks until a step can place all its
   known tokens, so a prompt that starts can finish. In a windowed layer group only the window and
   one step's tokens count.
2. running: the next token is sampled when nothing is left to compute. A decode that finds no block
   preempts the newest running request, which waits again and is recomputed (from the prefix cache,
   as far as it is still there).
3. A prefill-only request ends with its first token, and stays pinned until `release`.
4. `reserve` holds blocks that another worker fills, and leaves the first one waiting before it the
   place and blocks to start; `admit` makes it a running request.

What is reserved or exported is never preempted: another process reads or writes its blocks. When
it is aborted, they stay in quarantine until `release`.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.finish_reason import FinishReason
from engine.errors import InvalidRequestError, UnknownRequestError
from engine.kv.kv_cache import KvCache
from engine.kv.request_blocks import RequestBlocks
from engine.request import (
    EngineEvent,
    EngineLoad,
    FinishedEvent,
    HandoffId,
    NoCapacityEvent,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SampledToken,
    Scores,
    StepPlan,
    TokenEvent,
)
from engine.schedule.admission import Limits, check_spec
from engine.schedule.itl_budget import ItlBudget
from engine.schedule.live_request import Export, LiveRequest, Status
from engine.schedule.quarantine import Quarantine
from engine.schedule.step_draft import StepDraft
from engine.schedule.step_work import StepWork
from kv_transfer.layout import BlockId

_MAX_CHUNKS = 64  # of a prompt, whose times are told


class Scheduler:
    """Own the state of every request; `plan` and `commit` alternate."""

    def __init__(
        self,
        limits: Limits,
        kv: KvCache,
        itl: ItlBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._itl = itl
        self._clock = clock
        self._requests: dict[RequestId, LiveRequest] = {}
        self._waiting: list[LiveRequest] = []  # in order
        self._running: list[LiveRequest] = []  # in order
        self._quarantine = Quarantine(kv)
        self._events: list[EngineEvent] = []
        self._num_arrived = 0
        self._num_steps, self._step_began_s = 0, 0.0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0  # after preemptions: those that the prefix cache had lost
        self._blocked = False  # all were seen to wait for blocks, and nothing was freed since
        self._blocked_since: float | None = None  # of plans in a row that found none to compute

    # --- requests in ----------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> None:
        """Take a request in. It raises InvalidRequestError, as do the next two methods."""
        self._wait(self._take(spec))

    def add_prefill(
        self, spec: RequestSpec, handoff_id: HandoffId, num_receiver_cached_tokens: int
    ) -> None:
        num_blocks, rest = divmod(num_receiver_cached_tokens, self._kv.block_size)
        if rest or num_receiver_cached_tokens >= max(1, len(spec.token_ids)):
            raise InvalidRequestError(
                "num_cached_tokens",
                f"{num_receiver_cached_tokens} cached tokens at the receiver are no whole blocks"
                f" of {self._kv.block_size} or leave nothing of {len(spec.token_ids)} to compute",
            )
        request = self._take(spec, Export(handoff_id, num_blocks))
        request.num_pushed_blocks = num_blocks
        self._kv.will_push(request.blocks, num_blocks, request.num_tokens)
        self._wait(request)

    def reserve(self, spec: RequestSpec) -> None:
        self._events.append(self._reserve(self._take(spec)))

    def _reserve(self, request: LiveRequest) -> ReservedEvent | NoCapacityEvent:
        num_seqs = len(self._running) + self._num_reserved
        waits = next(filter(self._quarantine.leaves_room_for, self._waiting), None)
        first: tuple[RequestBlocks, int] | None = None
        if waits is not None and waits.order < request.order:
            num_seqs += 1  # it goes before this one, or newcomers would keep it out for ever
            first = waits.blocks, waits.num_tokens
        if num_seqs >= self._limits.max_num_seqs:
            return NoCapacityEvent(request.request_id, f"{num_seqs} requests run here or wait")
        headroom = len(self._running)
        cached = self._kv.place_lease(request.blocks, request.num_tokens, headroom, first)
        if cached is None:
            free, needed = self._kv.num_free_blocks, self._kv.num_blocks_of(request.num_tokens)
            kept = f"{headroom} are kept" + (
                " beside the first prompt's that waits" if first else ""
            )
            return NoCapacityEvent(
                request.request_id,
                f"{free} blocks are free, the prompt needs up to {needed}, {kept}",
            )
        request.status = Status.RESERVED
        request.num_cached_tokens = cached
        self._requests[request.request_id] = request
        start = cached // self._kv.block_size
        tables = tuple(
            tuple(BlockId(b) for b in table[start:].tolist()) for table in request.blocks.views
        )
        return ReservedEvent(request.request_id, cached, tables)

    def admit(self, request_id: RequestId, first: SampledToken) -> None:
        request = self._requests.get(request_id)
        if request is None or request.status is not Status.RESERVED:
            raise UnknownRequestError(request_id)
        request.num_computed_tokens = request.num_tokens
        self._kv.computed(request.blocks, request.tokens, request.num_computed_tokens)
        finished = request.append(first.token_id, self._limits.eos_token_ids)
        if finished is not None:
            self._forget(request)
            self._events.append(FinishedEvent(request_id, finished))
            return
        self._run(request)

    # --- requests out ---------------------------------------------------------------------------

    def abort(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status is not Status.EXPORTED:  # which has ended
            self._events.append(FinishedEvent(request_id, FinishReason.ABORTED))
        if request.is_shared:
            self._leave(request)
            self._quarantine.put(request)
        else:
            self._forget(request)

    def release(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        assert request is None or request.export or request.status is Status.RESERVED, (
            f"{request_id} decodes here: nothing to release"
        )
        self.abort(request_id)
        if self._quarantine.free(request_id):
            self._blocked = False

    # --- a step ---------------------------------------------------------------------------------

    def plan(self, sink_messages: tuple[bytes, ...] = ()) -> StepPlan:
        """Choose the step's sequences. The caller runs the plan and then calls `commit`."""
        self._step_began_s = self._clock()
        draft = StepDraft(self._limits.max_num_batched_tokens, self._kv, self._itl)
        num_running = len(self._running)
        self._plan_decodes(draft)
        draft.limit_prompts()
        for request in self._running:
            if draft.budget and not request.decodes:
                draft.schedule(request)
        # Blocks are short when a decode had to preempt: nobody new starts.
        preempted = len(self._running) < num_running
        if not preempted:
            self._plan_waiting(draft)
        self._blocked = draft.is_empty and not preempted
        if not self._blocked:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = self._clock()
        self._num_steps += 1
        return draft.plan(self._num_steps, sink_messages)

    def commit(
        self, plan: StepPlan, sampled: Sequence[SampledToken], scores: Scores
    ) -> list[EngineEvent]:
        """Record a step that has run. `sampled` has a token for each sequence that samples."""
        events: list[EngineEvent] = []
        tokens = iter(sampled)
        block_size = self._kv.block_size
        for seq in plan.seqs:
            request = self._requests[seq.request_id]
            num_new = len(seq.token_ids)
            request.num_computed_tokens += num_new
            if request.export is not None and len(request.chunks) < _MAX_CHUNKS:
                request.chunks.append((num_new, self._step_began_s, self._clock()))
            became_full = request.num_computed_tokens % block_size < num_new
            if became_full or self._kv.has_windows:
                self._kv.computed(request.blocks, request.tokens, request.num_computed_tokens)
            if seq.scored is not None:
                scored = scores.get(seq.request_id, [])
                request.prompt_logprobs = request.prompt_logprobs[: seq.start] + scored
            if seq.samples:
                token = next(tokens)
                if seq.scored is not None and token.logprobs is not None:
                    logprobs = replace(token.logprobs, prompt=tuple(request.prompt_logprobs))
                    token = replace(token, logprobs=logprobs)
                events.append(self._sampled(request, token))
        return events

    def specs(self, plan: StepPlan) -> dict[RequestId, RequestSpec]:
        """Specs of all requests that sample in this step."""
        return {
            seq.request_id: self._requests[seq.request_id].current_spec()
            for seq in plan.seqs
            if seq.samples
        }

    def take_events(self) -> list[EngineEvent]:
        """Events between steps."""
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting) and not self._blocked

    @property
    def blocked_since(self) -> float | None:
        return self._blocked_since if self._running or self._waiting else None

    # --- planning -------------------------------------------------------------------------------

    def _plan_decodes(self, draft: StepDraft) -> None:
        index = 0
        while index < len(self._running) and draft.budget:
            request = self._running[index]
            if request.decodes:
                if request.num_tokens > request.blocks.num_blocks * self._kv.block_size and (
                    not self._make_room(request)
                ):
                    continue  # it is no longer at this index
                draft.schedule(request)
            index += 1

    def _make_room(self, request: LiveRequest) -> bool:
        """Grow a decode by a block, preempting the newest request. False if that is the decode
        itself."""
        while not self._kv.grow(request.blocks, request.num_tokens):
            victim = next(r for r in reversed(self._running) if r.export is None)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _plan_waiting(self, draft: StepDraft) -> None:
        """Start waiting requests in order. A request that quarantine leaves no room for blocks
        no other."""
        num_seqs = len(self._running) + self._num_reserved
        for request in tuple(self._waiting):
            if not draft.budget or num_seqs >= self._limits.max_num_seqs:
                return
            # A free block for each running request, so that the newcomer is not preempted at once.
            cached = self._kv.place(request.blocks, request.num_tokens, len(self._running))
            if cached is None:
                if self._quarantine.leaves_room_for(request):
                    return
                continue
            self._waiting.remove(request)
            request.num_computed_tokens = cached
            self._num_recomputed_tokens += max(0, request.num_lost_tokens - cached)
            request.num_lost_tokens = 0
            if request.started_at is None:
                request.started_at = self._step_began_s
                request.num_cached_tokens = cached
            self._run(request)
            draft.schedule(request)
            num_seqs += 1

    # --- recording ------------------------------------------------------------------------------

    def _sampled(self, request: LiveRequest, token: SampledToken) -> EngineEvent:
        if token.fault:
            if request.export is None:
                self._forget(request)
            else:
                self._stop_running(request)
            return FinishedEvent(request.request_id, FinishReason.ERROR, token.fault)
        finished = request.append(token.token_id, self._limits.eos_token_ids)
        if request.export is None:
            if finished is not None:
                self._forget(request)
            index = request.num_tokens - 1 - request.spec.num_prompt_tokens
            return TokenEvent(request.request_id, index, token, finished, request.num_cached_tokens)
        self._stop_running(request)
        now, started_at = self._clock(), request.started_at
        assert started_at is not None, f"{request.request_id} sampled before it started"
        return PrefilledEvent(
            request.request_id,
            token,
            request.num_cached_tokens,
            queue_s=started_at - request.arrived_at,
            prefill_s=now - started_at,
            finished=finished,
            chunks=tuple((n, t - started_at, end - started_at) for n, t, end in request.chunks),
        )

    def _take(self, spec: RequestSpec, export: Export | None = None) -> LiveRequest:
        """Check a request and give it its position in the order."""
        if spec.request_id in self._requests or self._quarantine.holds(spec.request_id):
            raise InvalidRequestError("request_id", f"{spec.request_id} runs here already")
        max_len = check_spec(spec, self._limits, prefill_only=export is not None)
        most_tokens = max_len if export is None else len(spec.token_ids) + 1
        is_shared = spec.sampling.prompt_logprobs is None
        blocks = self._kv.open(spec.token_ids, spec.scope, most_tokens, is_shared=is_shared)
        self._num_arrived += 1
        return LiveRequest(spec, self._num_arrived, self._clock(), max_len, blocks, export)

    def _unblock(self) -> None:
        """Look at waiting requests again: one may have room now."""
        if not self._running and not self._waiting:
            self._blocked_since = None  # of those that were there before, or of nobody
        self._blocked = False

    def _wait(self, request: LiveRequest) -> None:
        self._unblock()
        request.status = Status.WAITING
        self._requests[request.request_id] = request
        bisect.insort(self._waiting, request, key=_order)

    def _run(self, request: LiveRequest) -> None:
        self._unblock()
        request.status = Status.RUNNING
        bisect.insort(self._running, request, key=_order)

    def _preempt(self, request: LiveRequest) -> None:
        self._running.remove(request)
        self._kv.free(request.blocks)
        self._num_preemptions += 1
        request.num_lost_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        self._wait(request)

    def _stop_running(self, request: LiveRequest) -> None:
        self._running.remove(request)
        request.status = Status.EXPORTED

    def _forget(self, request: LiveRequest) -> None:
        self._leave(request)
        self._kv.free(request.blocks)

    def _leave(self, request: LiveRequest) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._blocked = False

    # --- counts and integrity -------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """Count requests, tokens and blocks; the engine adds what it knows of its steps."""
        statuses = Counter(request.status for request in self._requests.values())
        decodes = StepWork()
        num_queued_tokens = sum(request.num_left for request in self._waiting)
        for request in self._running:
            if request.decodes:
                decodes.add_decode(request.num_computed_tokens)
            else:
                num_queued_tokens += request.num_left
        return EngineLoad(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_reserved=statuses[Status.RESERVED],
            num_exporting=statuses[Status.EXPORTED],
            num_queued_tokens=num_queued_tokens,
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._kv.num_blocks - 1,  # the null block is nobody's
            num_quarantined_blocks=self._quarantine.num_blocks,
            num_quarantined_bytes=self._quarantine.num_bytes,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            prefill_tokens_per_s=self._itl.prefill_tokens_per_s(decodes),
        )

    @property
    def _num_reserved(self) -> int:
        return sum(r.status is Status.RESERVED for r in self._requests.values())

    def check_integrity(self) -> None:
        """Raise AssertionError with the values when requests and blocks disagree."""
        owners = [r for r in self._requests.values() if r.status is not Status.WAITING]
        owners.extend(self._quarantine.exports())
        self._kv.check_integrity([request.blocks for request in owners])
        for status, queue in ((Status.WAITING, self._waiting), (Status.RUNNING, self._running)):
            ids = [r.request_id for r in self._requests.values() if r.status is status]
            assert sorted(ids) == sorted(r.request_id for r in queue), f"{status} differs: {ids}"
            assert queue == sorted(queue, key=_order), f"{status} is out of order"


def _order(request: LiveRequest) -> tuple[int, int]:
    return request.order
