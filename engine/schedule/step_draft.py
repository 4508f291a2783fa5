"""A step's plan in the making: which tokens of which requests, and what they push."""

from __future__ import annotations

from collections.abc import Iterator

from engine.kv.kv_cache import KvCache
from engine.kv.request_blocks import first_kept_block
from engine.request import BlockPush, ScheduledSeq, StepPlan
from engine.schedule.itl_budget import ItlBudget
from engine.schedule.live_request import Export, LiveRequest
from engine.schedule.step_work import StepWork
from kv_transfer.layout import BlockId


def block_pushes(
    request: LiveRequest,
    export: Export,
    num_complete: int,
    windows: list[int | None],
    block_size: int,
) -> Iterator[BlockPush]:
    """Yield a step's pushes: blocks from where the last push ended to the request's first
    `num_complete`. The first push includes cached blocks."""
    new = range(request.num_pushed_blocks, num_complete)
    for group, window in enumerate(windows):
        # The receiver has no block either for what the window has left by the prompt's end.
        kept = first_kept_block(window, request.num_tokens, block_size)
        first = max(new.start, kept)
        if first >= new.stop:
            continue
        ordinals = range(first - export.num_receiver_blocks, new.stop - export.num_receiver_blocks)
        table = request.blocks.tables[group][first : new.stop].tolist()
        yield BlockPush(
            export.handoff_id, group, tuple(ordinals), tuple(BlockId(block) for block in table)
        )


class StepDraft:
    """Own a step's budget. Whoever is scheduled first takes from it first."""

    def __init__(self, max_tokens: int, kv: KvCache, itl: ItlBudget) -> None:
        self._kv = kv
        self._itl = itl
        self._work = StepWork()
        self._num_tokens = 0
        self._seqs: list[ScheduledSeq] = []
        self._pushes: list[BlockPush] = []
        self.budget = max_tokens
        """Tokens that are left, and for which running streams can wait."""

    @property
    def is_empty(self) -> bool:
        return not self._seqs

    def limit_prompts(self) -> None:
        """Leave as many tokens as the running streams can wait for."""
        self.budget = self._itl.num_prompt_tokens(self._work, 0, self.budget)

    def schedule(self, request: LiveRequest) -> None:
        """Schedule what a request lacks, as far as its blocks and the budget allow; maybe
        nothing."""
        start = request.num_computed_tokens
        ready = self._kv.num_ready_tokens(request.blocks)
        num_new = min(request.num_left, self.budget, ready - start)
        if not request.decodes and num_new > 0:
            num_new = self._itl.num_prompt_tokens(self._work, start, num_new)
        if num_new <= 0:
            return  # its window waits for a block, or streams cannot wait
        end = start + num_new
        samples = end == request.num_tokens
        self._num_tokens += num_new
        self.budget -= num_new
        if request.decodes:
            self._work.add_decode(start)
        else:
            self._work.add_prompt(num_new, start)
            self.limit_prompts()
        tokens, tables = request.tokens_between(start, end), request.blocks.views
        scored = request.scored_after(start, end)
        self._seqs.append(ScheduledSeq(request.request_id, tokens, start, tables, samples, scored))
        if request.export is not None:
            num_complete = self._kv.num_blocks_of(end) if samples else end // self._kv.block_size
            self._pushes += block_pushes(
                request, request.export, num_complete, self._kv.windows, self._kv.block_size
            )
            request.num_pushed_blocks = max(request.num_pushed_blocks, num_complete)

    def plan(self, step: int, sink_messages: tuple[bytes, ...]) -> StepPlan:
        return StepPlan(
            step=step,
            seqs=tuple(self._seqs),
            pushes=tuple(self._pushes),
            sink_messages=sink_messages,
            num_tokens=self._num_tokens,
        )
